"""Bounds on the spread of logits against random heads and inputs, and against inputs that attain them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpmax.theory.spread import spread_from_product, spread_from_weights

SOME = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(1, 8)
BOTH = pytest.mark.parametrize("bound", [spread_from_product, spread_from_weights])


def random_matrices(seed, d, dy, dx):
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=(d, dy)), rng.normal(size=(d, dx))


def spread_of(Q, K, y, x, scale):
    """Spread of the logits of one query y `[Dy]` over inputs x `[n, Dx]`."""
    return np.ptp(scale * (x @ K.T) @ (Q @ y))


@SOME
@given(SEEDS, SIZES, SIZES, SIZES, st.integers(1, 20), st.sampled_from([0.0, 0.125, 1.0, 3.7]))
def test_no_head_spreads_further(seed, d, dy, dx, n, scale):
    rng, Q, K = random_matrices(seed, d, dy, dx)
    y, x = rng.normal(size=dy), rng.normal(size=(n, dx)) * rng.exponential(size=(n, 1))
    norms = np.linalg.norm(y), np.linalg.norm(x, axis=1).max()
    product, separate = spread_from_product(Q, K, *norms, scale), spread_from_weights(Q, K, *norms, scale)
    assert spread_of(Q, K, y, x, scale) <= product * (1 + 1e-12)
    assert product <= separate * (1 + 1e-12)


@SOME
@given(SEEDS, SIZES, SIZES, SIZES, st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0.1, 4))
def test_both_bounds_are_attained(seed, d, dy, dx, query_norm, key_norm, scale):
    """That of the product by aligned inputs, that of the norms by aligned matrices too."""
    _, Q, K = random_matrices(seed, d, dy, dx)
    left, _, right = np.linalg.svd(Q.T @ K)
    spread = spread_of(Q, K, query_norm * left[:, 0], key_norm * np.stack([right[0], -right[0]]), scale)
    assert spread_from_product(Q, K, query_norm, key_norm, scale) == pytest.approx(spread, rel=1e-12)
    q_left, _, q_right = np.linalg.svd(Q)
    k_left, _, k_right = np.linalg.svd(K)
    K = q_left @ k_left.T @ K  # turned so that both share their main output direction
    spread = spread_of(Q, K, query_norm * q_right[0], key_norm * np.stack([k_right[0], -k_right[0]]), scale)
    assert spread_from_weights(Q, K, query_norm, key_norm, scale) == pytest.approx(spread, rel=1e-12)


def test_matrices_that_meet_only_after_a_rotation():
    Q, K = np.diag([3.0, 0.0]), np.diag([0.0, 5.0])
    assert spread_from_product(Q, K, 1.0, 1.0) == pytest.approx(0.0, abs=1e-14)
    assert spread_from_product(0 * Q, K, 1.0, 1.0) == 0.0
    quarter_turn = np.array([[0.0, 1.0], [-1.0, 0.0]])
    spread = spread_of(Q, quarter_turn @ K, np.array([1.0, 0.0]), np.array([[0.0, 1.0], [0.0, -1.0]]), 1.0)
    assert spread == spread_from_weights(Q, K, 1.0, 1.0) == pytest.approx(30.0, rel=1e-15)


@BOTH
def test_heads_are_bounded_one_by_one(bound):
    rng = np.random.default_rng(0)
    Q, K = rng.normal(size=(3, 4, 9)), rng.normal(size=(3, 4, 7))
    norms = np.array([1.0, 0.5, 2.0])
    together = bound(Q, K, norms, 1.5, scale=0.5)
    np.testing.assert_allclose(together, [bound(Q[h], K[h], norms[h], 1.5, scale=0.5) for h in range(3)], rtol=1e-14)
    shared_key = bound(Q, K[0], 1.0, 1.0)  # grouped queries: many query heads, one key head
    np.testing.assert_allclose(shared_key, [bound(Q[h], K[0], 1.0, 1.0) for h in range(3)], rtol=1e-14)


@BOTH
def test_sizes_of_entries_that_cancel_neither_overflow_nor_underflow(bound):
    _, Q, K = random_matrices(1, 3, 4, 5)
    plain = pytest.approx(bound(Q, K, 1.0, 1.0), rel=1e-12)
    for of_query, of_key, norms in [(1e200, 1e200, 1e-200), (1e-200, 1e-200, 1e200), (1e200, 1e-200, 1.0)]:
        assert bound(of_query * Q, of_key * K, norms, norms) == plain
    assert bound(1e200 * Q, 1e200 * K, 1.0, 1.0) == np.inf


def test_entries_of_very_different_sizes_in_one_matrix():
    for matrix in (np.diag([1e200, 1e-200]), np.array([[1e200, 1e-200], [1e-200, 1e200]])):
        assert spread_from_product(matrix, np.eye(2) * 1e-200, 1.0, 1.0) == pytest.approx(2.0, rel=1e-12)
