"""The page of `sharpmax reproduce`: max retrieval with one attention head, as in the paper."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import Figure, Metric, Part, Report, Table, Tables, accuracy_table, sizes
from sharpmax.report.words import Pairs, capital, count, origin_of_run, percent, plural, points, probability

_STYLES = {
    "softmax": ("softmax", charts.Style(charts.BLACK, "circle")),
    "paper": ("paper's polynomial", charts.Style(charts.VERMILLION, "square")),
    "refit": ("refitted polynomial", charts.Style(charts.PURPLE, "triangle-down")),
    "log-length": ("log-length", charts.Style(charts.BLUE, "triangle-up")),
    "entropy-target": ("entropy target", charts.Style(charts.GREEN, "diamond")),
    "hard": ("argmax", charts.Style(charts.ORANGE, "cross")),
}
_SIGNALS = {"confidence": "classifier's confidence", "entropy": "attention entropy"}

_PLAIN = {"softmax": "The trained model, β = 1.", "hard": "All weight on the largest logit, the limit β → ∞."}
"""Variants that are not policies."""

REFERENCE = "paper"
"""The recipe whose tables have names without a suffix."""

LEVEL = 0.05
"""A difference is significant when its p value is below this."""


def report(tables: Tables) -> Report:
    """The page's contents."""
    setting = tables["setting"]
    found = [recipe or REFERENCE for name, _, recipe in (x.partition("/") for x in tables) if name == "comparison"]
    recipes = {recipe: recipe_name(recipe) for recipe in sorted(found, key=REFERENCE.__ne__)}
    parts = [
        Part(
            f"recipe-{recipe}", capital(name), list(_metrics(tables, recipe)), _figures(tables, recipe),
            [_accuracy_table(tables, recipe)],
        )
        for recipe, name in recipes.items()
    ]  # fmt: skip
    notes = [
        f"Left out of {recipe_name(recipe)}: {what}, because {why}."
        for recipe, known in setting["left_out"].items()
        for what, why in known.items()
    ]
    origins = []
    for recipe, one in tables["weights"].items():
        trained = one.get("trained") or {}
        seconds = {} if trained.get("seconds") is None else {"training": trained["seconds"]}
        origin = origin_of_run(trained.get("command", ""), trained, {"setting": {"seconds": seconds}})
        known = [("Training steps", count(one["steps"])), ("Seeds", ", ".join(map(str, one["seeds"])))]
        origins.append((f"Models of {recipe_name(recipe)}", [*known, *origin]))
    variants = []
    for name in part(tables, "accuracy", next(iter(recipes))):
        rules = [f"{capital(recipe_name(x))}: {rule[name]}." for x, rule in setting["policies"].items() if name in rule]
        variants.append((label(name), " ".join(rules) or _PLAIN[name]))
    trainings: Pairs = []
    for recipe, about in setting["recipes"].items():
        training = f"{plural(about['steps'], 'step')}, {plural(len(about['seeds']), 'seed')}"
        trainings.append((capital(recipe_name(recipe)), f"{str(about['describe']).rstrip('. ')}; {training}"))
    definitions = [("Variants", variants), ("Recipes", trainings)]
    return Report("reproduce", parts, notes, definitions, origins)


def part(tables: Tables, name: str, recipe: str) -> Any:
    """A recipe's table, or None if the run does not hold it."""
    return tables.get(file_name(name, recipe, "/"))


def file_name(name: str, recipe: str, between: str = "-") -> str:
    """The name of a recipe's file.

    >>> file_name("accuracy", "paper"), file_name("accuracy", "sharp")
    ('accuracy', 'accuracy-sharp')
    """
    return name if recipe == REFERENCE else f"{name}{between}{recipe}"


def recipe_name(recipe: str) -> str:
    """The name of a recipe in a sentence."""
    return "the paper's recipe" if recipe == REFERENCE else f"the {recipe} recipe"


def label(variant: str) -> str:
    """The name of a variant or signal on the page."""
    return _STYLES[variant][0] if variant in _STYLES else _SIGNALS.get(variant, variant)


def _metrics(tables: Tables, recipe: str) -> Iterator[Metric]:
    """Accuracy of softmax by size, the largest gain over it, its top weight and failure detection."""
    row, top = (part(tables, name, recipe)["softmax"] for name in ("accuracy", "top_weight"))
    ends = list(dict.fromkeys((sizes(row)[0], sizes(row)[-1])))
    where = " → ".join(map(count, ends))
    of = "softmax" if recipe == REFERENCE else f"softmax ({recipe_name(recipe)})"
    values = " → ".join(percent(row[n]["mean"]) for n in ends)
    yield Metric(values, f"accuracy of {of} at {where} items", "mean over seeds")
    gains = [
        (one["gain"], name, n, one["p"])
        for name, cells in part(tables, "comparison", recipe).items() if name != "hard" for n, one in cells.items()
    ]  # fmt: skip
    gain, name, n, p = max(gains, key=lambda one: float(one[0]))
    test = "no test" if p is None else probability(p) + ("" if p < LEVEL else ", not significant")
    yield Metric(f"{points(gain)} points ({test})", f"{label(name)} at {count(n)} items", "largest gain over softmax")
    yield Metric(" → ".join(percent(top[n]["mean"]) for n in ends), "top weight of softmax", f"{where} items")
    pooled = {label(name): cells["pooled"] for name, cells in part(tables, "detection", recipe).items()}
    if known := [(one["auroc"], name, one) for name, one in pooled.items() if one["auroc"] is not None]:
        auroc, name, one = max(known)
        between = f"{name}; {one['low']:.2f} to {one['high']:.2f} (95%)"
        yield Metric(f"AUROC {auroc:.2f}", "detecting wrong answers", between)


