"""Policies as numbers: what a kernel needs to compute β from the statistics of a row by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sharpmax.errors import reject_type
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.polynomial import Polynomial

CONSTANT, POLYNOMIAL, LOG_LENGTH, LOG_LINEAR, CURVE, TARGET = range(6)
"""The forms: the first column of a table says which of them its row is."""

_KINDS = {Constant, Polynomial, LogLength, LogLinear, Curve, EntropyTarget}


@dataclass(frozen=True)
class ClosedForm:
    """Policies of one layer as a table of numbers, one row per head or one for all.

    A row of the table holds the form and then what the form reads:

    - constant: β
    - polynomial: threshold, lowest and highest entropy (±∞ if it runs on), `terms` coefficients, highest power first
    - log-length: floor, ln reference
    - log-linear: the nine coefficients, reference, ln floor, ln ceiling
    - curve: β before the first knot, then (knot, width, β at it, rise) of each of `segments` pieces
    - entropy target: target, ln floor, ln ceiling; solved on the logits themselves

    Rows are filled up with zeros, which no form reads.
    """

    forms: tuple[int, ...]
    """The forms that occur, ascending."""

    needs: frozenset[str]
    """The statistics they read, as in `Policy.needs`."""

    terms: int
    segments: int
    table: tuple[tuple[float, ...], ...]

    @property
    def solved(self) -> bool:
        """Whether some β is the solution of an equation, for which statistics at β = 1 do not suffice."""
        return TARGET in self.forms

    @property
    def smooth(self) -> bool:
        """Whether kernels know the gradient of β: it depends on the entropy alone, and as a polynomial."""
        return set(self.forms) <= {CONSTANT, POLYNOMIAL, LOG_LENGTH}

    @property
    def is_identity(self) -> bool:
        """Whether β is 1 in every row."""
        return all(row[:2] == (CONSTANT, 1.0) for row in self.table)

    @property
    def shape(self) -> list[int]:
        """What an operator gets of the table: the forms as bits, terms, segments, and whether var is read."""
        return [sum(1 << form for form in self.forms), self.terms, self.segments, int("var" in self.needs)]


def closed_form(policies: Sequence[Policy]) -> ClosedForm | None:
    """One policy for all heads or one per head as a table; None if one of them is of a kind that has no form here.

    >>> from sharpmax.policies import Constant, LogLength
    >>> closed_form([Constant(2.0)]).table
    ((0.0, 2.0),)
    >>> closed_form([Constant(2.0), LogLength(16.0)]).forms
    (0, 2)
    """
    # A subclass may have a rule of its own: the type itself is what counts.
    if any(type(policy) not in _KINDS for policy in policies):
        return None
    if all(policy == policies[0] for policy in policies):
        policies = policies[:1]
    terms = max(len(p.coefficients) if isinstance(p, Polynomial) else 0 for p in policies)
    segments = max(len(p.knots) - 1 if isinstance(p, Curve) else 0 for p in policies)
    rows = [_row(policy, terms, segments) for policy in policies]
    width = max(map(len, rows))
    return ClosedForm(
        forms=tuple(sorted({int(row[0]) for row in rows})),
        needs=frozenset().union(*(policy.needs for policy in policies)),
        terms=terms,
        segments=segments,
        table=tuple(tuple(map(float, row)) + (0.0,) * (width - len(row)) for row in rows),
    )


def _row(policy: Policy, terms: int, segments: int) -> list[float]:
    """The row of one policy: its form and what that form reads."""
    if isinstance(policy, Constant):
        return [CONSTANT, policy.value]
    if isinstance(policy, LogLength):
        return [LOG_LENGTH, policy.floor, math.log(policy.reference)]
    if isinstance(policy, Polynomial):
        ends = policy.fitted_on if policy.outside_is == "clamp" else (-math.inf, math.inf)
        # Zeros before the highest power leave Horner's scheme at 0, exactly.
        leading = [0.0] * (terms - len(policy.coefficients))
        return [POLYNOMIAL, policy.threshold, *ends, *leading, *policy.coefficients]
    if isinstance(policy, Curve):
        x, y = policy.knots, policy.values
        pieces = [(x0, x1 - x0, y0, y1 - y0) for x0, x1, y0, y1 in zip(x[:-1], x[1:], y[:-1], y[1:], strict=True)]
        # No entropy lies above such a knot, so that piece is never used.
        pieces += [(1e38, 1.0, 0.0, 0.0)] * (segments - len(pieces))
        return [CURVE, y[0], *(number for piece in pieces for number in piece)]
    if isinstance(policy, EntropyTarget):
        return [TARGET, policy.target, math.log(policy.floor), math.log(policy.ceiling)]
    if isinstance(policy, LogLinear):
        coefficients = (getattr(policy, name) for name in policy.COEFFICIENTS)
        return [LOG_LINEAR, *coefficients, policy.reference, math.log(policy.floor), math.log(policy.ceiling)]
    reject_type("policy", type(policy).__name__, "a policy that kernels compute")
