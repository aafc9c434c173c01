"""Reading tables of saved results, whichever command wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sharpmax.errors import FileFormatError, SharpmaxError

Tables = Mapping[str, Any]

RUNS = "runs"
"""The table that holds whole results where several are told together."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}")


@contextmanager
def readable(what: str, tables: Tables) -> Iterator[None]:
    """Say in one line what cannot be made of damaged tables; a mistake of ours goes on as it is.

    Tables are damaged where they are not what their command writes (`sharpmax.report.schema`).
    """
    try:
        yield
    except SharpmaxError:
        raise  # it already says what is wrong
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as problem:
        if (found := _damage(tables)) is None:
            raise
        raise FileFormatError(
            f"results: the tables of {what} are damaged ({found}); run their command again"
        ) from problem


def _damage(tables: Tables) -> str | None:
    from sharpmax.report.registry import story_of
    from sharpmax.report.schema import damage

    runs = [run["tables"] for run in tables[RUNS]] if RUNS in tables else [tables]
    stories = [(story_of(one), one) for one in runs]
    return next((found for story, one in stories if story and (found := damage(story.name, one))), None)


def check_name(name: str, what: str) -> str:
    """A name that becomes part of file names, or an error."""
    if not _NAME.fullmatch(name):
        raise FileFormatError(f"results: {name!r} cannot be the name of a {what}; allowed: letters, digits, - and _")
    return name


def sizes(*rows: Mapping[str, Any]) -> list[str]:
    """The sizes that any of these rows of cells has, in order."""
    return sorted({n for row in rows for n in row if n != "pooled"}, key=int)


def spread_over(cells: Mapping[str, Any]) -> tuple[str, str] | None:
    """The smallest and the largest size of a row of cells, or None if it has fewer than two."""
    known = sizes(cells)
    return (known[0], known[-1]) if len(known) > 1 else None
