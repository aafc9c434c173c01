"""Figures as values, before a renderer draws them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sharpmax.report.theme import SOFT, Colour, Look, Stroke
from sharpmax.report.words import count

SMALL_TITLE = 20
"""Letters of a line of the title of a small panel."""


@dataclass(frozen=True)
class Axis:
    """One axis: what it measures, with its unit, from where to where, and where it is marked (None: anywhere).

    `hover` is the heading when all lines at one place are shown, with plotly's %{x} for the place.
    """

    label: str
    limits: tuple[float, float]
    log: bool = False
    ticks: tuple[tuple[float, str], ...] | None = None
    hover: str = ""


@dataclass(frozen=True)
class Series:
    """Points that belong together; those with the same label share an entry of the legend.

    `low` and `high` are the ends of error bars (None where there is none), `hover` says each point in words, or all of
    them in the same words with plotly's %{x} and %{y}, or nothing. A series with an `arm` is hidden and shown together
    with everything else of that arm.
    """

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    hover: Sequence[str] | str
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    stroke: Stroke | None = "solid"
    marker: Literal["full", "hollow"] | None = "full"
    arm: str | None = None
    in_legend: Look | None = None
    end: str = ""
    """Words beside the last point."""

    @property
    def line(self) -> Stroke | None:
        """How the line is drawn: a stroke with a meaning of its own comes before that of the look."""
        return self.look.stroke if self.stroke == "solid" else self.stroke

    @property
    def crowded(self) -> bool:
        """Whether there are so many points that they have to shine through one another."""
        return self.stroke is None and len(self.x) > 100


@dataclass(frozen=True)
class Mark:
    """A straight line through the whole panel, and what it means (nothing, where the axes say it)."""

    axis: Literal["x", "y"]
    at: float
    text: str
    colour: Colour


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    title: str = ""
    together: bool = True
    """Whether hovering shows all series at that x, or the nearest point alone."""


@dataclass(frozen=True)
class Plot:
    """Panels beside each other."""

    title: str
    note: str
    caption: str
    alt: str
    panels: Sequence[Panel]
    small: bool = False
    """Whether the panels are small and in rows: they share one y axis, and the labels of axes are written once."""


@dataclass(frozen=True)
class HeatPanel:
    """Numbers in rows and columns."""

    title: str
    values: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Heat:
    """Panels of numbers for each arm, all in one colour scale; rows and columns are counted from `first`.

    A scale whose limits lie on both sides of zero is pale there. `hover` says a cell in words, with plotly's %{x},
    %{y} and %{z}.
    """

    title: str
    note: str
    caption: str
    alt: str
    arms: Mapping[str, Sequence[HeatPanel]]
    labels: Mapping[str, str]
    """What the arms are called."""

    x_label: str
    y_label: str
    scale_label: str
    limits: tuple[float, float]
    hover: str
    first: int = 1

    @property
    def diverging(self) -> bool:
        """Whether the colours have a middle."""
        return self.limits[0] < 0.0 < self.limits[1]


@dataclass(frozen=True)
class LegendEntry:
    """One line of a legend."""

    label: str
    look: Look
    stroke: Stroke | None
    marker: Literal["full", "hollow"] | None
    arm: str | None


def legend(plot: Plot) -> list[LegendEntry]:
    """The legend of a plot: each label once, in the order in which it first comes."""

    def entries() -> Iterator[LegendEntry]:
        for panel in plot.panels:
            for series in panel.series:
                # An entry that stands for lines of several arms belongs to none of them.
                arm = None if series.in_legend else series.arm
                yield LegendEntry(series.label, series.in_legend or series.look, series.line, series.marker, arm)

    found: dict[str, LegendEntry] = {}
    for entry in entries():
        found.setdefault(entry.label, entry)
    return list(found.values())


def thinned(ticks: Sequence[tuple[float, str]], most: int) -> list[tuple[float, str]]:
    """At most so many ticks, evenly chosen, and the last always among them.

    >>> thinned([(1, "1"), (2, "2"), (4, "4")], 2)
    [(1, '1'), (4, '4')]
    """
    step = max(1, -(-len(ticks) // max(1, most)))
    return list(ticks[::-1][::step][::-1])


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


STEPS = 21
"""Colours of the scale from −1 to 1: an odd number, so that one of them is the very middle."""


@dataclass(frozen=True)
class Spot:
    """A cell: its name, its number (None where it is not known), the letter in it, its kind, and all that in words."""

    name: str
    value: float | None
    letter: str
    kind: str
    words: str


@dataclass(frozen=True)
class BoardMap:
    """Cells in rows and columns; None where there is no cell."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Spot | None]]]
    """Each row with its heading."""

    @property
    def width(self) -> int:
        """How many cells stand beside each other."""
        return len(self.columns)


@dataclass(frozen=True)
class Kind:
    """A kind of cells: the letter that stands for it, its name, and how many there are, in words."""

    letter: str
    name: str
    many: str


@dataclass(frozen=True)
class Board:
    """Maps beside each other; their numbers lie between −1 and 1, those beyond look like the ends."""

    title: str
    note: str
    caption: str
    alt: str
    maps: Sequence[BoardMap]
    kinds: Sequence[Kind]
    row_label: str
    column_label: str
    scale_label: str
    ends: tuple[str, str]
    """What it means to be at either end of the scale."""

    chosen: str
    """The cell that is chosen before anybody presses one."""


def step_of(value: float) -> int:
    """The place of a number among the colours.

    >>> step_of(-3.0), step_of(0.0), step_of(1.0)
    (0, 10, 20)
    """
    half = (STEPS - 1) // 2
    return round(half + half * max(-1.0, min(1.0, value)))
