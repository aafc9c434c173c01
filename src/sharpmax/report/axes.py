"""What figures share: the axis of sizes, on a logarithmic scale, and the panel of gains over it."""

from __future__ import annotations

from collections.abc import Sequence

from sharpmax.report.looks import SOFT
from sharpmax.report.plot import Axis, Mark, Panel, Series
from sharpmax.report.words import count

__all__ = ["gain_panel", "size_axis"]

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


def gain_panel(x: Axis, series: list[Series], title: str) -> Panel:
    """Lines of gains in percentage points, with room around them and a mark where nothing is gained."""
    values = [0.0, *(value for line in series for value in line.y)]
    room = 0.06 * max(1.0, max(values) - min(values))
    limits = min(values) - room, max(values) + room
    return Panel(x, Axis("gain (percentage points)", limits), series, [Mark("y", 0.0, "", SOFT)], title)
