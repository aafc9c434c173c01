"""The heat map: weights of the best items, set by set, as sets grow."""

from __future__ import annotations

from collections.abc import Sequence

from sharpmax.report.plot import Heat, HeatPanel
from sharpmax.report.reproduce.looks import in_order, look
from sharpmax.report.reproduce.plots.axes import note
from sharpmax.report.reproduce.tables import part
from sharpmax.report.tables import Tables
from sharpmax.report.words import count, joined, percent

__all__ = ["heat"]


def heat(tables: Tables, recipe: str) -> Heat:
    """Weights of the items with the highest priority, a panel for each size and a row of panels for each arm."""
    table = part(tables, "heat", recipe)
    known = [str(n) for n in table["sizes"]]
    arms = {
        arm: [HeatPanel(f"n = {count(n)}", _checked(table["arms"][arm][n])) for n in known]
        for arm in in_order(table["arms"])
    }
    first = {arm: [_mean_of_first(panel) for panel in panels] for arm, panels in arms.items()}
    ends = [
        f"{look(arm).label} {percent(means[0])} at {count(known[0])} items, {percent(means[-1])} at {count(known[-1])}"
        for arm, means in first.items()
    ]
    weights = f"Mean weight of the right item: {'; '.join(ends)}."
    fades = "softmax" in first and first["softmax"][-1] < 0.5 * first["softmax"][0]
    return Heat(
        "Plain softmax lets go of the right item as sets grow" if fades else "Weights of the best items as sets grow",
        note(tables, recipe, "the first of the trained models"),
        f"Each line is one of {count(table['sets'])} sets, each column one of the {count(table['items'])} items with "
        f"the highest priority, the right answer first. A sharp head has one bright column on the left. {weights}",
        f"Heat maps of attention weights for {joined([look(arm).label for arm in arms])}. {weights}",
        arms,
        {arm: look(arm).label for arm in arms},
        "item, by priority (1 = right answer)",
        "set",
        "weight (%)",
        (0.0, 100.0),
        "set %{y}, item %{x}: %{z:.3g} %",
    )


def _checked(values: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    if not values or not values[0] or len({len(line) for line in values}) != 1:
        raise ValueError("a heat map needs lines of equal length")
    return values


def _mean_of_first(panel: HeatPanel) -> float:
    return sum(line[0] for line in panel.values) / len(panel.values)
