"""The figures of `sharpmax reproduce`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharpmax.report.plot import Axis, Heat, HeatPanel, Mark, Panel, Plot, Series, gain_panel, size_axis
from sharpmax.report.sections.reproduce_tables import (
    BEST,
    BOUND,
    LARGE_N,
    PUBLISHED,
    REFERENCE,
    change,
    describe,
    headline,
    horizon,
    in_order,
    key,
    look,
    over_seeds,
    part,
    recipe_name,
    recipes,
    row,
    signal,
    trust,
)
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.theme import SOFT, Look, Stroke
from sharpmax.report.words import (
    capital,
    count,
    estimate,
    joined,
    nats,
    percent,
    plural,
    points,
    share,
    whole_from_log10,
)


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


_LOWEST = 0.45
_HARDLY = 0.6


def detection(tables: Tables, recipe: str) -> Plot:
    """AUROC of each signal with its interval, chance, and the value over all sizes at the right."""
    table = part(tables, "detection", recipe)
    names = in_order(table)
    known = sizes(*table.values())
    pooled_at = 4.0 * int(known[-1])
    series = []
    for place, name in enumerate(names):
        # Neighbouring intervals would lie on top of one another.
        aside = 2.0 ** (0.14 * (place - (len(names) - 1) / 2))
        found = [n for n in sizes(table[name]) if table[name][n]["auroc"] is not None]
        series.append(_series(name, table[name], found, [int(n) * aside for n in found], "solid"))
        if "pooled" in table[name] and table[name]["pooled"]["auroc"] is not None:
            series.append(_series(name, table[name], ["pooled"], [pooled_at * aside], None))
    lows = [value for item in series for value in item.low or () if value is not None]
    floor = min([_LOWEST, *(low - 0.05 for low in lows)])
    told = {
        name: table[name]["pooled"]
        for name in names
        if "pooled" in table[name] and table[name]["pooled"]["auroc"] is not None
    }
    values = ", ".join(f"{signal(name).label} {cell['auroc']:.2f}" for name, cell in told.items())
    missing = [n for n in known if all(cells.get(n, {}).get("auroc") is None for cells in table.values())]
    return Plot(
        _title(table, told),
        note(tables, recipe, "answers of plain softmax", "bars: 95% bootstrap intervals"),
        "AUROC: how often a wrong answer looks more doubtful than a right one; 0.5 is chance, 1 is certainty. "
        + (f"At the right, over all sizes: {values}." if values else "")
        + (f" No value at {', '.join(map(count, missing))} items: no wrong answers to find." if missing else ""),
        f"AUROC against the number of items for {len(names)} signals. Over all sizes: {values or 'no value'}.",
        [
            Panel(
                size_axis(known, (pooled_at, "all sizes")),
                Axis("AUROC (0.5 = chance)", (max(0.0, floor), 1.01)),
                series,
                [Mark("y", 0.5, "chance", SOFT)],
                together=False,
            )
        ],
    )


def _title(table: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    found = trust(table.get("confidence", {}))
    if found and found.falls:
        small, large = count(found.small), count(found.large)
        how = "hardly" if found.last < _HARDLY else "less well"
        return f"Confidence tells wrong answers from right ones among {small} items, {how} among {large}"
    if told and all(cell["low"] > 0.5 for cell in told.values()):
        return "Wrong answers can be told from right ones"
    return "How well wrong answers are told from right ones"


def _series(name: str, cells: Mapping[str, Any], found: Sequence[str], x: Sequence[float], stroke: Any) -> Series:
    style = signal(name)
    return Series(
        style.label,
        style,
        x,
        [cells[n]["auroc"] for n in found],
        [_words(style.label, n, cells[n]) for n in found],
        [cells[n]["low"] for n in found],
        [cells[n]["high"] for n in found],
        stroke=stroke,
    )


def _words(label: str, n: str, cell: Mapping[str, Any]) -> str:
    where = "all sizes" if n == "pooled" else f"{count(n)} items"
    interval = f"{cell['low']:.3f} to {cell['high']:.3f}"
    answers = f"{count(cell['wrong'])} wrong, {count(cell['right'])} right"
    return f"{label}, {where}: {cell['auroc']:.3f} ({interval}; {answers})"


_SHOWN = 0.98
"""Share of the points that the axis makes room for: a few best temperatures are enormous."""


def fit(tables: Tables, recipe: str) -> Plot:
    """Scatter of (entropy, best β), the refitted curve, the paper's polynomial and its end."""
    table = part(tables, "fit", recipe)
    entropy, beta = table["points"]["entropy"], table["points"]["beta"]
    curve, end = table["curve"], table["paper_acts_on"][1]
    ordered = sorted(beta)
    top = 1.1 * max(*curve["refit"], *curve["paper"], *ordered[: round(_SHOWN * len(ordered))][-1:])
    right = max([*entropy, *curve["entropy"], end or 0.0])
    best = Series(
        BEST.label,
        BEST,
        entropy,
        beta,
        [f"H = {nats(h)} nats, best β = {b:.2f}" for h, b in zip(entropy, beta, strict=True)],
        stroke=None,
    )
    marks = [Mark("y", 1.0, "", SOFT)]
    if end is not None:
        marks.append(Mark("x", end, f"the paper's ends: {nats(end)}", look("paper").colour))
    found = f"{count(table['wrong'])} wrongly ranked inputs of {count(table['inputs'])}"
    return Plot(
        "Best β of wrongly ranked inputs"
        + (f": the paper's polynomial stops acting at {nats(end)} nats" if end is not None else ", and polynomials"),
        note(tables, recipe, found, f"R² of the refit {table['r2']:.2f}"),
        _caption(table, sum(value > top for value in beta)),
        "Scatter of the best β of wrongly ranked inputs against the entropy of their attention rows, with two curves "
        "through it: the refitted polynomial and the paper's.",
        [
            Panel(
                Axis("entropy of the attention row H (nats)", (0.0, right * 1.02)),
                Axis("inverse temperature β", (0.0, top)),
                [best, *(_curve(arm, curve["entropy"], curve[arm]) for arm in ("refit", "paper"))],
                marks,
                together=False,
            )
        ],
    )


def _curve(arm: str, entropy: Sequence[float], beta: Sequence[float]) -> Series:
    label = look(arm).label
    words = [f"{label} at {nats(h)} nats: β = {b:.2f}" for h, b in zip(entropy, beta, strict=True)]
    return Series(label, look(arm), entropy, beta, words, marker=None, arm=arm)


def _caption(table: Mapping[str, Any], above: int) -> str:
    low, high = table["fitted_on"]
    hidden = f" Above the frame: {plural(above, 'dot')} of {count(len(table['points']['beta']))}." if above else ""
    return (
        "Each dot is an input whose right item did not get the largest weight; its β is the one that gives that item "
        f"the most. The refitted polynomial follows them from {nats(low)} to {nats(high)} nats; it "
        f"{_acts(table['acts_on'])}. The paper's polynomial {_acts(table['paper_acts_on'])} and leaves all other rows "
        f"as they are (β = 1, dotted).{hidden}"
    )


def _acts(span: list[float | None] | None) -> str:
    if not span or span[0] is None:
        return "never exceeds β = 1"
    return f"acts from {nats(span[0])} nats " + ("on, without end" if span[1] is None else f"to {nats(span[1])} nats")


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
