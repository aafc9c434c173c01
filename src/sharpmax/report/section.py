"""What a command's results show, as values: figures, metrics, tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpmax.report.plot import Board, Heat, Plot
from sharpmax.report.tables import Tables
from sharpmax.report.words import Pairs


@dataclass(frozen=True)
class Tile:
    """A number, what it is, and what is to be known about it."""

    value: str
    label: str
    detail: str


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


@dataclass(frozen=True)
class Figure:
    """A figure that can be made: its kind, the part of the page it stands in, its name there and in a folder."""

    kind: str
    part: str
    name: str
    file: str
    make: Callable[[], Plot | Heat | Board]


@dataclass(frozen=True)
class Part:
    """A part of the page with its own numbers, figures and tables; where there are several, one is shown at a time."""

    name: str
    label: str
    describe: str = ""
    tiles: Sequence[Tile] = ()
    grids: Sequence[Grid] = ()
    more: Mapping[str, Any] = field(default_factory=dict)
    """What the template of this story alone asks for."""


@dataclass(frozen=True)
class Story:
    """How the tables of one command are told; `name` is the command's and that of its template."""

    name: str
    tells: Callable[[Tables], bool]
    """Whether these tables are of this command, from their names alone."""

    figures: Callable[[Tables], Sequence[Figure]]
    parts: Callable[[Tables], Sequence[Part]]
    summary: Callable[[Tables], Sequence[tuple[str, Sequence[str]]]]
    """Answers to what a reader would ask, each with its question."""

    method: Callable[[Tables], Mapping[str, Any]]
    """What the template says about how it was done."""

    origins: Callable[[Tables], Sequence[tuple[str, Pairs]]] = lambda tables: ()
    """Where further things come from that the run was given."""

    compares: bool = False
    """Whether it can tell two results together, given as `tables.RUNS`."""
