"""Colours, markers and line styles of figures and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stroke = Literal["solid", "dash", "dot", "dashdot", "longdash"]


@dataclass(frozen=True)
class Colour:
    """A colour on white, and the one that takes its place on a dark page."""

    light: str
    dark: str


@dataclass(frozen=True)
class Marker:
    """One shape in three languages: matplotlib's, plotly's and an SVG path in a box of ±5."""

    matplotlib: str
    plotly: str
    path: str


@dataclass(frozen=True)
class Look:
    """How a line is called and drawn: `label` in legends, `subject` in sentences, `about` where it is explained."""

    label: str
    colour: Colour
    marker: Marker | None = None
    subject: str = ""
    about: str = ""
    width: float = 1.8
    size: float = 5.5
    layer: float = 2.0
    stroke: Stroke = "solid"


INK = Colour("#1b2026", "#e9ecef")
SOFT = Colour("#5b6570", "#a5afba")
GRID = Colour("#e3e6ea", "#343b43")
PALE = Colour("#a9b1ba", "#66717c")
PAGE = Colour("#ffffff", "#15191e")
PANEL = Colour("#f6f7f9", "#1d2228")
LINK = Colour("#005a8c", "#7cc4f0")

HEAT_SCALE = "viridis"
"""Colour scale of heat maps, a name that matplotlib and plotly share."""

DIVERGING_SCALE = ("#2166ac", "#92c5de", "#eceef0", "#f4a582", "#b2182b")
"""Colours of heat maps whose middle is nothing, from less over nothing to more, evenly spaced."""

DIVERGING_DARK = ("#6fb1ee", "#2c5f8f", "#2b3138", "#9a4b2c", "#ff8d6b")
"""The same on a dark page, where nothing is dark."""

CIRCLE = Marker("o", "circle", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z")
SQUARE = Marker("s", "square", "M-3.6 -3.6H3.6V3.6H-3.6Z")
UP = Marker("^", "triangle-up", "M0 -4.6L4.6 3.8H-4.6Z")
DOWN = Marker("v", "triangle-down", "M0 4.6L4.6 -3.8H-4.6Z")
DIAMOND = Marker("D", "diamond", "M0 -4.8L4.8 0L0 4.8L-4.8 0Z")
STAR = Marker("*", "star", "M0 -5.2L1.5 -1.6L5 -1.6L2.2 0.7L3.2 4.4L0 2.2L-3.2 4.4L-2.2 0.7L-5 -1.6L-1.5 -1.6Z")
CROSS = Marker("X", "x", "M-4.6 -3L-3 -4.6L0 -1.6L3 -4.6L4.6 -3L1.6 0L4.6 3L3 4.6L0 1.6L-3 4.6L-4.6 3L-1.6 0Z")
PLUS = Marker("P", "cross", "M-1.4 -4.6H1.4V-1.4H4.6V1.4H1.4V4.6H-1.4V1.4H-4.6V-1.4H-1.4Z")
LEFT = Marker("<", "triangle-left", "M-4.6 0L3.8 -4.6V4.6Z")
RIGHT = Marker(">", "triangle-right", "M4.6 0L-3.8 -4.6V4.6Z")
PENTAGON = Marker("p", "pentagon", "M0 -4.8L4.6 -1.5L2.8 3.9L-2.8 3.9L-4.6 -1.5Z")
HEXAGON = Marker("h", "hexagon", "M0 -4.8L4.2 -2.4L4.2 2.4L0 4.8L-4.2 2.4L-4.2 -2.4Z")

BLACK = Colour("#333333", "#f2f2f2")
ORANGE = Colour("#e69f00", "#f0b73a")
GREEN = Colour("#009e73", "#2cc79c")
BLUE = Colour("#0072b2", "#56b4e9")
VERMILLION = Colour("#d55e00", "#ff8a3d")
PURPLE = Colour("#cc79a7", "#e6a0c8")

PALETTE = (INK, SOFT, GRID, PALE, PAGE, PANEL, LINK, BLACK, ORANGE, GREEN, BLUE, VERMILLION, PURPLE)
"""Every colour there is."""

_COLOURS = (BLACK, VERMILLION, BLUE, GREEN, PURPLE, ORANGE)
_MARKERS = (CIRCLE, SQUARE, UP, DIAMOND, DOWN, STAR, CROSS, LEFT, PLUS, RIGHT, PENTAGON, HEXAGON)
_STROKES: tuple[Stroke, ...] = ("solid", "dashdot", "longdash")


def in_turn(label: str, place: int) -> Look:
    """The look of the line at a place among others that nobody has named before.

    The first 12 differ in marker, the first 18 in colour and stroke, the first 36 in all three together.
    """
    again, colour = divmod(place, len(_COLOURS))
    return Look(
        label,
        _COLOURS[colour],
        _MARKERS[(place + again // len(_STROKES)) % len(_MARKERS)],
        label,
        # The first tends to lie underneath the others and stays visible as the thinnest.
        width=1.5 if place == 0 else 1.8,
        layer=4.0 if place == 0 else 2.0,
        stroke=_STROKES[again % len(_STROKES)],
    )


_INKS = ("#000000", "#ffffff")


@dataclass(frozen=True)
class Shade:
    """A colour and the ink that stands out on it."""

    fill: str
    ink: str


def shades(scale: Sequence[str], steps: int) -> list[Shade]:
    """So many colours, evenly along a scale of colours.

    >>> [shade.fill for shade in shades(("#000000", "#ffffff"), 3)]
    ['#000000', '#808080', '#ffffff']
    """
    fills = [_between(scale, place / (steps - 1)) for place in range(steps)]
    return [Shade(fill, max(_INKS, key=lambda ink: contrast(ink, fill))) for fill in fills]


def contrast(one: str, other: str) -> float:
    """How far two colours stand apart, from 1 to 21, as the guidelines for accessible pages reckon it.

    >>> round(contrast("#ffffff", "#000000"))
    21
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _between(scale: Sequence[str], share: float) -> str:
    at = share * (len(scale) - 1)
    left = min(int(at), len(scale) - 2)
    ends = zip(_channels(scale[left]), _channels(scale[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - left)):02x}" for a, b in ends)


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def _luminance(colour: str) -> float:
    shares = [value / 255 for value in _channels(colour)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in shares]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
