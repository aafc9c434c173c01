"""One β for every row."""

from __future__ import annotations

import pytest
import torch

import sharpmax as sm
from sharpmax.policies.basic import Constant


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 2.0, 1e6])
def test_every_row_with_a_choice_gets_the_value(beta_of, value):
    visible = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert beta_of(Constant(value), torch.randn(3, 3), visible).tolist() == [value, 1, 1]


def test_needs_no_statistics():
    assert Constant(2.0).needs == frozenset()
    q, k = torch.randn(1, 3, 4), torch.randn(1, 5, 4)
    _, stats = sm.attention(q, k, k, policy=Constant(2.0), return_stats=True)
    assert stats.measured == ("count", "max", "lse", "mean", "var")


def test_only_1_is_the_identity():
    assert Constant(1.0).is_identity
    assert Constant(1).is_identity
    assert not Constant(1.0 + 1e-12).is_identity


def test_is_softmax_of_scaled_logits():
    row = torch.randn(4, 9, dtype=torch.float64)
    torch.testing.assert_close(sm.softmax(row, policy=Constant(3.0)), (3 * row).softmax(-1), rtol=1e-13, atol=0)
