"""The weight-norm proposition against heads with random matrices and inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sharpmax.theory.spread as finite
from sharpmax.errors import ArgumentError
from sharpmax.theory.spread import spread_from_product, spread_from_weights, spread_over_inputs

MANY = settings(max_examples=100, deadline=None)

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 8)


def random_head(seed, d, dy, dx):
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=(d, dy)), rng.normal(size=(d, dx))


def spread_of(Q, K, y, x, scale):
    """Spread of the logits of one query y `[Dy]` over inputs x `[n, Dx]`."""
    return np.ptp(scale * (x @ K.T) @ (Q @ y))


@MANY
@given(SEEDS, SIZES, SIZES, SIZES, st.integers(1, 20), st.sampled_from([0.0, 0.125, 1.0, 3.7]))
def test_no_head_spreads_further(seed, d, dy, dx, n, scale):
    rng, Q, K = random_head(seed, d, dy, dx)
    y, x = rng.normal(size=dy), rng.normal(size=(n, dx)) * rng.exponential(size=(n, 1))
    norms = np.linalg.norm(y), np.linalg.norm(x, axis=1).max()
    spread = spread_of(Q, K, y, x, scale)
    assert spread <= spread_from_product(Q, K, *norms, scale) * (1 + 1e-12)
    assert spread <= spread_from_weights(Q, K, *norms, scale) * (1 + 1e-12)


@MANY
@given(SEEDS, SIZES, SIZES, SIZES, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 4))
def test_the_product_bound_is_attained_by_aligned_inputs(seed, d, dy, dx, query_norm, key_norm, scale):
    _, Q, K = random_head(seed, d, dy, dx)
    left, _, right = np.linalg.svd(Q.T @ K)
    x = key_norm * np.stack([right[0], -right[0]])
    spread = spread_of(Q, K, query_norm * left[:, 0], x, scale)
    assert spread_from_product(Q, K, query_norm, key_norm, scale) == pytest.approx(spread, rel=1e-12)


@MANY
@given(SEEDS, SIZES, SIZES, SIZES, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 4))
def test_the_norm_bound_is_attained_by_aligned_matrices(seed, d, dy, dx, query_norm, key_norm, scale):
    _, Q, K = random_head(seed, d, dy, dx)
    q_left, _, q_right = np.linalg.svd(Q)
    k_left, _, k_right = np.linalg.svd(K)
    K = q_left @ k_left.T @ K  # turned so that both share their main output direction
    spread = spread_of(Q, K, query_norm * q_right[0], key_norm * np.stack([k_right[0], -k_right[0]]), scale)
    assert spread_from_weights(Q, K, query_norm, key_norm, scale) == pytest.approx(spread, rel=1e-12)


@MANY
@given(SEEDS, SIZES, SIZES, SIZES)
def test_the_product_bound_never_exceeds_the_norm_bound(seed, d, dy, dx):
    _, Q, K = random_head(seed, d, dy, dx)
    assert spread_from_product(Q, K, 2.0, 3.0) <= spread_from_weights(Q, K, 2.0, 3.0) * (1 + 1e-12)


def test_matrices_that_never_meet_have_no_spread():
    Q, K = np.diag([3.0, 0.0]), np.diag([0.0, 5.0])
    assert spread_from_product(Q, K, 1.0, 1.0) == pytest.approx(0.0, abs=1e-14)
    assert spread_from_weights(Q, K, 1.0, 1.0) == pytest.approx(30.0, rel=1e-15)
    assert spread_from_product(0 * Q, K, 1.0, 1.0) == 0.0


def test_a_rotation_between_the_matrices_is_covered_by_the_norm_bound_only():
    Q, K = np.diag([3.0, 0.0]), np.diag([0.0, 5.0])
    quarter_turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    spread = spread_of(Q, quarter_turn @ K, np.array([1.0, 0.0]), np.array([[0.0, 1.0], [0.0, -1.0]]), 1.0)
    assert spread == spread_from_weights(Q, K, 1.0, 1.0)
    assert spread > spread_from_product(Q, K, 1.0, 1.0) + 1


@pytest.mark.parametrize("bound", [spread_from_product, spread_from_weights])
def test_heads_are_bounded_one_by_one(bound):
    rng = np.random.default_rng(0)
    Q, K = rng.normal(size=(3, 4, 9)), rng.normal(size=(3, 4, 7))
    norms = np.array([1.0, 0.5, 2.0])
    together = bound(Q, K, norms, 1.5, scale=0.5)
    one_by_one = [bound(Q[h], K[h], norms[h], 1.5, scale=0.5) for h in range(3)]
    np.testing.assert_allclose(together, one_by_one, rtol=1e-14)
    shared_key = bound(Q, K[0], 1.0, 1.0)  # grouped queries: many query heads, one key head
    np.testing.assert_allclose(shared_key, [bound(Q[h], K[0], 1.0, 1.0) for h in range(3)], rtol=1e-14)


@pytest.mark.parametrize("bound", [spread_from_product, spread_from_weights])
def test_sizes_of_entries_that_cancel_do_not_overflow(bound):
    _, Q, K = random_head(1, 3, 4, 5)
    plain = bound(Q, K, 1.0, 1.0)
    assert bound(1e200 * Q, 1e200 * K, 1e-200, 1e-200) == pytest.approx(plain, rel=1e-12)
    assert bound(1e200 * Q, 1e-200 * K, 1.0, 1.0) == pytest.approx(plain, rel=1e-12)
    assert bound(1e200 * Q, 1e200 * K, 1.0, 1.0) == np.inf


EYE = np.eye(2)


@pytest.mark.parametrize("bound", [spread_from_product, spread_from_weights])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(2), EYE, 1.0, 1.0), r"^Q: got shape \(2,\)"),
        ((EYE, np.ones((2, 0)), 1.0, 1.0), r"^K: got shape \(2, 0\)"),
        ((EYE, np.eye(3), 1.0, 1.0), r"^Q, K: got shapes .* same D"),
        ((EYE * np.nan, EYE, 1.0, 1.0), "^Q: got nan"),
        ((EYE, EYE, -1.0, 1.0), "^query_norm: got -1.0"),
        ((EYE, EYE, 1.0, np.inf), "^key_norm: got inf"),
        ((EYE, EYE, 1.0, 1.0, -0.5), "^scale: got -0.5"),
        ((np.ones((3, 2, 2)), EYE, np.ones(4), 1.0), "Q, K, query_norm, key_norm, scale: got shapes"),
    ],
)
def test_mistakes_are_named(bound, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        bound(*arguments)


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
def test_mistakes_of_inputs_are_named(arguments, options, message):
    with pytest.raises(ArgumentError, match=message):
        spread_over_inputs(*arguments, **options)
