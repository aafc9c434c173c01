"""What the tables of `sharpmax compare` hold and show about a league, before it is put into words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharpmax.report.tables import Tables

__all__ = [
    "SOFTMAX",
    "Gap",
    "cell",
    "gap",
    "has_capacity",
    "has_league",
    "highlighted",
    "largest",
    "leader",
    "level_with",
    "loss_of",
    "measured",
    "methods",
    "place_of",
    "shown_sizes",
    "sizes_of",
]

SOFTMAX = "softmax"
"""What the others are alternatives to."""

_HIGHLIGHTED, _ALL = 5, 6
"""So many methods stand out among many; so few need no standing out."""

_SHOWN = 5
"""Sizes that have a column in tables."""


@dataclass(frozen=True)
class Gap:
    """By how many points one method is ahead of another on the same seeds and examples; 95% where seeds allow it."""

    mean: float
    low: float | None
    high: float | None

    @property
    def shown(self) -> bool:
        """Whether chance alone would hardly give it; one seed shows nothing."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


def has_league(tables: Tables) -> bool:
    """Whether methods were compared."""
    return "league" in tables


def has_capacity(tables: Tables) -> bool:
    """Whether models of several capacities were."""
    return "capacity" in tables and "laws" in tables


def methods(tables: Tables) -> list[str]:
    """The methods, the best first."""
    return list(tables["league"])


def sizes_of(tables: Tables) -> list[str]:
    """The sizes that were tested."""
    return [str(size) for size in tables["setting"]["sizes"]]


def largest(tables: Tables) -> str:
    """The largest size that was tested."""
    return sizes_of(tables)[-1]


def shown_sizes(tables: Tables) -> list[str]:
    """A few sizes: the smallest, and the largest with some in even steps before it."""
    known = sizes_of(tables)
    if len(known) <= _SHOWN:
        return known
    step = (len(known) - 1) // (_SHOWN - 1)
    return [known[0], *known[::-1][: step * (_SHOWN - 1) : step][::-1]]


def cell(tables: Tables, table: str, method: str, size: str) -> Mapping[str, Any]:
    """Mean and interval of a measure, whose mean is None where there was nothing to measure."""
    found: Mapping[str, Any] = tables[table][method][size]
    return found


def measured(tables: Tables, table: str) -> bool:
    """Whether a measure has a number anywhere: not every task has near-ties."""
    return any(one["mean"] is not None for by_size in tables[table].values() for one in by_size.values())


def place_of(tables: Tables, method: str) -> str:
    """The rank of a method, with a sign where others share it."""
    ranks = [place["rank"] for place in tables["league"].values()]
    rank = tables["league"][method]["rank"]
    return f"{rank}=" if ranks.count(rank) > 1 else str(rank)


def leader(tables: Tables) -> str:
    """The method that is right most often at the largest size."""
    return max(methods(tables), key=lambda method: cell(tables, "accuracy", method, largest(tables))["mean"])


def level_with(tables: Tables) -> list[str]:
    """Methods that the leader is not shown to be ahead of at the largest size, the closest first."""
    first, size = leader(tables), largest(tables)
    gaps = {method: gap(tables, first, method, size) for method in methods(tables) if method != first}
    return sorted((method for method, one in gaps.items() if not one.shown), key=lambda method: gaps[method].mean)


def gap(tables: Tables, one: str, other: str, size: str) -> Gap:
    """How far a method is ahead of another at a size, seed by seed."""
    pairs = zip(tables["per_seed"][one][size], tables["per_seed"][other][size], strict=True)
    apart = [first - second for first, second in pairs]
    mean = sum(apart) / len(apart)
    reach = _quantile(tables, len(apart))
    if reach is None:
        return Gap(mean, None, None)
    sem = math.sqrt(sum((value - mean) ** 2 for value in apart) / (len(apart) - 1) / len(apart))
    return Gap(mean, mean - reach * sem, mean + reach * sem)


def _quantile(tables: Tables, seeds: int) -> float | None:
    """Student's quantile for so many seeds, as the intervals of the results have it."""
    if seeds < 2:
        return None
    cells = (one for by_size in tables["accuracy"].values() for one in by_size.values())
    known = [one for one in cells if one["n"] == seeds and one["sem"]]
    widest = max(known, key=lambda one: one["sem"], default=None)
    # Seeds that never differ leave no doubt about any difference.
    return 0.0 if widest is None else (widest["mean"] - widest["low"]) / widest["sem"]


def loss_of(tables: Tables, method: str, size: str) -> tuple[float, float] | None:
    """Points lost to dispersion, and to wrong ranking; None where hard attention was not measured.

    The first is negative where spreading its weight helps a method.
    """
    right, hard = (cell(tables, table, method, size)["mean"] for table in ("accuracy", "hard"))
    return None if hard is None else (hard - right, 100.0 - hard)


def highlighted(tables: Tables) -> list[str]:
    """The methods that stand out in figures, softmax first, then the leader and the best of the others."""
    known = methods(tables)
    order = dict.fromkeys([*(one for one in (SOFTMAX, leader(tables)) if one in known), *known])
    return list(order) if len(known) <= _ALL else list(order)[:_HIGHLIGHTED]
