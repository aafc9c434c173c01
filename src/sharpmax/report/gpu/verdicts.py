"""Which targets were reached: from unrounded numbers, and only at full size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from sharpmax.report.gpu.entries import KINDS, Entry, of_kind

__all__ = ["Verdict", "against_us", "verdicts"]

_MEAN = "mean_"
_WORDS = {
    "mean_ratio": "× stock, mean of {n} cases",
    "ratio": "× stock, largest of {n} cases",
    "extra_bytes_per_row": "extra bytes per query row, largest of {n} cases",
}


@dataclass(frozen=True)
class Verdict:
    """A number, the limit it is held to, and whether it keeps it; None where this run cannot tell."""

    kind: str
    what: str
    value: float | None
    at_most: float
    reached: bool | None

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return {True: "reached", False: "missed", None: "not judged"}[self.reached]


def verdicts(entries: Sequence[Entry]) -> list[Verdict]:
    """The verdicts of every kind that was measured; a case that is wrong makes its kind miss."""
    found = []
    for kind in KINDS:
        counted = [one for one in of_kind(entries, kind) if one["counts"]]
        limits: dict[str, float] = counted[0]["limits"] if counted else {}
        found += [_verdict(kind, quantity, limit, counted) for quantity, limit in limits.items()]
    return found


def _verdict(kind: str, quantity: str, limit: float, counted: Sequence[Entry]) -> Verdict:
    values = [one.get(quantity.removeprefix(_MEAN)) for one in counted]
    known = [value for value in values if value is not None]
    value = None
    if len(known) == len(values):
        value = statistics.fmean(known) if quantity.startswith(_MEAN) else max(known)
    reached = None
    if all(one["full_size"] for one in counted):
        if not all(one["agrees"] for one in counted):
            reached = False
        elif value is not None:
            reached = value <= limit
    return Verdict(kind, _WORDS[quantity].format(n=len(counted)), value, limit, reached)


def against_us(value: float | None, places: int) -> str:
    """A number that had better be small, rounded up, so that a miss never looks like a hit.

    >>> against_us(1.6203, 2), against_us(1.62, 2), against_us(None, 2)
    ('1.63', '1.62', '–')
    """
    if value is None:
        return "–"
    scale = 10**places
    # What is exact in decimals is not in binary: 1.62 · 100 is a little more than 162.
    return f"{math.ceil(value * scale - 1e-9) / scale:,.{places}f}"
