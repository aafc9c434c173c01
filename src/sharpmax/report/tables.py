"""Reading the tables of `sharpmax reproduce`: which recipes they hold, and what is in a table of numbers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sharpmax.errors import FileFormatError, SharpmaxError

__all__ = [
    "REFERENCE",
    "Tables",
    "crossing",
    "describe",
    "key",
    "over_seeds",
    "part",
    "readable",
    "recipe_name",
    "recipes",
    "row",
    "sizes",
    "spread_over",
]

Tables = Mapping[str, Any]

REFERENCE = "paper"
"""The recipe whose tables have plain names."""

_OF_A_RECIPE = ("accuracy", "comparison", "entropy", "top_weight", "bounds", "fit", "heat", "detection")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,40}")


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn whatever goes wrong while reading damaged tables into one line that says what cannot be made of them."""
    try:
        yield
    except SharpmaxError:
        raise  # it already says what is wrong
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
        reason = " ".join(str(problem).split())
        raise FileFormatError(
            f"results: the tables of {what} are damaged ({type(problem).__name__}: {reason}); run their command again"
        ) from problem


def key(name: str, recipe: str) -> str:
    """The name under which a recipe's table is saved.

    >>> key("accuracy", "paper"), key("accuracy", "sharp")
    ('accuracy', 'accuracy/sharp')
    """
    return name if recipe == REFERENCE else f"{name}/{recipe}"


def part(tables: Tables, name: str, recipe: str) -> Any:
    """A recipe's table, or None if the run does not hold it."""
    return tables.get(key(name, recipe))


def row(tables: Tables, name: str, recipe: str, arm: str) -> Any:
    """An arm's cells in a recipe's table, or None if the run does not hold them."""
    return (part(tables, name, recipe) or {}).get(arm)


def recipes(tables: Tables) -> list[str]:
    """The recipes these tables hold something of, the reference first."""
    found: dict[str, None] = {}
    for table in tables:
        name, _, recipe = table.partition("/")
        if name in _OF_A_RECIPE:
            found[recipe or REFERENCE] = None
    for recipe in found:
        if not _NAME.fullmatch(recipe):  # it becomes part of file names
            raise FileFormatError(
                f"results: {recipe!r} cannot be the name of a recipe; allowed: small letters, digits, - and _"
            )
    return sorted(found, key=lambda recipe: recipe != REFERENCE)


def recipe_name(recipe: str) -> str:
    """A recipe in a sentence.

    >>> recipe_name("paper"), recipe_name("sharp")
    ("the paper's recipe", 'the sharp recipe')
    """
    return "the paper's recipe" if recipe == REFERENCE else f"the {recipe} recipe"


def describe(tables: Tables, recipe: str) -> str:
    """The line in which the run describes a recipe, or nothing."""
    setting = tables.get("setting", {}).get("recipes", {}).get(recipe, {})
    return str(setting.get("describe", "")).rstrip(". ")


def over_seeds(tables: Tables, recipe: str) -> str:
    """What a number and its error are, or nothing if the run does not say."""
    seeds = len(tables.get("setting", {}).get("recipes", {}).get(recipe, {}).get("seeds", []))
    return "" if not seeds else "a single seed" if seeds == 1 else f"mean of {seeds} seeds ± standard error"


def sizes(*rows: Mapping[str, Any]) -> list[str]:
    """The sizes that any of these rows of cells has, in order."""
    return sorted({n for row in rows for n in row if n != "pooled"}, key=int)


def crossing(cells: Mapping[str, Any], level: float) -> float | None:
    """The size at which a rising line of means passes `level`, straight between points on the log axis."""
    for a, b in itertools.pairwise(sizes(cells)):
        low, high = cells[a]["mean"], cells[b]["mean"]
        if low <= level < high:
            share = (level - low) / (high - low)
            return math.exp(math.log(int(a)) + share * math.log(int(b) / int(a)))
    return None


def spread_over(cells: Mapping[str, Any]) -> tuple[str, str] | None:
    """The smallest and the largest size of a row of cells, or None if it has fewer than two."""
    known = sizes(cells)
    return (known[0], known[-1]) if len(known) > 1 else None
