"""Places where a small mistake in a policy would show nowhere else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sharpmax.arrays import ops_for
from sharpmax.errors import ArgumentError
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.closed_form import ClosedForm, closed_form
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead, side_by_side
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.stats.dense import dense_stats
from sharpmax.stats.statistics import RowStats


def form_of(*policies) -> ClosedForm:
    form = closed_form(policies)
    assert form is not None
    return form


class TestOutside:
    def test_rows_of_one_key_do_not_matter_and_rows_of_two_do(self, rows_with):
        counts = torch.tensor([0, 1, 2, 3])
        far = torch.full((4,), 7.0, dtype=torch.float64)
        stats = RowStats(counts, max=far, lse=far, mean=far, var=far)
        assert PAPER.outside(far, stats).tolist() == [False, False, True, True]

    def test_without_a_range_nothing_is_outside(self, rows_with):
        values = torch.tensor([-1e300, 0.0, 1e300], dtype=torch.float64)
        assert Constant(2.0).outside(values, rows_with(values)).tolist() == [False] * 3


class TestNumbers:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: Constant(2), "Constant(value=2.0)"),
            (lambda: LogLength(16, 2, (1, 3)), "LogLength(reference=16.0, floor=2.0, fitted_on=(1.0, 3.0))"),
            (lambda: EntropyTarget(1, 2, 3), "EntropyTarget(target=1.0, floor=2.0, ceiling=3.0)"),
            (
                lambda: Polynomial((1, 2), (1, 3), 1),
                "Polynomial(coefficients=(1.0, 2.0), fitted_on=(1.0, 3.0), threshold=1.0, outside_is='clamp')",
            ),
            (lambda: Curve((1, 2), (3, 4)), "Curve(knots=(1.0, 2.0), values=(3.0, 4.0))"),
            (
                lambda: LogLinear(1, 2, 3, 4, 5, 6, 7, 8, 9, reference=2, floor=1, ceiling=3),
                "LogLinear(level=1.0, length=2.0, entropy=3.0, entropy2=4.0, top=5.0, top2=6.0, var=7.0, "
                "entropy_length=8.0, top_length=9.0, reference=2.0, floor=1.0, ceiling=3.0)",
            ),
        ],
        ids=["constant", "log-length", "entropy-target", "polynomial", "curve", "log-linear"],
    )
    def test_whole_numbers_become_floats(self, make, text):
        """A kernel takes floats, and a saved policy has to read as the one that was saved."""
        assert repr(make()) == text

    def test_ends_that_are_allowed(self):
        """Each limit lies where it is said to: the last value that is allowed is."""
        assert Constant(0).value == 0.0
        assert LogLength(math.nextafter(1.0, 2.0), 0).floor == 0.0
        assert EntropyTarget(0).target == 0.0
        assert Polynomial((1.0,), (0.0, 1.0), 0).threshold == 0.0
        assert Curve((0, 1), (0, 0)).knots == (0.0, 1.0)
        assert LogLinear(reference=1).reference == 1.0

    def test_the_text_of_a_file_is_indented_by_two(self):
        assert Constant(2.0).to_json() == '{\n  "schema": 1,\n  "kind": "constant",\n  "value": 2.0\n}'


class TestWords:
    def test_every_feature_of_a_log_linear_rule_is_named(self):
        assert LogLinear(1, 2, 3, 4, 5, 6, 7, 8, 9, reference=20, floor=0.5, ceiling=3).describe() == (
            "ln β = 1 +2·ln⁺(n/20) +3·h +4·h² +5·p +6·p² +7·ln(1+v) +8·h·ln⁺(n/20) +9·p·ln⁺(n/20), 0.5 ≤ β ≤ 3"
        )
        assert LogLinear().describe() == "ln β = 0, 0.2 ≤ β ≤ 12"


class TestPerHead:
    def test_layers_are_counted_from_either_end(self):
        grid = PerHead(((Constant(1.0),), (Constant(2.0),), (Constant(3.0),)))
        assert [grid.for_layer(i).policies[0][0] for i in (-3, -2, -1, 0, 1, 2)] == [
            Constant(v) for v in (1, 2, 3, 1, 2, 3)
        ]
        assert (grid.layers, grid.heads) == (3, 1)
        assert grid.for_layer(1).for_layer(0) == grid.for_layer(1)
        for index in (-4, 3):
            with pytest.raises(ArgumentError, match=f"^index: got {index}; allowed: 0 … 2$"):
                grid.for_layer(index)

    def test_a_layer_of_one_head(self, beta_of):
        rows = torch.randn(1, 4, 9, dtype=torch.float64)
        for policy in (Constant(3.0), EntropyTarget(0.5), LogLinear(entropy=1.0)):
            torch.testing.assert_close(beta_of(PerHead(((policy,),)), rows), beta_of(policy, rows))

    def test_minus_zero_is_zero(self):
        assert math.copysign(1.0, LogLinear(level=-0.0).level) == 1.0


class TestClosedForm:
    def test_kernels_know_the_gradient_of_three_forms(self):
        assert form_of(Constant(2.0)).smooth is True
        assert form_of(Constant(2.0), PAPER, LogLength(9.0)).smooth is True
        for other in (LogLinear(level=1.0), Curve((1.0, 2.0), (1.0, 2.0)), EntropyTarget(0.5)):
            assert form_of(Constant(2.0), PAPER, LogLength(9.0), other).smooth is False
            assert form_of(other).smooth is False

    def test_nothing_is_counted_that_is_not_there(self):
        form = form_of(Constant(2.0), LogLength(9.0))
        assert (form.terms, form.segments) == (0, 0)


class TestCurveFit:
    @pytest.mark.parametrize("place", [0, 1, 4])
    def test_one_value_that_is_not_finite_is_refused(self, place):
        x, y = np.linspace(1, 5, 5), np.linspace(1, 2, 5)
        for broken in (
            (np.where(np.arange(5) == place, np.nan, x), y),
            (x, np.where(np.arange(5) == place, np.inf, y)),
        ):
            with pytest.raises(ArgumentError, match="equally many finite numbers"):
                Curve.fit(*broken)


class TestPolynomialFit:
    def test_as_many_points_as_the_degree_are_too_few(self):
        with pytest.raises(ArgumentError, match=r"^entropy, beta: got 4 and 4 values; allowed: .* degree 4"):
            Polynomial.fit(np.arange(4.0), np.ones(4), degree=4)
        with pytest.raises(ArgumentError, match=r"^entropy: got 4 different values; allowed: more .* degree 4"):
            Polynomial.fit([0.0, 1.0, 2.0, 3.0, 3.0, 3.0], np.ones(6), degree=4)
        assert Polynomial.fit(np.arange(5.0), np.ones(5), degree=4).fitted_on == (0.0, 4.0)

    @pytest.mark.parametrize("place", [0, 3, 6])
    def test_one_value_that_is_not_finite_is_refused(self, place):
        x, y, here = np.arange(7.0), np.ones(7), np.arange(7) == place
        for a, b in ((np.where(here, np.inf, x), y), (x, np.where(here, np.nan, y))):
            with pytest.raises(ArgumentError, match="values that are not finite"):
                Polynomial.fit(a, b, degree=2)


class TestSideBySide:
    """Heads of one kind become one policy with a column of numbers; what they share stays a number."""

    def joined(self, *policies: Policy) -> Any:
        like = torch.zeros(1, dtype=torch.float64)
        return side_by_side(ops_for(like), policies, like)

    def test_numbers_that_differ_become_columns(self):
        two = self.joined(LogLength(9.0, 0.5), LogLength(16.0, 0.5))
        assert type(two).kind == "log-length"
        assert two.reference.tolist() == [[9.0], [16.0]]
        assert two.floor == 0.5
        assert isinstance(two.floor, float)

    def test_tuples_become_tuples_of_columns(self):
        two = self.joined(Polynomial((1.0, 2.0), (0.0, 5.0)), Polynomial((3.0, 4.0), (0.0, 5.0)))
        assert [column.tolist() for column in two.coefficients] == [[[1.0], [3.0]], [[2.0], [4.0]]]
        assert two.fitted_on == (0.0, 5.0)

    def test_one_head_is_itself(self):
        assert self.joined(PAPER) == PAPER

    def test_what_cannot_stand_side_by_side(self):
        assert self.joined(Constant(1.0), PAPER) is None
        assert self.joined(PAPER, Constant(1.0)) is None
        assert self.joined(Polynomial((1.0,), (0.0, 5.0)), Polynomial((1.0, 2.0), (0.0, 5.0))) is None
        clamped = Polynomial((1.0,), (0.0, 5.0), outside_is="extrapolate")
        assert self.joined(Polynomial((1.0,), (0.0, 5.0)), clamped) is None


class TestStepsOfEntropyTarget:
    """How often rows are measured again: every time costs as much as the attention itself."""

    def measured(self, policy, rows):
        visible, calls = torch.ones_like(rows, dtype=torch.bool), []

        def remeasure(beta):
            calls.append(beta)
            return dense_stats(rows * beta[..., None], visible)

        policy.beta(dense_stats(rows, visible), remeasure)
        return len(calls)

    def test_rows_with_nothing_to_solve_are_looked_at_twice(self):
        sharp = torch.tensor([[9.0, 0.0, 0.0], [7.0, 0.0, 1.0]], dtype=torch.float64)
        assert self.measured(EntropyTarget(0.9), sharp) == 2
        assert self.measured(EntropyTarget(0.9), torch.full((2, 3), math.nan, dtype=torch.float64)) == 2
        both = torch.cat([sharp, torch.full((1, 3), math.nan, dtype=torch.float64)])
        assert self.measured(EntropyTarget(0.9), both) == 2

    def test_a_row_on_its_target_is_left_there(self):
        row = torch.randn(1, 20, dtype=torch.float64)
        there = float(dense_stats(row, torch.ones_like(row, dtype=torch.bool)).entropy)
        assert self.measured(EntropyTarget(there), row) == 2

    @pytest.mark.parametrize("target", [0.1, 0.5, 1.0, 2.0])
    def test_newton_needs_few_steps(self, target):
        rows = torch.randn(30, 200, dtype=torch.float64) * torch.linspace(0.5, 4, 30, dtype=torch.float64)[:, None]
        assert self.measured(EntropyTarget(target), rows) <= 14

    def test_a_row_above_the_ceiling_ends_there(self, beta_of):
        flat = torch.tensor([[0.5, 0.25, 0.0]], dtype=torch.float64)
        assert self.measured(EntropyTarget(0.5, floor=0.1, ceiling=1.0), flat) <= 3
        assert beta_of(EntropyTarget(0.5, floor=0.1, ceiling=1.0), flat).item() == 1.0

    def test_a_row_just_under_its_target_stays_at_the_floor(self, beta_of):
        """So close that one more Newton step would be taken, were it not for the end."""
        row = torch.randn(1, 20, dtype=torch.float64, requires_grad=True)
        here = float(dense_stats(row, torch.ones_like(row, dtype=torch.bool)).entropy.detach())
        beta = beta_of(EntropyTarget(here + 1e-4), row)
        assert beta.item() == 1.0
        (gradient,) = torch.autograd.grad(beta.sum(), row)
        assert gradient.abs().max() == 0.0

    def test_a_row_whose_target_is_just_beyond_the_ceiling_stays_under_it(self, beta_of):
        torch.manual_seed(0)
        row = torch.randn(1, 20, dtype=torch.float64)
        there = float(dense_stats(2.0 * row, torch.ones_like(row, dtype=torch.bool)).entropy)
        assert beta_of(EntropyTarget(there - 1e-4, ceiling=2.0), row).item() == pytest.approx(2.0, abs=1e-12)


class TestDefaults:
    """What one gets without asking is part of the contract."""

    def test_fits(self):
        x = np.linspace(0.0, 6.0, 200)
        assert len(Curve.fit(x, 1.0 + x).knots) == 12
        fitted = Polynomial.fit(x, 1.0 + x)
        assert (len(fitted.coefficients), fitted.threshold, fitted.outside_is) == (5, 0.5, "clamp")

    def test_fields(self):
        assert LogLinear() == LogLinear(0, 0, 0, 0, 0, 0, 0, 0, 0, reference=32.0, floor=0.2, ceiling=12.0)
        assert EntropyTarget(0.5) == EntropyTarget(0.5, 1.0, 1e4)
        assert LogLength(16) == LogLength(16, 1.0, None)
