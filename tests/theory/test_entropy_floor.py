"""The entropy floor against brute force over rows, and against exact arithmetic where rows are too long."""

from __future__ import annotations

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sharpmax.theory.bounds import entropy_ceiling, entropy_floor

MANY = settings(max_examples=100, deadline=None)


def two_level(spread, n, top_count):
    return np.where(np.arange(n) < top_count, spread, 0.0)


@MANY
@given(st.floats(0, 60), st.integers(2, 60))
def test_it_is_the_least_entropy_of_all_two_level_rows(entropy_of, spread, n):
    best = min(entropy_of(two_level(spread, n, j)) for j in range(1, n))
    assert entropy_floor(spread, n) == pytest.approx(best, rel=1e-12)


@MANY
@given(hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-15, 15)), st.floats(0, 2), st.floats(0, 3))
def test_no_row_within_the_spread_falls_under_it(entropy_of, logits, beta, slack):
    spread = beta * np.ptp(logits)
    entropy = entropy_of(beta * logits)
    # Twice the same row: within its own spread, and within a wider one.
    assert entropy >= entropy_floor(spread, len(logits)) * (1 - 1e-12)
    assert entropy >= entropy_floor(spread + slack, len(logits)) * (1 - 1e-12)
    assert entropy <= entropy_ceiling(len(logits)) * (1 + 1e-12)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("spread", [0.2, 1.0, 2.5, 6.0])
def test_no_intermediate_level_helps(entropy_of, spread, n):
    levels = spread * np.linspace(0, 1, 5)
    rows = itertools.combinations_with_replacement(levels, n)
    best = min(entropy_of(np.array(row)) for row in rows)
    assert entropy_floor(spread, n) == pytest.approx(best, rel=1e-12)


def test_descent_from_random_rows_ends_no_lower(entropy_of):
    rng = np.random.default_rng(3)
    spread, n = 2.0, 12
    floor, found = entropy_floor(spread, n), math.inf
    for _ in range(20):
        logits = rng.uniform(0, spread, n)
        for _ in range(300):
            p = np.exp(logits) / np.exp(logits).sum()
            # dH/ds_k = −p_k·(ln p_k + H)
            gradient = -p * (np.log(p) + entropy_of(logits))
            logits = np.clip(logits - 20 * gradient, 0, spread)
        found = min(found, entropy_of(logits))
        assert found >= floor * (1 - 1e-12)
    assert found == pytest.approx(floor, rel=1e-9)


def test_a_single_item_at_the_top_is_not_the_sharpest_row(entropy_of):
    single = entropy_of(two_level(3.0, 100, 1))
    assert entropy_floor(3.0, 100) == pytest.approx(entropy_of(two_level(3.0, 100, 11)), rel=1e-12)
    assert entropy_floor(3.0, 100) < single - 0.6


@pytest.mark.parametrize(("spread", "n"), [(0.5, 2), (0.5, 3), (4.0, 10), (10.0, 1000), (30.0, 10**6)])
def test_a_single_item_is_best_while_the_spread_is_large_for_n(spread, n):
    others = (n - 1) * math.exp(-spread)
    assert entropy_floor(spread, n) == pytest.approx(math.log1p(others) + spread * others / (1 + others), rel=1e-13)


@MANY
@given(st.floats(1e-3, 40), st.integers(2, 10**9))
def test_the_entropy_lost_is_bounded_whatever_the_size(spread, n):
    u = -math.expm1(-spread)
    most = spread / u - 1 - math.log(spread / u)
    assert entropy_ceiling(n) - entropy_floor(spread, n) <= most + 1e-12


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0, 20.0])
def test_the_entropy_lost_tends_to_that_bound(spread):
    u = -math.expm1(-spread)
    lost = entropy_ceiling(1e15) - entropy_floor(spread, 1e15)
    assert lost == pytest.approx(spread / u - 1 - math.log(spread / u), abs=3e-8)


@MANY
@given(st.floats(0, 40), st.floats(0, 5), st.integers(1, 10**7), st.integers(1, 10**7))
def test_it_falls_with_the_spread_and_rises_with_the_size(spread, more_spread, n, more_items):
    here = entropy_floor(spread, n)
    assert entropy_floor(spread + more_spread, n) <= here * (1 + 1e-13)
    assert entropy_floor(spread, n + more_items) >= here * (1 - 1e-13)
    assert 0 <= here <= entropy_ceiling(n)


def exact_floor(spread, n):
    """The least two-level entropy near the real minimiser, in 400 digits."""
    with mpmath.workdps(400):
        d = mpmath.mpf(spread)
        u = -mpmath.expm1(-d)
        middle = int(n * mpmath.exp(-d) * (d - u) / u**2)
        best = mpmath.inf
        for j in {min(max(middle + step, 1), n - 1) for step in range(-2, 4)}:
            odds = (n - j) * mpmath.exp(-d) / j
            best = min(best, mpmath.log(j) + mpmath.log1p(odds) + d * odds / (1 + odds))
        return float(best)


@pytest.mark.parametrize("n", [2, 7, 10**6, 10**18, 10**300])
@pytest.mark.parametrize("spread", [1e-9, 1e-3, 1.0, 30.0, 690.0, 700.0, 744.0, 760.0, 1000.0, 1e4])
def test_extreme_inputs_agree_with_exact_arithmetic(spread, n):
    assert entropy_floor(spread, n) == pytest.approx(exact_floor(spread, n), rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("spread", [0.0, 1e-320, 1e-200, 1e-160])
@pytest.mark.parametrize("n", [1, 2, 3, 1000, 1e300])
def test_a_vanishing_spread_leaves_the_ceiling(spread, n):
    assert entropy_floor(spread, n) == pytest.approx(math.log(n), rel=1e-15)
    assert entropy_floor(0, n) == entropy_ceiling(n)


@pytest.mark.parametrize("spread", [0.0, 1.0, 1e4])
def test_a_single_item_has_no_entropy(spread):
    assert entropy_floor(spread, 1) == 0.0


@pytest.mark.parametrize("spread", [0.0, 1e-200, 1e-12])
def test_rounding_never_lifts_the_floor_over_the_ceiling(spread):
    n = np.arange(1, 5000)
    assert (entropy_floor(spread, n) <= entropy_ceiling(n)).all()
    assert (entropy_floor(0.0, n) == entropy_ceiling(n)).all()
