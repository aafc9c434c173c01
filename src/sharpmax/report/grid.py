"""A table as a value: headings, how to read it, and cells of text, for the page and for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["NOTHING", "Cell", "Grid"]

NOTHING = "–"
"""What stands where there is no number."""


@dataclass(frozen=True)
class Cell:
    """A number as text, something smaller beneath it, and whether it is to be noticed or to stand back."""

    text: str
    small: str = ""
    strong: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Grid:
    """One table: what it shows, how to read it, and its rows; the first cell of a row is its heading."""

    title: str
    note: str
    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]
