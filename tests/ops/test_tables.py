"""The tables of numbers that policies become, read back by hand."""

import math
from dataclasses import dataclass

import pytest
import torch

from sharpmax.ops.kernels import tables
from sharpmax.ops.kernels.tables import CONSTANT, CURVE, LOG_LENGTH, LOG_LINEAR, POLYNOMIAL, TARGET, closed_form
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial

LINEAR = LogLinear(1, 2, 3, 4, 5, 6, 7, 8, 9, reference=20.0, floor=0.5, ceiling=3.0)
# The row of each kind, and whether kernels know the gradient of its β.
ROWS = [
    (Constant(3.0), (CONSTANT, 3.0), True),
    (PAPER, (POLYNOMIAL, 0.5, -math.inf, math.inf, *PAPER.coefficients), True),
    (Polynomial((2.0, 1.0), (0.25, 4.0), 0.75), (POLYNOMIAL, 0.75, 0.25, 4.0, 2.0, 1.0), True),
    (LogLength(16.0, 0.5), (LOG_LENGTH, 0.5, math.log(16.0)), True),
    (LINEAR, (LOG_LINEAR, *range(1, 10), 20.0, math.log(0.5), math.log(3.0)), False),
    (Curve((1.0, 3.0, 4.0), (1.0, 2.0, 5.0)), (CURVE, 1, 1, 2, 1, 1, 3, 1, 2, 3), False),
    (EntropyTarget(0.5, 0.25, 8.0), (TARGET, 0.5, math.log(0.25), math.log(8.0)), False),
]


@dataclass(frozen=True)
class Doubled(Constant):
    """A subclass with a rule of its own."""

    def rule(self, xp, stats, remeasure):
        return 2.0 * super().rule(xp, stats, remeasure)


def form_of(*policies):
    form = closed_form(policies)
    assert form is not None
    return form


@pytest.mark.parametrize(("policy", "row", "smooth"), ROWS, ids=lambda x: getattr(x, "kind", ""))
def test_every_kind_lies_where_it_is_said_to(policy, row, smooth):
    form = form_of(policy)
    assert form.table == (row,)
    assert form.smooth == form_of(Constant(2.0), PAPER, LogLength(9.0), policy).smooth == smooth
    assert form.solved == form_of(policy, Constant(2.0)).solved == isinstance(policy, EntropyTarget)


def test_heads_side_by_side():
    form = form_of(Polynomial((5.0,), (0.0, 1.0)), PAPER, Constant(), LogLinear(var=0.5))
    assert form.shape == [0b1011, 5, 0, 1]
    assert form.needs == {"entropy", "var"}
    assert {len(row) for row in form.table} == {13}
    # A polynomial of a lower degree starts with zeros, which leave Horner's scheme at 0.
    assert form.table[0][4:9] == (0.0, 0.0, 0.0, 0.0, 5.0)
    assert form.table[1][4:9] == PAPER.coefficients
    assert form.table[2] == (0.0, 1.0) + (0.0,) * 11


def test_curves_of_different_lengths():
    form = form_of(Curve((1.0, 2.0), (1.0, 2.0)), Curve((1.0, 2.0, 3.0), (1.0, 2.0, 3.0)))
    assert form.shape[2] == 2
    assert form.table[0][6] > 1e30  # a knot that no entropy reaches


@pytest.mark.parametrize("policy", [Doubled(1.5), PerHead(((Constant(),),))], ids=lambda p: type(p).__name__)
def test_other_kinds_have_no_form(policy):
    assert closed_form([policy]) is None
    assert closed_form([PAPER, policy]) is None
    assert tables.table_of((policy,), torch.device("cpu")) is None


def test_tables_are_kept_for_the_policies_they_were_made_of(monkeypatch):
    monkeypatch.setattr(tables, "_FEW", 3)
    for i in range(9):
        policies = (Constant(1.0 + i), PAPER)
        table = tables.table_of(policies, torch.device("cpu"))
        assert table is not None
        assert table is tables.table_of(policies, torch.device("cpu"))
        assert table.values[0, 1] == 1.0 + i
