"""What a report consists of: parts with metrics, figures and tables of cells."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError, SharpmaxError
from sharpmax.report.words import Pairs, capital, count, points, share

Tables = Mapping[str, Any]
"""The tables of a results file, by name."""

RUNS = "runs"
"""The name of the table with whole results, when two are compared."""

NOTHING = "–"
"""Shown where there is no number."""


@dataclass(frozen=True)
class Cell:
    """A text, small print below it, and whether the text is bold."""

    text: str
    small: str = ""
    strong: bool = False


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


_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,80}")


@dataclass(frozen=True)
class Figure:
    """A figure; `name` is the name of its files, `chart` builds the Altair chart."""

    name: str
    title: str
    caption: str
    chart: Callable[[], Any]

    def __post_init__(self) -> None:
        name = self.name.replace("/", "-")  # of a task such as ruler/vt
        if not _FILE_NAME.fullmatch(name):
            raise FileFormatError(f"results: {name!r} cannot be the name of a file; allowed: letters, digits, - and _")
        object.__setattr__(self, "name", name)


@dataclass(frozen=True)
class Part:
    """A part of a page: metrics, the main figure and table, then the other figures and tables."""

    name: str
    label: str
    metrics: Sequence[Metric]
    figures: Sequence[Figure]
    tables: Sequence[Table]


@dataclass(frozen=True)
class Report:
    """What a page shows of the results of one command."""

    command: str
    parts: Sequence[Part]
    notes: Sequence[str] = ()
    """Warnings, and limits of the conclusions."""

    definitions: Sequence[tuple[str, Pairs]] = ()
    """Groups of definitions with their titles: tasks, variants, models."""

    origins: Sequence[tuple[str, Pairs]] = ()
    """Provenance of inputs of the run, such as trained models."""

    @property
    def headline(self) -> list[str]:
        """The first metrics of each part as sentences."""
        return [" ".join(f"{capital(one.label)}: {one.value}." for one in part.metrics[:3]) for part in self.parts]

    @property
    def figures(self) -> list[Figure]:
        """The figures of all parts."""
        return [figure for part in self.parts for figure in part.figures]


def table_of(title: str, note: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Make a table of cells, texts and None (empty). Small print of a heading follows a bar: `"memory|MB"`."""
    titles = [Cell(text, small) for text, _, small in (title.partition("|") for title in head)]
    cells = [[one if isinstance(one, Cell) else Cell(one or NOTHING) for one in row] for row in rows]
    return Table(title, note, titles, cells)


def interval(cell: Mapping[str, Any]) -> str:
    """The interval of a percentage, clipped to 0 and 100; empty if there is none."""
    if cell.get("low") is None:
        return ""
    return f"{share(max(0.0, cell['low']))}–{share(min(100.0, cell['high']))}"


def mean_cell(cell: Mapping[str, Any]) -> Cell | None:
    """A mean percentage with its interval."""
    return None if cell["mean"] is None else Cell(share(cell["mean"]), interval(cell))


def sizes(*rows: Mapping[str, Any]) -> list[str]:
    """The sizes that any of these rows has, in order."""
    return sorted({n for row in rows for n in row}, key=int)


def accuracy_table(title: str, note: str, table: Mapping[str, Any], tests: Mapping[str, Any], level: float) -> Table:
    """Means in percent by size with intervals or standard errors, and gains over the first row where tested."""
    first, known = next(iter(table)), sizes(*table.values())
    rows: list[list[Any]] = []
    for name, row in table.items():
        rows.append([name])
        for n in known:
            one, test = row.get(n), tests.get(name, {}).get(n)
            if one is None:
                rows[-1].append(None)
                continue
            spread = interval(one) or (f"± {one['sem']:.2g}" if one.get("sem") is not None else "")
            gain = points(one["mean"] - table[first][n]["mean"]) if test else ""
            sure = test is not None and test["p"] is not None and test["p"] < level
            rows[-1].append(Cell(share(one["mean"]), ", ".join(filter(None, (spread, gain))), strong=sure))
    small = f"then the gain over {first} in points. Bold: p < {level:g}, not corrected for multiple comparisons."
    return table_of(title, f"{note}, {small}", ["variant", *(f"n = {count(n)}" for n in known)], rows)


def named(tables: Tables, kind: str) -> list[str]:
    """The names after the slash of all tables of one kind.

    >>> named({"accuracy/kv": {}, "accuracy/needle": {}, "setting": {}}, "accuracy")
    ['kv', 'needle']
    """
    return [name.partition("/")[2] for name in tables if name.startswith(f"{kind}/")]


@contextmanager
def readable() -> Iterator[None]:
    """Turn errors of the block, which reads saved tables, into a FileFormatError."""
    try:
        yield
    except SharpmaxError:
        raise
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as problem:
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        words = " ".join(f"{type(problem).__name__}: {problem}".split())
        raise FileFormatError(
            "results: the tables are damaged or of another version "
            f"({words}, in {Path(frame.filename).name} line {frame.lineno}); run their command again"
        ) from problem
