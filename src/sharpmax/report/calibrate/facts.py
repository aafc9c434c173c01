"""What the tables of `sharpmax calibrate` hold and show, before it is put into words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sharpmax.report.tables import Tables
from sharpmax.report.texts import texts_in_order

__all__ = ["RISE", "chosen", "kept", "leash", "log_betas", "total_heads", "worst_rise"]

RISE = "rise/"
"""What the names of perplexity's lines in the training curve begin with."""

_SMALLEST = 1e-3


def chosen(tables: Tables) -> Mapping[str, Any]:
    """The candidate that became the policy."""
    found: Mapping[str, Any] = tables["candidates"][tables["chosen"]]
    return found


def leash(tables: Tables) -> float:
    """How far perplexity may rise, in percent."""
    return float(tables["setting"]["leash"])


def total_heads(tables: Tables) -> int:
    """Heads of the whole model."""
    return int(tables["setting"]["layers"]) * int(tables["setting"]["heads"])


def worst_rise(candidate: Mapping[str, Any]) -> tuple[str, float]:
    """The text on which perplexity rises most, and how far in percent."""
    rises = candidate["rise"]
    column = max(texts_in_order(rises), key=rises.__getitem__)
    return column, float(rises[column])


def kept(tables: Tables, candidate: Mapping[str, Any]) -> bool:
    """Whether a candidate stays within the leash."""
    return worst_rise(candidate)[1] <= leash(tables)


def log_betas(tables: Tables) -> list[list[float]]:
    """ln β of every head, a row for each head and a column for each layer."""
    grid = tables["heads"]["betas"]
    return [[math.log(max(layer[head], _SMALLEST)) for layer in grid] for head in range(len(grid[0]))]
