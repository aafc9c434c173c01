"""Reading the tables of `sharpmax reproduce`: which recipes they hold, and what is in a table of a recipe."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from sharpmax.report.tables import Tables, check_name, sizes

__all__ = [
    "REFERENCE",
    "crossing",
    "describe",
    "key",
    "over_seeds",
    "part",
    "recipe_name",
    "recipes",
    "row",
]

REFERENCE = "paper"
"""The recipe whose tables have plain names."""

_OF_A_RECIPE = ("accuracy", "comparison", "entropy", "top_weight", "bounds", "fit", "heat", "detection")


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
        check_name(recipe, "recipe")
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


def crossing(cells: Mapping[str, Any], level: float) -> float | None:
    """The size at which a rising line of means passes `level`, straight between points on the log axis."""
    for a, b in itertools.pairwise(sizes(cells)):
        low, high = cells[a]["mean"], cells[b]["mean"]
        if low <= level < high:
            share = (level - low) / (high - low)
            return math.exp(math.log(int(a)) + share * math.log(int(b) / int(a)))
    return None
