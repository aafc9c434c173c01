"""The values a report is made of (cells, tables, metrics, figures, parts), and how saved tables are read."""

from __future__ import annotations

import math
import re
import reprlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError, SharpmaxError
from sharpmax.report.words import Pairs, count, share

Tables = Mapping[str, Any]
"""The tables of a results file, by name."""

RUNS = "runs"
"""The table that holds whole results where two are compared."""

NOTHING = "–"
"""Stands where there is no number."""


@dataclass(frozen=True)
class Cell:
    """A text, a smaller one below it, and whether it is emphasised or faint."""

    text: str
    small: str = ""
    strong: bool = False
    faint: bool = False


EMPTY = Cell(NOTHING, faint=True)


@dataclass(frozen=True)
class Table:
    """One table; the first cell of a row is its heading."""

    title: str
    note: str
    head: Sequence[Cell]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Metric:
    """A number, what it measures, and its uncertainty or setting."""

    value: str
    label: str
    detail: str


@dataclass(frozen=True)
class Figure:
    """A figure and its texts; `name` is that of its files, `chart` builds an Altair chart."""

    name: str
    title: str
    caption: str
    alt: str
    chart: Callable[[], Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.replace("/", "-"))  # of a task such as ruler/vt


@dataclass(frozen=True)
class Part:
    """A part of a page: metrics, the main figure and table, then the other figures and tables, the `details` last."""

    name: str
    label: str
    metrics: Sequence[Metric] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()


@dataclass(frozen=True)
class Report:
    """What a page shows of the results of one command."""

    command: str
    headline: Sequence[str]
    parts: Sequence[Part]
    notes: Sequence[str]
    """Facts that no table shows: warnings, and what limits the conclusions."""

    method: Sequence[str] = ()
    definitions: Sequence[tuple[str, Pairs]] = ()
    """Tasks, variants, models: each group with its title."""

    origins: Sequence[tuple[str, Pairs]] = ()
    """Provenance of what the run was given, such as trained models."""

    about: Mapping[str, Any] = field(default_factory=dict)
    """What the template of the command's method is filled in with."""

    citation: bool = False

    @property
    def figures(self) -> list[Figure]:
        """The figures of all parts."""
        return [figure for part in self.parts for figure in part.figures]


def present(*found: Any) -> list[Any]:
    """The values that are not None."""
    return [one for one in found if one is not None]


def header(*titles: str) -> list[Cell]:
    """The head of a table; small print may follow a bar: `"memory|MB"`."""
    return [Cell(text, small) for text, _, small in (title.partition("|") for title in titles)]


def cell_of(value: float | None, words: Callable[[float], str], **options: Any) -> Cell:
    """The cell of a number, empty where there is none."""
    return EMPTY if value is None else Cell(words(value), **options)


def interval(cell: Mapping[str, Any]) -> str:
    """The interval of a percentage, within 0 and 100; empty where there is none."""
    return "" if cell["low"] is None else f"{share(max(0.0, cell['low']))}–{share(min(100.0, cell['high']))}"


def mean_cell(cell: Mapping[str, Any], *, strong: bool = False) -> Cell:
    """A mean percentage with its interval."""
    return cell_of(cell["mean"], share, small=interval(cell), strong=strong)


def cells(*texts: str) -> list[Cell]:
    """A cell for each text."""
    return [Cell(text) for text in texts]


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}(/[A-Za-z0-9][A-Za-z0-9_-]{0,40})?")


def check_name(name: str, what: str) -> str:
    """Return a name that becomes part of file names, perhaps with a group before a slash; else FileFormatError."""
    if not _NAME.fullmatch(name):
        raise FileFormatError(f"results: {name!r} cannot be the name of a {what}; allowed: letters, digits, - and _")
    return name


def sizes(*rows: Mapping[str, Any]) -> list[str]:
    """The sizes that any of these rows has, in order."""
    return sorted({n for row in rows for n in row if n != "pooled"}, key=int)


def size_table(
    title: str, note: str, table: Mapping[str, Any], cell: Callable[[Any], Cell], head: str = "variant"
) -> Table:
    """A row for each entry of `table`, a column for each size and for all; what is missing is an empty cell."""
    known = [*sizes(*table.values()), *(["pooled"] if any("pooled" in row for row in table.values()) else [])]
    heads = [Cell("all sizes" if n == "pooled" else f"n = {count(n)}") for n in known]
    rows = [
        [Cell(name), *(EMPTY if row.get(n) is None else cell(row[n]) for n in known)] for name, row in table.items()
    ]
    return Table(title, note, [Cell(head), *heads], rows)


def named(tables: Tables, kind: str) -> list[str]:
    """The names after the slash of all tables of one kind, in the order of the file.

    >>> named({"accuracy/kv": {}, "accuracy/needle": {}, "setting": {}}, "accuracy")
    ['kv', 'needle']
    """
    return [name.partition("/")[2] for name in tables if name.startswith(f"{kind}/")]


_NUMBERS = {
    "mean", "low", "high", "sem", "n", "p", "count", "effective", "slope", "slope_low", "slope_high", "gain", "gained",
    "lost", "of_ceiling", "median", "p90", "bias", "tokens", "rank", "auroc", "right", "wrong", "parameters", "memory",
    "beyond", "prefill_ms", "prefill_ratio", "decode_ms", "decode_ratio", "peak_mib", "steps", "validation", "strength",
}  # fmt: skip
"""Keys whose values are numbers or null in every table."""


@contextmanager
def readable(tables: Mapping[str, Any]) -> Iterator[None]:
    """Raise FileFormatError, with the place, for tables that cannot be read as those of their command."""
    for place, value in _leaves(tables, ()):
        wrong = isinstance(value, float) and not math.isfinite(value)
        if "policy" not in place and place[-1] in _NUMBERS and (isinstance(value, bool | str | list) or wrong):
            raise _damaged(f"{'/'.join(place)} is {reprlib.repr(value)} and not a finite number")
    try:
        yield
    except SharpmaxError:
        raise
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as problem:
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        words = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise _damaged(f"{words}, in {Path(frame.filename).name} line {frame.lineno}") from problem


def _damaged(what: str) -> FileFormatError:
    return FileFormatError(f"results: the tables are damaged or of another version ({what}); run their command again")


def _leaves(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for name, one in value.items():
            yield from _leaves(one, (*place, str(name)))
    else:
        yield place, value
