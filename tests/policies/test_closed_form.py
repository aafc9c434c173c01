"""The tables of numbers that policies become, read back by hand."""

import math
from dataclasses import dataclass

import pytest

from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.closed_form import (
    CONSTANT,
    CURVE,
    LOG_LENGTH,
    LOG_LINEAR,
    POLYNOMIAL,
    TARGET,
    closed_form,
)
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial


@dataclass(frozen=True)
class Doubled(Constant):
    """A subclass with a rule of its own."""

    def rule(self, xp, stats, remeasure):
        return 2.0 * super().rule(xp, stats, remeasure)


def form_of(*policies):
    form = closed_form(policies)
    assert form is not None
    return form


def one_row(policy):
    form = form_of(policy)
    assert len(form.table) == 1
    return form, form.table[0]


def test_every_kind_lies_where_it_is_said_to():
    assert one_row(Constant(3.0))[1] == (CONSTANT, 3.0)
    assert one_row(PAPER)[1] == (POLYNOMIAL, 0.5, -math.inf, math.inf, *PAPER.coefficients)
    clamped = Polynomial((2.0, 1.0), (0.25, 4.0), 0.75)
    assert one_row(clamped)[1] == (POLYNOMIAL, 0.75, 0.25, 4.0, 2.0, 1.0)
    assert one_row(LogLength(16.0, 0.5))[1] == (LOG_LENGTH, 0.5, math.log(16.0))
    linear = LogLinear(1, 2, 3, 4, 5, 6, 7, 8, 9, reference=20.0, floor=0.5, ceiling=3.0)
    assert one_row(linear)[1] == (LOG_LINEAR, *range(1, 10), 20.0, math.log(0.5), math.log(3.0))
    assert one_row(Curve((1.0, 3.0, 4.0), (1.0, 2.0, 5.0)))[1] == (CURVE, 1, 1, 2, 1, 1, 3, 1, 2, 3)
    assert one_row(EntropyTarget(0.5, 0.25, 8.0))[1] == (TARGET, 0.5, math.log(0.25), math.log(8.0))


def test_heads_side_by_side():
    heads = [Polynomial((5.0,), (0.0, 1.0)), PAPER, Constant(), LogLinear(var=0.5)]
    form = closed_form(heads)
    assert form is not None
    assert form.forms == (CONSTANT, POLYNOMIAL, LOG_LINEAR)
    assert form.shape == [0b1011, 5, 0, 1]
    assert form.needs == {"entropy", "var"}
    assert not form.solved
    assert {len(row) for row in form.table} == {13}
    # A polynomial of a lower degree starts with zeros, which leave Horner's scheme at 0.
    assert form.table[0][4:9] == (0.0, 0.0, 0.0, 0.0, 5.0)
    assert form.table[1][4:9] == PAPER.coefficients
    assert form.table[2] == (0.0, 1.0) + (0.0,) * 11


def test_heads_that_agree_share_a_row():
    form = closed_form([LogLength(9.0), LogLength(9.0)])
    assert form is not None
    assert len(form.table) == 1


def test_curves_of_different_lengths():
    form = closed_form([Curve((1.0, 2.0), (1.0, 2.0)), Curve((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))])
    assert form is not None
    assert form.segments == 2
    assert form.table[0][6] > 1e30  # a knot that no entropy reaches


def test_solved_and_identity():
    assert form_of(EntropyTarget(0.5), Constant(2.0)).solved
    assert form_of(Constant(1.0)).is_identity
    assert not form_of(Constant(1.0), Constant(2.0)).is_identity


@pytest.mark.parametrize("policy", [Doubled(1.5), PerHead(((Constant(),),))], ids=lambda p: type(p).__name__)
def test_other_kinds_have_no_form(policy):
    assert closed_form([policy]) is None
    assert closed_form([PAPER, policy]) is None
