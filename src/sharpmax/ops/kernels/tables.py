"""Policies as tables of numbers, from which kernels compute β. A table is made once for the same policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sharpmax.errors import reject_type
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.polynomial import Polynomial

CONSTANT, POLYNOMIAL, LOG_LENGTH, LOG_LINEAR, CURVE, TARGET = range(6)
"""The forms. The first column of a table holds the form of each row."""

_KINDS = {Constant, Polynomial, LogLength, LogLinear, Curve, EntropyTarget}


class ClosedForm(NamedTuple):
    """The policies of one layer as a table of numbers, with one row per head or one row for all.

    A row holds the form, then the numbers of that form:

    - constant: β
    - polynomial: threshold, lowest and highest entropy (±∞ if it extrapolates), coefficients, highest power first
    - log-length: floor, ln reference
    - log-linear: the nine coefficients, reference, ln floor, ln ceiling
    - curve: β before the first knot, then (knot, width, β at it, rise) of each piece
    - entropy target: target, ln floor, ln ceiling; solved on the logits themselves

    Rows are padded with zeros, which no form reads.
    """

    table: tuple[tuple[float, ...], ...]
    shape: list[int]
    """For operators: the forms as bits, terms of a polynomial, pieces of a curve, and whether var is read."""

    needs: frozenset[str]
    """The statistics the policies read, as in `Policy.needs`."""

    @property
    def solved(self) -> bool:
        """Whether some β solves an equation, which takes more than the statistics at β = 1."""
        return bool(self.shape[0] >> TARGET & 1)

    @property
    def smooth(self) -> bool:
        """Whether kernels know the gradient of β: every β is a polynomial of the entropy, or has no gradient."""
        return not self.shape[0] & ~(1 << CONSTANT | 1 << POLYNOMIAL | 1 << LOG_LENGTH)


def closed_form(policies: Sequence[Policy]) -> ClosedForm | None:
    """One policy for all heads, or one per head, as a table; None if the kernels do not know one of them.

    >>> from sharpmax.policies import Constant, LogLength
    >>> closed_form([Constant(2.0)]).table
    ((0.0, 2.0),)
    """
    # The exact type, as a subclass may have a rule of its own.
    if any(type(policy) not in _KINDS for policy in policies):
        return None
    if all(policy == policies[0] for policy in policies):
        policies = policies[:1]
    terms = max(len(p.coefficients) if isinstance(p, Polynomial) else 0 for p in policies)
    segments = max(len(p.knots) - 1 if isinstance(p, Curve) else 0 for p in policies)
    rows = [_row(policy, terms, segments) for policy in policies]
    width = max(map(len, rows))
    needs: frozenset[str] = frozenset().union(*(policy.needs for policy in policies))
    forms = sum(1 << form for form in {int(row[0]) for row in rows})
    table = tuple(tuple(map(float, row)) + (0.0,) * (width - len(row)) for row in rows)
    return ClosedForm(table, [forms, terms, segments, int("var" in needs)], needs)


def _row(policy: Policy, terms: int, segments: int) -> list[float]:
    """The row of one policy: its form and what that form reads."""
    if isinstance(policy, Constant):
        return [CONSTANT, policy.value]
    if isinstance(policy, LogLength):
        return [LOG_LENGTH, policy.floor, math.log(policy.reference)]
    if isinstance(policy, Polynomial):
        ends = policy.fitted_on if policy.outside_is == "clamp" else (-math.inf, math.inf)
        # Leading zeros keep Horner's scheme at exactly 0.
        leading = [0.0] * (terms - len(policy.coefficients))
        return [POLYNOMIAL, policy.threshold, *ends, *leading, *policy.coefficients]
    if isinstance(policy, Curve):
        x, y = policy.knots, policy.values
        pieces = [(x0, x1 - x0, y0, y1 - y0) for x0, x1, y0, y1 in zip(x[:-1], x[1:], y[:-1], y[1:], strict=True)]
        # No entropy reaches this knot, so the piece is never used.
        pieces += [(1e38, 1.0, 0.0, 0.0)] * (segments - len(pieces))
        return [CURVE, y[0], *(number for piece in pieces for number in piece)]
    if isinstance(policy, EntropyTarget):
        return [TARGET, policy.target, math.log(policy.floor), math.log(policy.ceiling)]
    if isinstance(policy, LogLinear):
        coefficients = (getattr(policy, name) for name in policy.COEFFICIENTS)
        return [LOG_LINEAR, *coefficients, policy.reference, math.log(policy.floor), math.log(policy.ceiling)]
    reject_type("policy", type(policy).__name__, "a policy that kernels compute")


class Coefficients(NamedTuple):
    """The table on a device, `[heads or 1, width]`, and `ClosedForm.shape`: the last arguments of the operators."""

    values: Tensor
    shape: list[int]

    @property
    def stride(self) -> int:
        """The stride from one head to the next; 0 if one row serves every head."""
        return self.values.shape[1] if self.values.shape[0] > 1 else 0

    @property
    def with_var(self) -> bool:
        """Whether a policy reads the variance."""
        return bool(self.shape[3])

    @property
    def solved(self) -> bool:
        """As `ClosedForm.solved`."""
        return bool(self.shape[0] >> TARGET & 1)


_FEW = 512
_Key = tuple[int, ...]
_forms: dict[_Key, tuple[tuple[Policy, ...], ClosedForm | None]] = {}
_tables: dict[tuple[_Key, torch.device], Coefficients] = {}


def form_of(policies: tuple[Policy, ...]) -> ClosedForm | None:
    """The closed form of policies; None if they have none."""
    key = tuple(map(id, policies))
    if key not in _forms:
        if len(_forms) >= _FEW:
            _forms.clear()
            _tables.clear()
        # The policies are kept beside their form, so that no other object can get one of these ids.
        _forms[key] = policies, closed_form(policies)
    return _forms[key][1]


def table_of(policies: tuple[Policy, ...], device: torch.device) -> Coefficients | None:
    """The coefficients of policies on a device; None if they have no closed form.

    Nothing can be copied to the device while a CUDA graph is captured, so the first call must come before.
    """
    key = tuple(map(id, policies))
    compiling = torch.compiler.is_compiling()
    if compiling and (known := _known_table(key, device)):
        if known == _NO_FORM:
            return None
        number, rows, width, *shape = known
        return Coefficients(table_op(number, rows, width, device), shape)
    form = closed_form(policies) if compiling else form_of(policies)
    if form is None:
        return None
    # A tensor made inside a dispatch mode (a fake tensor, say) is of use in that mode alone.
    if compiling or torch._C._len_torch_dispatch_stack():
        return Coefficients(torch.tensor(form.table, dtype=torch.float32, device=device), form.shape)
    if (key, device) not in _tables:
        with torch.inference_mode(False):
            values = torch.tensor(form.table, dtype=torch.float32, device=device)
        _tables[key, device] = Coefficients(values, form.shape)
    return _tables[key, device]


_NO_FORM = (-1,)
_in_graphs: dict[int, Tensor] = {}
"""The coefficients that compiled graphs read, by number. They are kept for the life of the process."""


def _known_table(key: _Key, device: torch.device) -> tuple[int, ...]:
    """The number, size and shape of coefficients on the device; empty if they are not there.

    While compiling the answer becomes a constant of the graph, which does not depend on other policies.
    """
    if key in _forms and _forms[key][1] is None:
        return _NO_FORM
    if (key, device) not in _tables:
        return ()
    values, shape = _tables[key, device]
    _in_graphs[id(values)] = values
    return (id(values), *values.shape, *shape)


# This is torch.compiler.assume_constant_result, without the 1.5 seconds of importing torch's compiler.
_known_table.__dict__["_dynamo_marked_constant"] = True


@torch.library.custom_op("sharpmax::coefficients", mutates_args=())
def table_op(number: int, rows: int, width: int, device: torch.device) -> Tensor:
    """A copy of the coefficients with that number, as a graph can contain a tensor found while compiling only once."""
    return _in_graphs[number].clone()


@table_op.register_fake
def _(number: int, rows: int, width: int, device: torch.device) -> Tensor:
    return torch.empty((rows, width), dtype=torch.float32, device=device)
