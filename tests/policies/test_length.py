"""β that follows the number of visible keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sharpmax as sm
from sharpmax.errors import OutOfRangeWarning
from sharpmax.policies.basic import LogLength


@given(st.integers(2, 400), st.floats(1.5, 1000), st.floats(0, 3))
def test_formula(beta_of, n, reference, floor):
    want = max(floor, math.log(n) / math.log(reference))
    assert beta_of(LogLength(reference, floor), torch.randn(n)).item() == pytest.approx(want, rel=1e-14)


def test_nothing_changes_at_the_reference_and_below(beta_of):
    policy = LogLength(16)
    assert beta_of(policy, torch.randn(16)).item() == 1.0
    assert beta_of(policy, torch.randn(5)).item() == 1.0
    assert beta_of(policy, torch.randn(17)).item() > 1.0


@pytest.mark.parametrize("padding", [1, 7, 500])
@pytest.mark.parametrize("filler", [0.0, -math.inf, math.nan])
def test_padding_has_no_effect(beta_of, padding, filler):
    policy = LogLength(4)
    row = torch.randn(20, dtype=torch.float64)
    padded = torch.cat([row, torch.full((padding,), filler, dtype=torch.float64)])
    visible = torch.arange(20 + padding) < 20
    assert torch.equal(beta_of(policy, padded, visible), beta_of(policy, row))
    torch.testing.assert_close(
        sm.softmax(padded, policy=policy, mask=visible)[:20], sm.softmax(row, policy=policy), rtol=1e-13, atol=0
    )


def test_every_row_of_causal_attention_has_its_own_length():
    q, k = torch.randn(2, 1, 1, 6, 4, dtype=torch.float64).unbind()
    policy = LogLength(2)
    out = sm.attention(q, k, k, is_causal=True, policy=policy)
    for i in range(6):
        beta = max(1.0, math.log(i + 1) / math.log(2))
        p = (beta * 0.5 * (q[0, 0, i] @ k[0, 0, : i + 1].T)).softmax(-1)
        torch.testing.assert_close(out[0, 0, i], p @ k[0, 0, : i + 1], rtol=1e-12, atol=1e-14)


def test_reads_counts_alone():
    assert LogLength(16).needs == {"count"}


def test_a_fitted_range_is_watched(beta_of):
    policy = LogLength(4, fitted_on=(2, 16))
    beta_of(policy, torch.randn(16))
    with pytest.warns(OutOfRangeWarning, match="have count outside 2 … 16"):
        beta_of(policy, torch.randn(17))
    beta_of(policy, torch.randn(18))
    assert LogLength(4).fitted_range is None
