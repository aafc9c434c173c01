"""Constants, log-length and curves: one number, one formula, one table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sharpmax as sm
from sharpmax.errors import OutOfRangeWarning
from sharpmax.policies.basic import Constant, Curve, LogLength
from tests.policies.rows import beta_of, rows_with

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
def test_is_linear_interpolation_held_at_the_ends(curve):
    h = np.concatenate([np.linspace(0, 10, 101), curve.knots])
    want = np.interp(h, curve.knots, curve.values)
    np.testing.assert_allclose(curve.beta(rows_with(h)).numpy(), want, rtol=1e-9, atol=1e-9)


@given(st.floats(0.01, 5), st.sampled_from([1e-9, 1e-8, 3e-8, 1e-7, 1e-6, 1e-4]))
@anywhere
def test_a_steep_step_survives_float32(at, width):
    """Two knots may round to the same float32, and the step between them must still be taken."""
    curve = Curve((at, at + width), (1.0, 4.0))
    uniform = torch.zeros(3, 1000)
    uniform[1, 0] = 9.0
    uniform[2, 0] = 60.0
    beta = beta_of(curve, uniform)
    want = [4.0 if float(h) > at else 1.0 for h in sm.entropy(uniform.double())]
    assert beta.tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 2.0, 1e6])
def test_every_row_with_a_choice_gets_the_constant(value):
    visible = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    assert beta_of(Constant(value), torch.randn(3, 3), visible).tolist() == [value, 1, 1]
    row = torch.randn(4, 9, dtype=torch.float64)
    torch.testing.assert_close(sm.softmax(row, policy=Constant(value)), (value * row).softmax(-1), rtol=1e-9, atol=0)
    assert Constant(value).needs == frozenset()
    assert Constant(value).is_identity == (value == 1.0)
    assert not Constant(1.0 + 1e-12).is_identity


@given(st.integers(2, 400), st.floats(1.5, 1000), st.floats(0, 3))
def test_log_length_follows_its_formula(n, reference, floor):
    want = max(floor, math.log(n) / math.log(reference))
    assert beta_of(LogLength(reference, floor), torch.randn(n)).item() == pytest.approx(want, rel=1e-14)
    assert LogLength(reference).needs == {"count"}


def test_a_fitted_range_of_lengths_is_watched():
    policy = LogLength(4, fitted_on=(2, 16))
    beta_of(policy, torch.randn(16))
    with pytest.warns(OutOfRangeWarning, match="have count outside 2 … 16"):
        beta_of(policy, torch.randn(17))
    beta_of(policy, torch.randn(18))
    assert LogLength(4).fitted_range is None
