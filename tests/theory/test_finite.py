"""The spread over inputs that are known one by one, against every pair of them written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sharpmax.theory.spread as finite
from sharpmax.errors import ArgumentError
from sharpmax.theory.spread import spread_over_inputs

SOME = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def by_hand(queries, keys, pairs):
    """The largest spread if each pair may turn as it likes for each key."""
    best = 0.0
    for q in queries:
        tops, bottoms = [], []
        for k in keys:
            still = q[2 * pairs :] @ k[2 * pairs :]
            turned = sum(np.hypot(q[b], q[b + pairs]) * np.hypot(k[b], k[b + pairs]) for b in range(pairs))
            tops.append(still + turned)
            bottoms.append(still - turned)
        best = max(best, max(tops) - min(bottoms))
    return best


def heavy_tailed(seed, pairs, still):
    rng = np.random.default_rng(seed)
    width = 2 * pairs + still
    return rng.normal(size=(30, width)) * rng.exponential(size=(30, 1)) ** 2, rng.normal(size=(20, width)) + 3.0


@SOME
@given(SEEDS, st.integers(0, 3), st.integers(0, 3))
def test_it_is_the_largest_over_all_pairs(seed, pairs, still):
    queries, keys = heavy_tailed(seed, pairs, max(still, 1 - pairs))
    exact = 0.7 * by_hand(queries, keys, pairs)
    found = spread_over_inputs(queries, keys, 0.7, pairs=pairs)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-4) + 1e-12


def test_rows_left_out_could_not_have_been_the_largest(monkeypatch):
    """The same whether all queries are taken at once or one at a time, in the order of what they could reach."""
    queries, keys = heavy_tailed(1, 2, 2)
    whole = spread_over_inputs(queries, keys, pairs=2)
    monkeypatch.setattr(finite, "_AT_ONCE", 1)
    assert spread_over_inputs(queries, keys, pairs=2) == pytest.approx(whole, rel=1e-12)
    assert whole == pytest.approx(by_hand(queries, keys, 2), rel=1e-4)


def test_rounding_is_added_never_lost():
    """Large numbers that cancel: float32 alone would be wrong by more than the spread."""
    queries, keys = np.array([[1e4, 1e4]]), np.array([[1e4, -1e4], [1e4, -1e4 + 1e-4]])
    assert spread_over_inputs(queries, keys) >= 1.0


def test_what_all_keys_share_does_not_count_unless_it_turns():
    queries, keys = heavy_tailed(2, 1, 3)
    plain = spread_over_inputs(queries, keys, pairs=1)
    assert spread_over_inputs(queries, np.add(keys, [0, 0, 9, -5, 2]), pairs=1) == pytest.approx(plain, rel=1e-4)
    assert spread_over_inputs(queries, np.add(keys, [9, 0, 0, 0, 0]), pairs=1) > 1.2 * plain


def test_tensors_give_the_same():
    queries, keys = heavy_tailed(3, 2, 1)
    found = spread_over_inputs(torch.tensor(queries), torch.tensor(keys), pairs=2)
    assert found == pytest.approx(spread_over_inputs(queries, keys, pairs=2), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((np.ones(3), np.ones((2, 3))), {}, r"^queries: got shape \(3,\)"),
        ((np.ones((2, 3)), np.ones((0, 3))), {}, r"^keys: got shape \(0, 3\)"),
        ((np.ones((2, 3)), np.ones((2, 4))), {}, "^queries, keys: got shapes .* same D"),
        ((np.ones((2, 3)), np.ones((2, 3))), {"pairs": 2}, "^pairs: got 2"),
        ((np.ones((2, 3)), np.ones((2, 3)), -1.0), {}, "^scale: got -1.0"),
        ((np.ones((2, 3)) * np.inf, np.ones((2, 3))), {}, "^queries: got inf"),
    ],
)
def test_mistakes_are_named(arguments, options, message):
    with pytest.raises(ArgumentError, match=message):
        spread_over_inputs(*arguments, **options)
