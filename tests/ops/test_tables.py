"""Policies as tables of numbers: which have a form, and how long a table is kept. Kernel tests meet the numbers."""

from dataclasses import dataclass

import pytest
import torch

from sharpmax.ops.kernels import tables
from sharpmax.ops.kernels.tables import closed_form
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial


@dataclass(frozen=True)
class Doubled(Constant):
    """A subclass with a rule of its own."""

    def rule(self, xp, stats, remeasure):
        return 2.0 * super().rule(xp, stats, remeasure)


def test_what_an_operator_is_told_of_the_table():
    form = closed_form([Polynomial((5.0,), (0.0, 1.0)), PAPER, Constant(), LogLinear(var=0.5)])
    assert form is not None
    assert form.shape == [0b1011, 5, 0, 1]
    assert form.needs == {"entropy", "var"}
    assert {len(row) for row in form.table} == {13}
    for policies, solved in (([EntropyTarget(0.5), Constant(2.0)], True), ([PAPER, LogLength(9.0)], False)):
        form = closed_form(policies)
        assert form is not None
        assert (form.solved, form.smooth) == (solved, not solved)


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
