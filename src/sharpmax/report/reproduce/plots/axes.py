"""What the figures of `sharpmax reproduce` share: lines of cells, and the small print."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sharpmax.report.looks import Look, Stroke
from sharpmax.report.plot import Series
from sharpmax.report.reproduce.looks import look
from sharpmax.report.reproduce.tables import describe, recipe_name
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.words import capital, estimate

__all__ = ["arm_series", "bound_series", "note"]


def arm_series(arm: str, cells: Mapping[str, Any], words: Callable[[float], str], unit: str) -> Series:
    """An arm's means against size, with their standard errors."""
    known, style = sizes(cells), look(arm)
    means = [cells[n]["mean"] for n in known]
    errors = [cells[n]["sem"] for n in known]
    return Series(
        style.label,
        style,
        [int(n) for n in known],
        means,
        [f"{style.label}: {estimate(words(mean), sem)} {unit}" for mean, sem in zip(means, errors, strict=True)],
        low=[None if sem is None else mean - sem for mean, sem in zip(means, errors, strict=True)],
        high=[None if sem is None else mean + sem for mean, sem in zip(means, errors, strict=True)],
        arm=arm,
    )


def bound_series(
    style: Look,
    bound: Mapping[str, float],
    label: str,
    words: Callable[[float], str],
    unit: str,
    *,
    stroke: Stroke = "dash",
) -> Series:
    """A line of the theory against size."""
    known = sizes(bound)
    return Series(
        style.label,
        style,
        [int(n) for n in known],
        [bound[n] for n in known],
        [f"{label}: {words(bound[n])} {unit}" for n in known],
        stroke=stroke,
        marker=None,
    )


def note(tables: Tables, recipe: str, *more: str) -> str:
    """The small print under a title: the recipe, and whatever else is to be known."""
    line = describe(tables, recipe)
    return "; ".join([capital(recipe_name(recipe)) + (f" ({line})" if line else ""), *filter(None, more)])
