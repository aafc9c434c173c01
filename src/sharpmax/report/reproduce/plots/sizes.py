"""Figures of the arms against size: accuracy, and the focus of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sharpmax.report.axes import gain_panel, size_axis
from sharpmax.report.looks import SOFT
from sharpmax.report.plot import Axis, Mark, Panel, Plot, Series
from sharpmax.report.reproduce.facts import change, headline, horizon
from sharpmax.report.reproduce.looks import BOUND, LARGE_N, PUBLISHED, in_order, look
from sharpmax.report.reproduce.plots.axes import arm_series, bound_series, note
from sharpmax.report.reproduce.tables import REFERENCE, over_seeds, part, row
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.words import count, nats, percent, points, share, whole_from_log10

__all__ = ["accuracy", "focus"]


def accuracy(tables: Tables, recipe: str) -> Plot:
    """Accuracy of every arm, and the paper's own numbers."""
    table = part(tables, "accuracy", recipe)
    arms = [arm_series(arm, table[arm], share, "%") for arm in in_order(table)]
    known = sizes(*table.values())
    printed = _printed(tables, known)
    published = [_published(recipe, arm, printed[arm], share, "%") for arm in in_order(set(printed) & set(table))]
    plain, fix = change(table.get("softmax")), headline(tables, recipe)
    title = "Accuracy against the number of items"
    if plain and plain.falls:
        won = f"; {look(fix.arm).subject} wins some of it back" if fix and fix.better and not fix.worse else ""
        title = f"Accuracy falls as sets grow{won}"
    caption = (
        "Accuracy is the share of sets whose best item's class is named correctly; the gain is what an arm adds to it "
        "on the same sets."
    )
    if fix and fix.better:
        largest = f"{points(fix.gains[fix.best])} points at {count(fix.best)} items"
        caption += f" Largest gain of {look(fix.arm).subject}: {largest}."
    if "hard" in table:
        caption += " Hard argmax is what the largest logit alone gives; other arms can pass it slightly."
    if published:
        caption += " Hollow markers: the numbers that the paper publishes" + (
            "." if recipe == REFERENCE else ", which come from the paper's own way of training."
        )
    return Plot(
        title,
        note(tables, recipe, over_seeds(tables, recipe)),
        caption,
        _alt("Accuracy in percent against the number of items, a line for each arm", table, percent),
        [
            Panel(size_axis(known), Axis("accuracy (%)", (0.0, 102.0)), [*arms, *published], title="Accuracy"),
            *_gain_panel(tables, recipe, known),
        ],
    )


def focus(tables: Tables, recipe: str) -> Plot:
    """Weight of the heaviest item and entropy of the row, with the bounds of the theory."""
    weight, entropy, bounds = (part(tables, name, recipe) for name in ("top_weight", "entropy", "bounds"))
    most = max([*bounds["most_entropy"].values(), *(c["mean"] for cells in entropy.values() for c in cells.values())])
    known = sizes(*weight.values(), *entropy.values())
    axis, edge, items = size_axis(known), horizon(bounds), whole_from_log10(horizon(bounds))
    inside = math.log10(axis.limits[0]) <= edge <= math.log10(axis.limits[1])
    marks = [Mark("x", 10.0**edge, f"horizon {items}", SOFT)] if inside else []
    return Plot(
        _focus_title(tables, recipe),
        note(tables, recipe, over_seeds(tables, recipe)),
        "Dashed: what theory allows plain softmax, given the spread of logits that was measured "
        f"({nats(bounds['spread']['mean'])} nats at most): never more weight on one item, never less entropy (lower "
        "line) and never more than ln n (upper line). The horizon is the number of items up to which one "
        f"of them can hold half of the weight: {items}"
        + (". " if inside else ", beyond the sizes drawn. ")
        + ("Dotted: what theory expects of plain softmax as n grows. " if "limit_weight" in bounds else "")
        + "A line that stays level has kept its focus.",
        _alt("Weight of the heaviest item in percent against the number of items", weight, percent)
        + " Beside it the entropy of the attention row in nats.",
        [
            Panel(
                axis,
                Axis("weight (%)", (0.0, 102.0)),
                [
                    *(arm_series(arm, weight[arm], share, "%") for arm in in_order(weight)),
                    bound_series(BOUND, bounds["largest_weight"], "at most, plain softmax", share, "%"),
                    *_limit(bounds, "limit_weight", share, "%"),
                ],
                marks,
                "Weight of the heaviest item",
            ),
            Panel(
                size_axis(known),
                Axis("entropy (nats)", (0.0, most * 1.04)),
                [
                    *(arm_series(arm, entropy[arm], nats, "nats") for arm in in_order(entropy)),
                    bound_series(BOUND, bounds["least_entropy"], "at least, plain softmax", nats, "nats"),
                    bound_series(BOUND, bounds["most_entropy"], "ln n", nats, "nats"),
                    *_limit(bounds, "limit_entropy", nats, "nats"),
                ],
                marks,
                "Entropy of the attention row",
            ),
        ],
    )


