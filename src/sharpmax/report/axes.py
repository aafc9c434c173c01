"""The axis that figures share: sizes, on a logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence

from sharpmax.report.plot import Axis
from sharpmax.report.words import count

__all__ = ["size_axis"]

_ROOM = 2.0**0.4


def size_axis(
    known: Sequence[str],
    extra: tuple[float, str] | None = None,
    *,
    label: str = "number of items n",
    hover: str = "%{x:,.0f} items",
) -> Axis:
    """The axis of sizes, logarithmic, marked at the sizes themselves (and at one more place)."""
    ticks = [(float(n), count(n)) for n in known] + ([extra] if extra else [])
    limits = ticks[0][0] / _ROOM, ticks[-1][0] * _ROOM
    return Axis(label, limits, log=True, ticks=tuple(ticks), hover=hover)
