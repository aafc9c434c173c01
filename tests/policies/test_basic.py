"""Constants, log-length and curves: one number, one formula, one table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sharpmax as sm
from sharpmax.errors import OutOfRangeWarning
from sharpmax.policies.basic import Constant, Curve, LogLength

anywhere = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
CURVES = st.integers(2, 8).flatmap(
    lambda n: st.builds(
        lambda knots, values, falling: Curve(
            tuple(k / 1000 for k in sorted(knots)), tuple(sorted(values, reverse=falling))
        ),
        st.lists(st.integers(0, 9000), min_size=n, max_size=n, unique=True),
        st.lists(st.floats(0, 20), min_size=n, max_size=n),
        st.booleans(),
    )
)


@given(CURVES)
@anywhere
def test_is_linear_interpolation_held_at_the_ends(rows_with, curve):
    h = np.concatenate([np.linspace(0, 10, 101), curve.knots])
    want = np.interp(h, curve.knots, curve.values)
    np.testing.assert_allclose(curve.beta(rows_with(h)).numpy(), want, rtol=1e-9, atol=1e-9)


@given(st.floats(0.01, 5), st.sampled_from([1e-9, 1e-8, 3e-8, 1e-7, 1e-6, 1e-4]))
@anywhere
def test_a_steep_step_survives_float32(beta_of, at, width):
    """Two knots may round to the same float32, and the step between them must still be taken."""
    curve = Curve((at, at + width), (1.0, 4.0))
    uniform = torch.zeros(3, 1000)
    uniform[1, 0] = 9.0
    uniform[2, 0] = 60.0
    beta = beta_of(curve, uniform)
    want = [4.0 if float(h) > at else 1.0 for h in sm.entropy(uniform.double())]
    assert beta.tolist() == pytest.approx(want, rel=1e-6)


def test_says_once_when_it_is_left(rows_with):
    curve = Curve((1.0, 2.0), (1.0, 3.0))
    curve.beta(rows_with([1.0, 2.0]))
    with pytest.warns(OutOfRangeWarning, match="outside 1 … 2"):
        curve.beta(rows_with(2.5))
    curve.beta(rows_with(2.5))


class TestFit:
    @given(
        st.lists(st.tuples(st.floats(0, 6), st.floats(0.5, 9)), min_size=2, max_size=40),
        st.integers(2, 12),
        st.booleans(),
    )
    @settings(max_examples=100)
    def test_whatever_is_shown_the_result_is_a_monotone_curve(self, pairs, knots, increasing):
        x, y = zip(*pairs, strict=True)
        if np.unique(np.quantile(x, np.linspace(0, 1, knots))).size < 2:
            return
        curve = Curve.fit(x, y, knots=knots, increasing=increasing)  # would refuse values out of order
        assert 2 <= len(curve.knots) <= knots
        assert curve.knots[0] == min(x)
        assert curve.knots[-1] == max(x)
        assert min(y) - 1e-9 <= min(curve.values) <= max(curve.values) <= max(y) + 1e-9
        assert (curve.values[-1] >= curve.values[0]) == increasing or curve.values[-1] == curve.values[0]

    def test_is_the_isotonic_regression_of_the_data(self):
        """As many knots as points: pooled neighbours get their mean, the rest stays as it is."""
        curve = Curve.fit([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 5.0], knots=4)
        assert curve.knots == (1.0, 2.0, 3.0, 4.0)
        assert curve.values == pytest.approx((1.0, 2.5, 2.5, 5.0))

    def test_can_fall(self):
        curve = Curve.fit([1.0, 2.0, 3.0, 4.0], [5.0, 2.0, 3.0, 1.0], knots=4, increasing=False)
        assert curve.values == pytest.approx((5.0, 2.5, 2.5, 1.0))

    @pytest.mark.parametrize("beta", [[1.0, 3.0, 2.0, 4.0], [3.0, 1.0, 4.0, 2.0]])
    def test_rows_of_one_entropy_count_together(self, beta):
        """Their order in the data says nothing, so it must not matter."""
        curve = Curve.fit([1.0, 1.0, 2.0, 2.0], beta, knots=2)
        assert curve.values == pytest.approx((2.0, 3.0))
        # Three rows against one, out of order: their common mean is 3, not 2.
        assert Curve.fit([1.0, 1.0, 1.0, 2.0], [4.0, 4.0, 4.0, 0.0]).values[0] == pytest.approx(3.0)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 2.0, 1e6])
def test_every_row_with_a_choice_gets_the_constant(beta_of, value):
    visible = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert beta_of(Constant(value), torch.randn(3, 3), visible).tolist() == [value, 1, 1]
    row = torch.randn(4, 9, dtype=torch.float64)
    torch.testing.assert_close(sm.softmax(row, policy=Constant(value)), (value * row).softmax(-1), rtol=1e-9, atol=0)
    assert Constant(value).needs == frozenset()
    assert Constant(value).is_identity == (value == 1.0)
    assert not Constant(1.0 + 1e-12).is_identity


def test_a_constant_costs_no_statistics_that_are_asked_for():
    q, k = torch.randn(1, 3, 4), torch.randn(1, 5, 4)
    _, stats = sm.attention(q, k, k, policy=Constant(2.0), return_stats=True)
    assert stats.measured == ("count", "max", "lse", "mean", "var")


@given(st.integers(2, 400), st.floats(1.5, 1000), st.floats(0, 3))
def test_log_length_follows_its_formula(beta_of, n, reference, floor):
    want = max(floor, math.log(n) / math.log(reference))
    assert beta_of(LogLength(reference, floor), torch.randn(n)).item() == pytest.approx(want, rel=1e-14)
    assert LogLength(reference).needs == {"count"}


def test_log_length_of_every_row_of_causal_attention_has_its_own_length():
    q, k = torch.randn(2, 1, 1, 6, 4, dtype=torch.float64).unbind()
    policy = LogLength(2)
    out = sm.attention(q, k, k, is_causal=True, policy=policy)
    for i in range(6):
        beta = max(1.0, math.log(i + 1) / math.log(2))
        p = (beta * 0.5 * (q[0, 0, i] @ k[0, 0, : i + 1].T)).softmax(-1)
        torch.testing.assert_close(out[0, 0, i], p @ k[0, 0, : i + 1], rtol=1e-12, atol=1e-14)


def test_a_fitted_range_of_lengths_is_watched(beta_of):
    policy = LogLength(4, fitted_on=(2, 16))
    beta_of(policy, torch.randn(16))
    with pytest.warns(OutOfRangeWarning, match="have count outside 2 … 16"):
        beta_of(policy, torch.randn(17))
    beta_of(policy, torch.randn(18))
    assert LogLength(4).fitted_range is None
