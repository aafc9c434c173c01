"""The figures of `sharpmax reproduce` as values: which a run has tables for, and how each is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sharpmax.report.plot import Heat, Plot
from sharpmax.report.reproduce.plots.detection import detection
from sharpmax.report.reproduce.plots.fit import fit
from sharpmax.report.reproduce.plots.heat import heat
from sharpmax.report.reproduce.plots.sizes import accuracy, focus
from sharpmax.report.reproduce.tables import REFERENCE, key, recipes
from sharpmax.report.tables import Tables

__all__ = ["NEEDS", "build", "file_name", "plottable"]

_BUILDERS: Mapping[str, Callable[[Tables, str], Plot | Heat]] = {
    "heat": heat,
    "accuracy": accuracy,
    "focus": focus,
    "fit": fit,
    "detection": detection,
}

NEEDS: Mapping[str, frozenset[str]] = {
    "heat": frozenset({"heat"}),
    "accuracy": frozenset({"accuracy", "comparison"}),
    "focus": frozenset({"entropy", "top_weight", "bounds"}),
    "fit": frozenset({"fit"}),
    "detection": frozenset({"detection"}),
}
"""The tables of a recipe that each figure is made from."""


def plottable(tables: Tables) -> list[tuple[str, str]]:
    """The figures these tables hold everything for, as pairs of name and recipe."""
    return [
        (name, recipe)
        for recipe in recipes(tables)
        for name, needs in NEEDS.items()
        if all(key(need, recipe) in tables for need in needs)
    ]


def file_name(name: str, recipe: str) -> str:
    """What the figure of a recipe is called in a folder.

    >>> file_name("accuracy", "paper"), file_name("accuracy", "sharp")
    ('accuracy', 'accuracy-sharp')
    """
    return name if recipe == REFERENCE else f"{name}-{recipe}"


def build(tables: Tables, name: str, recipe: str) -> Plot | Heat:
    """Make a figure of a recipe."""
    return _BUILDERS[name](tables, recipe)
