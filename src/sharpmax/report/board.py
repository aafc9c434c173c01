"""A board as a value: maps of cells that can be pressed, all in one colour scale, before anybody draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["STEPS", "Board", "BoardMap", "Kind", "Spot", "step_of"]

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
