"""What arms, signals and other lines look like: names, colours and markers, for every figure and every page.

Okabe and Ito's colours stay apart for colour-blind readers, the markers for black and white print.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "BEST",
    "BOUND",
    "GRID",
    "HEAT_SCALE",
    "INK",
    "LARGE_N",
    "LINK",
    "PAGE",
    "PALETTE",
    "PANEL",
    "PUBLISHED",
    "SOFT",
    "Colour",
    "Look",
    "Marker",
    "in_order",
    "look",
    "signal",
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
PAGE = Colour("#ffffff", "#15191e")
PANEL = Colour("#f6f7f9", "#1d2228")
LINK = Colour("#005a8c", "#7cc4f0")

HEAT_SCALE = "viridis"
"""Colour scale of heat maps, a name that matplotlib and plotly share."""

_CIRCLE = Marker("o", "circle", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z")
_SQUARE = Marker("s", "square", "M-3.6 -3.6H3.6V3.6H-3.6Z")
_UP = Marker("^", "triangle-up", "M0 -4.6L4.6 3.8H-4.6Z")
_DOWN = Marker("v", "triangle-down", "M0 4.6L4.6 -3.8H-4.6Z")
_DIAMOND = Marker("D", "diamond", "M0 -4.8L4.8 0L0 4.8L-4.8 0Z")
_STAR = Marker("*", "star", "M0 -5.2L1.5 -1.6L5 -1.6L2.2 0.7L3.2 4.4L0 2.2L-3.2 4.4L-2.2 0.7L-5 -1.6L-1.5 -1.6Z")

_BLACK = Colour("#333333", "#f2f2f2")
_ORANGE = Colour("#e69f00", "#f0b73a")
_GREEN = Colour("#009e73", "#2cc79c")
_BLUE = Colour("#0072b2", "#56b4e9")
_VERMILLION = Colour("#d55e00", "#ff8a3d")
_PURPLE = Colour("#cc79a7", "#e6a0c8")

PALETTE = (INK, SOFT, GRID, PAGE, PANEL, LINK, _BLACK, _ORANGE, _GREEN, _BLUE, _VERMILLION, _PURPLE)
"""Every colour there is."""

# Lines that meet stay visible: what tends to lie underneath is wide, what lies on top of it is thin.
_ARMS = {
    "softmax": Look(
        "plain softmax",
        _BLACK,
        _CIRCLE,
        "plain softmax",
        "The model as it was trained, with β = 1 everywhere.",
        width=1.5,
        size=4.5,
        layer=4.0,
    ),
    "paper": Look(
        "paper's polynomial",
        _VERMILLION,
        _SQUARE,
        "the paper's polynomial",
        "β is a polynomial of the row's entropy, with the coefficients the paper prints.",
        size=6.0,
    ),
    "refit": Look(
        "refitted polynomial",
        _PURPLE,
        _DOWN,
        "the refitted polynomial",
        "A polynomial of the same kind, with coefficients fitted to inputs that these very models rank wrongly.",
    ),
    "log-length": Look(
        "log-length",
        _BLUE,
        _UP,
        "the log-length law",
        "β grows with ln n, the logarithm of the number of items.",
    ),
    "entropy-target": Look(
        "entropy target",
        _GREEN,
        _DIAMOND,
        "the entropy target",
        "β is solved for each row so that its entropy stays where it was during training.",
        layer=3.0,
    ),
    "hard": Look(
        "hard argmax",
        _ORANGE,
        _STAR,
        "hard argmax",
        "All weight on the item with the largest logit: the limit β → ∞, and about what sharpening alone can reach.",
        width=4.5,
        size=11.0,
        layer=1.0,
    ),
}

_SIGNALS = {
    "confidence": Look(
        "classifier's confidence", _BLUE, _CIRCLE, "the classifier's confidence", "Largest class probability."
    ),
    "entropy": Look(
        "attention entropy", _VERMILLION, _SQUARE, "the entropy of attention", "Entropy of the attention row."
    ),
    "both": Look(
        "both together",
        _GREEN,
        _DIAMOND,
        "both together",
        "Logistic regression on confidence and entropy, fitted on other items.",
    ),
}

PUBLISHED = Look("published in the paper", SOFT, _CIRCLE)
BOUND = Look("theory's bound for plain softmax", SOFT, width=1.3, layer=1.5)
LARGE_N = Look("theory's limit for large n", SOFT, width=1.6, layer=1.5)
BEST = Look("best β of a wrongly ranked input", SOFT, _CIRCLE, size=3.0, layer=1.0)


def look(arm: str) -> Look:
    """How an arm looks; one nobody has heard of is grey and goes by its own name."""
    return _ARMS.get(arm) or Look(arm, SOFT, _CIRCLE, arm)


def signal(name: str) -> Look:
    """How a signal of failure detection looks."""
    return _SIGNALS.get(name) or Look(name, SOFT, _CIRCLE, name)


def in_order(names: Iterable[str]) -> list[str]:
    """Arms or signals in the order in which they are always shown; unknown ones last, by name.

    >>> in_order(["mine", "hard", "softmax"])
    ['softmax', 'hard', 'mine']
    """
    known = [*_ARMS, *_SIGNALS]
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))
