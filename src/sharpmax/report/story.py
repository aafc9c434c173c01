"""What a command's results tell, as values: figures, numbers, tables and sentences, before they become files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpmax.report.board import Board
from sharpmax.report.grid import Grid
from sharpmax.report.origin import Pairs
from sharpmax.report.plot import Heat, Plot
from sharpmax.report.tables import Tables
from sharpmax.report.tile import Tile

__all__ = ["Figure", "Part", "Story"]


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
