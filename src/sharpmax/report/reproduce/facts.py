"""What the numbers of a run show, before it is put into words: changes with size, gains, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharpmax.report.reproduce.looks import in_order
from sharpmax.report.reproduce.tables import part, row
from sharpmax.report.tables import Tables, sizes, spread_over

__all__ = ["LEVEL", "Change", "Verdict", "change", "headline", "horizon", "trust", "verdict"]

LEVEL = 0.05
"""A difference counts as shown when its p value is below this."""

_CLEAR_WITHOUT_ERRORS = 1.0


@dataclass(frozen=True)
class Change:
    """A row of means at its smallest and its largest size."""

    small: str
    large: str
    first: float
    last: float
    clear: bool
    """Whether the difference is more than twice its standard error."""

    @property
    def falls(self) -> bool:
        """Whether it clearly goes down."""
        return self.clear and self.last < self.first

    @property
    def rises(self) -> bool:
        """Whether it clearly goes up."""
        return self.clear and self.last > self.first


def change(cells: Mapping[str, Any] | None) -> Change | None:
    """The change of a row of cells with size, or None where there is nothing to compare."""
    ends = spread_over(cells) if cells else None
    if not cells or ends is None:
        return None
    one, other = cells[ends[0]], cells[ends[1]]
    errors = [one["sem"], other["sem"]]
    # One seed says nothing about chance; a whole percent (or nat) is what one would remark on.
    doubt = _CLEAR_WITHOUT_ERRORS if None in errors else 2.0 * math.hypot(*errors)
    return Change(*ends, one["mean"], other["mean"], abs(other["mean"] - one["mean"]) > doubt)


def trust(cells: Mapping[str, Any]) -> Change | None:
    """How a signal's AUROC changes from the smallest to the largest size that has wrong answers."""
    known = [n for n in sizes(cells) if cells[n]["auroc"] is not None]
    if len(known) < 2:
        return None
    small, large = known[0], known[-1]
    one, other = cells[small], cells[large]
    apart = other["high"] < one["low"] or one["high"] < other["low"]
    return Change(small, large, one["auroc"], other["auroc"], apart)


def horizon(bounds: Mapping[str, Any]) -> float:
    """The sharpness horizon as its logarithm to base 10: wide spreads put it beyond all numbers a float can hold."""
    return float(bounds["horizon_log10"]["mean"])


@dataclass(frozen=True)
class Verdict:
    """How an arm compares with plain softmax: sizes by outcome, and its gains in points."""

    arm: str
    gains: Mapping[str, float]
    p: Mapping[str, float | None]
    of_ceiling: Mapping[str, float]
    better: tuple[str, ...]
    worse: tuple[str, ...]
    tested: bool
    """False if no size has a p value although there are differences, as with a single seed."""

    @property
    def best(self) -> str:
        """The size of the largest gain, among those where a gain is shown if there are any."""
        return max(self.better or self.gains, key=self.gains.__getitem__)

    @property
    def worst(self) -> str:
        """The size of the largest loss, among those where a loss is shown if there are any."""
        return min(self.worse or self.gains, key=self.gains.__getitem__)


def verdict(tables: Tables, recipe: str, arm: str) -> Verdict | None:
    """What the comparison of an arm with plain softmax shows, or None if the run did not make it."""
    cells = row(tables, "comparison", recipe, arm)
    if not cells:
        return None
    known = sizes(cells)
    gains, p = {n: cells[n]["gain"] for n in known}, {n: cells[n]["p"] for n in known}
    shown = [n for n in known if p[n] is not None and p[n] < LEVEL]
    return Verdict(
        arm,
        gains,
        p,
        {n: cells[n]["of_ceiling"] for n in known if cells[n].get("of_ceiling") is not None},
        better=tuple(n for n in shown if gains[n] > 0),
        worse=tuple(n for n in shown if gains[n] < 0),
        tested=any(value is not None for value in p.values()) or not any(gains.values()),
    )


def headline(tables: Tables, recipe: str) -> Verdict | None:
    """The arm to speak of first: the entropy target, or else the one with the largest gain; never hard argmax."""
    arms = [arm for arm in in_order(part(tables, "comparison", recipe) or {}) if arm != "hard"]
    verdicts = [found for arm in arms if (found := verdict(tables, recipe, arm))]
    for found in verdicts:
        if found.arm == "entropy-target":
            return found
    return max(verdicts, key=lambda found: (len(found.better) > 0, found.gains[found.best]), default=None)
