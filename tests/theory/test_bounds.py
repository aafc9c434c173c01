"""Weight bounds, horizon and required spread, against rows computed from the definition of softmax."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sharpmax.theory.bounds import horizon, loose_weight_bounds, required_spread, weight_bounds

MANY = settings(max_examples=100, deadline=None)

LOGITS = hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-20, 20))
SPREADS = st.floats(0, 300)
COUNTS = st.integers(1, 60)
MASSES = st.floats(1e-6, 1 - 1e-6)


@MANY
@given(LOGITS, st.floats(0, 3))
def test_no_weight_leaves_the_bounds(softmax, logits, beta):
    weights = softmax(beta * logits)
    spread = beta * np.ptp(logits)
    for low, high in (weight_bounds(spread, len(logits)), loose_weight_bounds(spread, len(logits))):
        assert weights.min() >= low * (1 - 1e-12)
        assert weights.max() <= high * (1 + 1e-12)


@MANY
@given(SPREADS, COUNTS)
def test_both_bounds_are_attained(softmax, spread, n):
    one_apart = np.zeros(n)
    one_apart[0] = spread
    low, high = weight_bounds(spread, n)
    assert high == pytest.approx(softmax(one_apart)[0], rel=1e-12)
    assert low == pytest.approx(softmax(-one_apart)[0], rel=1e-12)


@MANY
@given(st.floats(1e-3, 300), st.integers(2, 10**6))
def test_tight_bounds_lie_strictly_inside_the_loose_ones(spread, n):
    low, high = weight_bounds(spread, n)
    loose_low, loose_high = loose_weight_bounds(spread, n)
    assert loose_low < low < high < loose_high


@MANY
@given(st.integers(1, 10**15))
def test_equal_logits_leave_no_room(n):
    assert weight_bounds(0, n) == (1 / n, 1 / n)
    assert loose_weight_bounds(0, n) == (1 / n, 1 / n)


@pytest.mark.parametrize("spread", [0.0, 1e-300, 3.0, 1e4])
def test_a_single_item_holds_everything(spread):
    assert weight_bounds(spread, 1) == (1.0, 1.0)


@pytest.mark.parametrize("n", [2, 3, 1000, 10**18, 10**300])
@pytest.mark.parametrize("spread", [0.0, 1e-12, 1.0, 40.0, 690.0, 720.0, 745.0, 760.0, 1400.0, 1e4])
def test_extreme_bounds_agree_with_exact_arithmetic(spread, n):
    with mpmath.workdps(60):
        e = mpmath.exp(spread)
        exact = [1 / (1 + (n - 1) * e), e / (e + n - 1), 1 / (n * e), e / n]
        expected = [float(x) for x in exact]
    computed = [*weight_bounds(spread, n), *loose_weight_bounds(spread, n)]
    # Below 1e-300 float64 itself runs out of digits.
    assert computed == pytest.approx(expected, rel=1e-13, abs=1e-300)


@pytest.mark.parametrize(("spread", "n"), [(720.0, 2), (1000.0, 10**300), (400.0, 10**100)])
def test_results_that_fit_survive_intermediates_that_do_not(spread, n):
    low, high = weight_bounds(spread, n)
    loose_high = loose_weight_bounds(spread, n)[1]
    with mpmath.workdps(60):
        assert high == pytest.approx(float(1 / (1 + (n - 1) * mpmath.exp(-spread))), rel=1e-13)
        assert loose_high == pytest.approx(float(mpmath.exp(spread) / n), rel=1e-13)
        # Subnormal numbers hold few digits, but this one is not zero.
        assert low == pytest.approx(float(1 / (1 + (n - 1) * mpmath.exp(spread))), rel=1e-9, abs=0)


@MANY
@given(st.floats(0, 25), MASSES)
def test_at_the_horizon_the_top_weight_is_the_mass(spread, mass):
    n = horizon(spread, mass)
    assert weight_bounds(spread, n)[1] == pytest.approx(mass, rel=1e-12)


@MANY
@given(st.floats(0, 6), st.floats(0.05, 0.95))
def test_the_horizon_parts_the_sizes_that_can_from_those_that_cannot(softmax, spread, mass):
    def top_weight(n):
        return softmax(np.r_[spread, np.zeros(n - 1)])[0]

    last = math.floor(horizon(spread, mass))
    assert top_weight(last) >= mass * (1 - 1e-12)
    assert top_weight(last + 1) < mass * (1 + 1e-12)


@MANY
@given(st.floats(0, 690), MASSES)
def test_required_spread_undoes_the_horizon(spread, mass):
    n = horizon(spread, mass)
    # n − 1 keeps fewer digits than n when n is close to 1, which is where this error comes from.
    slack = 1e-12 + 4e-16 * n / (n - 1)
    assert required_spread(n, mass) == pytest.approx(spread, rel=1e-12, abs=slack)


@MANY
@given(st.floats(1, 1e15), MASSES)
def test_the_horizon_undoes_required_spread(n, mass):
    assert horizon(required_spread(n, mass), mass) == pytest.approx(max(n, 1 / mass), rel=1e-12)


@MANY
@given(st.floats(0, 30), st.floats(0.01, 5), st.floats(1, 1e6), st.floats(1.01, 10), st.floats(0.01, 0.9))
def test_every_bound_moves_the_right_way(spread, more_spread, n, growth, mass):
    low, high = weight_bounds([spread, spread + more_spread, spread], [n + 1, n + 1, (n + 1) * growth])
    assert low[0] > low[1]
    assert low[0] > low[2]
    assert high[0] < high[1] or high[0] > 1 - 1e-12  # so close to 1 that rounding decides
    assert high[0] > high[2] or high[0] > 1 - 1e-12
    assert horizon(spread, mass) < horizon(spread + more_spread, mass)
    assert horizon(spread, mass) > horizon(spread, mass + 0.05)
    assert required_spread(n, mass) <= required_spread(n * growth, mass)
    assert required_spread(n, mass) <= required_spread(n, mass + 0.05)


def test_required_spread_rises_once_it_is_above_zero():
    spreads = required_spread(2.0 ** np.arange(2, 1000), 0.7)
    assert (np.diff(spreads) > 0).all()
    assert spreads[-1] == pytest.approx(999 * math.log(2) + math.log(0.7 / 0.3), rel=1e-15)


def test_values_known_in_closed_form():
    assert horizon(0.0) == 2.0
    assert horizon(math.log(9), 0.9) == pytest.approx(2.0, rel=1e-15)
    assert required_spread(1, 0.999) == 0.0
    assert required_spread(2, 0.5) == 0.0
    assert required_spread(4, 0.25) == pytest.approx(0.0, abs=1e-15)
    assert required_spread(5, 0.1) == 0.0
    assert required_spread(17, 0.5) == pytest.approx(math.log(16), rel=1e-15)


@pytest.mark.parametrize("spread", [710.0, 1500.0, 1e4, 1e308])
def test_a_horizon_beyond_float64_is_infinite(spread):
    assert horizon(spread) == math.inf


def test_the_horizon_is_finite_wherever_it_fits():
    mass = 1 - 2.0**-40
    with mpmath.workdps(60):
        expected = 1 + mpmath.exp(720) * (1 - mpmath.mpf(mass)) / mpmath.mpf(mass)
    assert horizon(720.0, mass) == pytest.approx(float(expected), rel=1e-13)


@pytest.mark.parametrize("mass", [1e-300, 1 - 1e-16])
def test_required_spread_of_extreme_inputs_is_finite(mass):
    with mpmath.workdps(60):
        expected = mpmath.log((mpmath.mpf(10) ** 300 - 1) * mpmath.mpf(mass) / (1 - mpmath.mpf(mass)))
    assert required_spread(1e300, mass) == pytest.approx(float(expected), rel=1e-13, abs=1e-12)