def _accuracy_table(tables: Tables, recipe: str) -> Table:
    """One row per variant, followed by the published numbers if the recipe is the paper's."""
    rows: dict[str, Any] = {}
    for name, row in part(tables, "accuracy", recipe).items():
        rows[label(name)] = row
        if recipe == REFERENCE and name in tables["published"]:
            known = {n: {"mean": mean} for n, mean in tables["published"][name].items() if n in row}
            rows[f"{label(name)}, published"] = known
    note = f"Paired t-test over seeds. Small: {_uncertainty(tables, recipe)}"
    tests = {label(name): row for name, row in part(tables, "comparison", recipe).items()}
    return accuracy_table("Accuracy (%)", note, rows, tests, LEVEL)


def _uncertainty(tables: Tables, recipe: str) -> str:
    """What bars and small print are: older results have no intervals."""
    cells = [cell for row in part(tables, "accuracy", recipe).values() for cell in row.values()]
    return "95% interval" if any(cell.get("low") is not None for cell in cells) else "standard error over seeds"


def _figures(tables: Tables, recipe: str) -> list[Figure]:
    name = capital(recipe_name(recipe))
    accuracy = (
        f"{name}. Bars: {_uncertainty(tables, recipe)}. Hollow: published numbers, from the paper's own training."
    )
    heat = f"{name}. First seed. Rows: sets; columns: the items with the highest priority, the correct one first."
    fit = (
        f"{name}. Each point: the β that gives the correct item the most weight. Lines: the polynomials of entropy; "
        "dotted: β = 1 and the end of the paper's."
    )
    made = [
        ("accuracy", "Accuracy by number of items", accuracy, _accuracy_chart),
        ("heat", "Attention weights of the best items", heat, _heat_chart),
    ]
    made += [("fit", "Best β of wrongly ranked inputs", fit, _fit_chart)] if part(tables, "fit", recipe) else []
    found = []
    for file, title, caption, chart in made:
        found.append(Figure(file_name(file, recipe), title, caption, partial(chart, tables, recipe)))
    return found


def _accuracy_chart(tables: Tables, recipe: str) -> Any:
    table, compared = part(tables, "accuracy", recipe), part(tables, "comparison", recipe)
    styles, known, items = dict(_STYLES[name] for name in table), sizes(*table.values()), "number of items n"
    hollow = [
        {"variant": label(name), "x": int(n), "y": row[n]}
        for name, row in tables["published"].items() if recipe == REFERENCE and name in table for n in known if n in row
    ]  # fmt: skip
    below = {label(name): table[name] for name in sorted(table, key="hard".__ne__)}
    gains = [
        {"variant": label(name), "x": int(n), "y": cell["gain"]}
        for name in sorted(compared, key="hard".__ne__) for n, cell in compared[name].items()
    ]  # fmt: skip
    x, y = charts.size_axis([int(n) for n in known], items), charts.axis("y", "percentage points")
    accuracy = charts.percent_axis("accuracy (%)")
    panels = [
        charts.by_size("Accuracy", below, items, accuracy, styles, hollow=hollow),
        charts.lines_panel("Gain over softmax", gains, x, y, styles, under=[charts.rule("y", 0.0)]),
    ]
    return charts.figure(*panels, names=list(styles))


def _heat_chart(tables: Tables, recipe: str) -> Any:
    table = part(tables, "heat", recipe)
    tips = charts.tooltip(y="set", x="item by priority", value="weight (%)|.3g")
    look: dict[str, Any] = {"domain": (0, 100), "tips": tips, "height": 130, "ticks": [1]}
    panels = []
    for variant, by_size in table["variants"].items():
        for n, lines in by_size.items():
            rows = [
                {"x": x, "y": y, "value": value}
                for y, line in enumerate(lines, start=1)
                for x, value in enumerate(line, start=1)
            ]
            title = [label(variant), f"n = {count(n)}"]
            panels.append(charts.heat_panel(title, rows, "", "", "weight (%)", **look))
    return charts.figure(*panels, columns=len(table["sizes"]), minimum=150, around=26)


_SHOWN = 0.98
"""Share of the points within the axis: a few β are enormous."""


def _fit_chart(tables: Tables, recipe: str) -> Any:
    table = part(tables, "fit", recipe)
    curve, ordered = table["curve"], sorted(table["points"]["beta"])
    top = 1.1 * float(max(*curve["refit"], *curve["paper"], *ordered[: round(_SHOWN * len(ordered))][-1:]))
    lines = [
        {"variant": label(name), "x": x, "y": y}
        for name in ("refit", "paper") for x, y in zip(curve["entropy"], curve[name], strict=True) if y <= top
    ]  # fmt: skip
    points = zip(table["points"]["entropy"], table["points"]["beta"], strict=True)
    dots = charts.dots([{"x": x, "y": y} for x, y in points if y <= top])
    under = [dots, charts.rule("y", 1.0)]
    if (end := table["paper_acts_on"][1]) is not None:
        under.append(charts.rule("x", end, charts.VERMILLION))
    x = charts.axis("x", "entropy H of the attention row (nats)", grid=False)
    y = charts.axis("y", "inverse temperature β", (0.0, top))
    styles = {label(name): charts.Style(_STYLES[name][1].colour, charts.LINE) for name in ("refit", "paper")}
    plot = charts.lines_panel("", lines, x, y, styles, under=under, height=320)
    return charts.figure(plot, columns=1, names=list(styles))