def _limit(bounds: Mapping[str, Any], name: str, words: Callable[[float], str], unit: str) -> list[Series]:
    if name not in bounds:
        return []
    return [bound_series(LARGE_N, bounds[name], LARGE_N.label, words, unit, stroke="dot")]


def _gain_panel(tables: Tables, recipe: str, known: list[str]) -> list[Panel]:
    table = part(tables, "comparison", recipe)
    if not table:
        return []
    # Gains depend on the training: the paper's belong beside those of its own recipe alone.
    printed = _printed(tables, known) if recipe == REFERENCE else {}
    series = [_gains(arm, {n: table[arm][n]["gain"] for n in sizes(table[arm])}) for arm in in_order(table)]
    for arm in in_order(set(printed) & set(table)):
        shared = [n for n in sizes(printed[arm]) if n in printed.get("softmax", {})]
        apart = {n: printed[arm][n] - printed["softmax"][n] for n in shared}
        series.append(_published(recipe, arm, apart, points, "points"))
    return [gain_panel(size_axis(known), series, "Gain over plain softmax")]


def _printed(tables: Tables, known: list[str]) -> dict[str, dict[str, float]]:
    """What the paper publishes, at the sizes of this run."""
    published = tables.get("published", {})
    return {arm: {n: cells[n] for n in known if n in cells} for arm, cells in published.items()}


def _gains(arm: str, gains: Mapping[str, float]) -> Series:
    style = look(arm)
    words = [f"{style.label}: {points(gain)} points" for gain in gains.values()]
    return Series(style.label, style, [int(n) for n in gains], list(gains.values()), words, arm=arm)


def _published(recipe: str, arm: str, cells: Mapping[str, float], words: Callable[[float], str], unit: str) -> Series:
    known, style = sizes(cells), look(arm)
    return Series(
        PUBLISHED.label if recipe == REFERENCE else f"{PUBLISHED.label} (its own training)",
        style,
        [int(n) for n in known],
        [cells[n] for n in known],
        [f"{style.label}, published: {words(cells[n])} {unit}" for n in known],
        stroke=None,
        marker="hollow",
        arm=arm,
        in_legend=PUBLISHED,
    )


def _focus_title(tables: Tables, recipe: str) -> str:
    plain = change(row(tables, "top_weight", recipe, "softmax"))
    held = change(row(tables, "top_weight", recipe, "entropy-target"))
    if not plain or not plain.falls:
        return "Weight of the heaviest item and entropy against the number of items"
    title = "Plain softmax spreads its weight as sets grow"
    return title + ("; the entropy target keeps it together" if held and held.last > 0.8 * held.first else "")


def _alt(start: str, table: Mapping[str, Any], words: Callable[[float], str]) -> str:
    ends = [
        f"{look(arm).label} from {words(found.first)} to {words(found.last)}"
        for arm in in_order(table)
        if (found := change(table[arm]))
    ]
    return start + (": " + ", ".join(ends) if ends else "") + "."
