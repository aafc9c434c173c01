"""Places where a small mistake in a formula would show nowhere else."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpmax.errors import ArgumentError
from sharpmax.theory.bounds import entropy_floor, top_weight_limit, top_weight_limit_from_sample, weight_bounds
from sharpmax.theory.rotary import spread_from_rotary
from sharpmax.theory.spread import spread_from_product, spread_from_weights, spread_over_inputs


@pytest.mark.parametrize("n", [1.0 + 1e-9, 1.25, 1.5, 2.0, 2.5])
def test_bounds_between_one_item_and_two(n):
    """Sizes need not be whole: the formulas hold between 1 and 2 as well."""
    low, high = weight_bounds(1.0, n)
    assert low == pytest.approx(1 / (1 + (n - 1) * math.e), rel=1e-14)
    assert high == pytest.approx(math.e / (math.e + n - 1), rel=1e-14)


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0, 4.0])
def test_the_floor_finds_small_counts_of_items_at_the_top(entropy_of, spread):
    """Two and three items at the top are told from one and two: every n in turn, against all counts."""
    for n in range(2, 70):
        best = min(entropy_of(np.where(np.arange(n) < j, spread, 0.0)) for j in range(1, n))
        assert entropy_floor(spread, n) == pytest.approx(best, rel=1e-13), n


def test_the_rounding_that_is_forgiven_grows_with_the_logits():
    assert top_weight_limit(1e6, 1e6 + 1e-5) == 1.0
    with pytest.raises(ArgumentError, match=r"^log_mean_exp: got a value .* above top"):
        top_weight_limit(1.0, 1.0 + 1e-5)


def test_a_sample_is_of_beta_1_unless_told():
    row = [0.0, 0.5, 2.0]
    assert top_weight_limit_from_sample(row) == top_weight_limit_from_sample(row, 1.0)
    assert top_weight_limit_from_sample(row) == pytest.approx(3 * math.exp(2) / sum(map(math.exp, row)), rel=1e-14)


def test_one_row_under_its_upper_end_does_not_excuse_another():
    with pytest.raises(ArgumentError, match=r"^top: got a value 0.5 under the largest logit"):
        top_weight_limit_from_sample([[0.0, 1.0], [0.0, 1.0]], 1.0, top=[2.0, 0.5])


def every_pair(queries, keys, pairs):
    """The largest spread if each pair of entries may turn as it likes for each key, written out."""
    still = queries[:, 2 * pairs :] @ keys[:, 2 * pairs :].T
    lengths = [np.hypot(x[:, :pairs], x[:, pairs : 2 * pairs]) for x in (queries, keys)]
    turned = lengths[0] @ lengths[1].T
    return ((still + turned).max(1) - (still - turned).min(1)).max()


@pytest.mark.parametrize(("pairs", "still"), [(0, 2), (0, 5), (1, 0), (2, 0), (1, 3)])
@pytest.mark.parametrize("size", [0.05, 0.3, 2.0])
def test_no_query_is_left_out_that_spreads_furthest(monkeypatch, pairs, still, size):
    """One query at a time, in the order of what they could reach at most: too low an estimate would end the search."""
    monkeypatch.setattr("sharpmax.theory.spread._AT_ONCE", 1)
    rng = np.random.default_rng(0)
    for _ in range(20):
        queries = size * rng.normal(size=(12, 2 * pairs + still)) * rng.exponential(size=(12, 1))
        keys = size * rng.normal(size=(9, 2 * pairs + still)) * rng.exponential(size=(9, 1))
        exact = every_pair(queries, keys, pairs)
        assert exact * (1 - 1e-9) <= spread_over_inputs(queries, keys, pairs=pairs) <= exact * (1 + 1e-4)


def test_small_spreads_stay_small():
    assert spread_over_inputs([[1e-3]], [[1.0], [2.0]]) == pytest.approx(1e-3, rel=1e-5)
    assert spread_over_inputs([[0.0]], [[1.0], [2.0]]) == 0.0


@pytest.mark.parametrize(("pairs", "still"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_what_does_not_turn_may_be_written_in_any_basis(pairs, still):
    """Q multiplied by a matrix and K by its transposed inverse, in the rows that no position turns."""
    rng = np.random.default_rng(pairs)
    width = 2 * pairs + still
    Q, K, q0 = rng.normal(size=(width, 5)), rng.normal(size=(width, 6)), rng.normal(size=width)
    plain = spread_from_rotary(Q, K, 1.0, 2.0, pairs=pairs, query_bias=q0)
    change = np.eye(width)
    change[2 * pairs :, 2 * pairs :] = rng.normal(size=(still, still)) + 3 * np.eye(still)
    other = spread_from_rotary(change @ Q, np.linalg.inv(change).T @ K, 1.0, 2.0, pairs=pairs, query_bias=change @ q0)
    assert other == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("size", [1e-150, 1e-60, 1e-30, 1e30])
def test_the_rotary_bound_grows_with_the_matrices_whatever_their_size(size):
    rng = np.random.default_rng(0)
    Q, K, q0, k0 = rng.normal(size=(6, 4)), rng.normal(size=(6, 5)), rng.normal(size=6), rng.normal(size=6)
    plain = spread_from_rotary(Q, K, 1.0, 2.0, pairs=2, query_bias=q0, key_bias=k0)
    scaled = spread_from_rotary(size * Q, K, 1.0, 2.0, pairs=2, query_bias=size * q0, key_bias=k0)
    assert scaled == pytest.approx(size * plain, rel=1e-9)


@pytest.mark.parametrize("bound", [spread_from_product, spread_from_weights])
def test_sizes_of_entries_that_cancel_do_not_underflow(bound):
    rng = np.random.default_rng(1)
    Q, K = rng.normal(size=(3, 4)), rng.normal(size=(3, 5))
    assert bound(1e-200 * Q, 1e-200 * K, 1e200, 1e200) == pytest.approx(bound(Q, K, 1.0, 1.0), rel=1e-12)


def test_entries_of_very_different_sizes_in_one_matrix():
    assert spread_from_product(np.diag([1e200, 1e-200]), np.eye(2) * 1e-200, 1.0, 1.0) == pytest.approx(2.0, rel=1e-12)
    full = np.array([[1e200, 1e-200], [1e-200, 1e200]])
    assert spread_from_product(full, np.eye(2) * 1e-200, 1.0, 1.0) == pytest.approx(2.0, rel=1e-12)
