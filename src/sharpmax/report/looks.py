"""Colours, markers and how a line looks, for every figure and every page.

Okabe and Ito's colours stay apart for colour-blind readers, the markers for black and white print.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BLACK",
    "BLUE",
    "CIRCLE",
    "DIAMOND",
    "DIVERGING_DARK",
    "DIVERGING_SCALE",
    "DOWN",
    "GREEN",
    "GRID",
    "HEAT_SCALE",
    "INK",
    "LINK",
    "ORANGE",
    "PAGE",
    "PALE",
    "PALETTE",
    "PANEL",
    "PURPLE",
    "SOFT",
    "SQUARE",
    "STAR",
    "UP",
    "VERMILLION",
    "Colour",
    "Look",
    "Marker",
    "in_turn",
]


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

BLACK = Colour("#333333", "#f2f2f2")
ORANGE = Colour("#e69f00", "#f0b73a")
GREEN = Colour("#009e73", "#2cc79c")
BLUE = Colour("#0072b2", "#56b4e9")
VERMILLION = Colour("#d55e00", "#ff8a3d")
PURPLE = Colour("#cc79a7", "#e6a0c8")

PALETTE = (INK, SOFT, GRID, PALE, PAGE, PANEL, LINK, BLACK, ORANGE, GREEN, BLUE, VERMILLION, PURPLE)
"""Every colour there is."""

_IN_TURN = (
    (BLACK, CIRCLE),
    (VERMILLION, SQUARE),
    (BLUE, UP),
    (GREEN, DIAMOND),
    (PURPLE, DOWN),
    (ORANGE, STAR),
)


def in_turn(label: str, place: int) -> Look:
    """The look of the line at a place among others that nobody has named before; a seventh is drawn as the second."""
    colour, marker = _IN_TURN[place if place < len(_IN_TURN) else 1 + (place - 1) % (len(_IN_TURN) - 1)]
    # The first tends to lie underneath the others and stays visible as the thinnest.
    return Look(label, colour, marker, label, layer=4.0 if place == 0 else 2.0, width=1.5 if place == 0 else 1.8)
