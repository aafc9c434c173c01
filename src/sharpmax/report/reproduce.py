"""The page of `sharpmax reproduce`: max retrieval with one attention head, as in the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from sharpmax.policies.polynomial import PAPER
from sharpmax.report import charts
from sharpmax.report.tables import (
    EMPTY,
    Cell,
    Figure,
    Metric,
    Part,
    Report,
    Table,
    Tables,
    cell_of,
    cells,
    check_name,
    present,
    size_table,
    sizes,
)
from sharpmax.report.words import (
    SUPERSCRIPTS,
    Pairs,
    capital,
    count,
    estimate,
    nats,
    origin_of_weights,
    percent,
    plural,
    points,
    probability,
    share,
    whole_from_log10,
)

_STYLES = {
    "softmax": ("softmax", charts.Style(charts.BLACK, "circle")),
    "paper": ("paper's polynomial", charts.Style(charts.VERMILLION, "square")),
    "refit": ("refitted polynomial", charts.Style(charts.PURPLE, "triangle-down")),
    "log-length": ("log-length", charts.Style(charts.BLUE, "triangle-up")),
    "entropy-target": ("entropy target", charts.Style(charts.GREEN, "diamond")),
    "hard": ("argmax", charts.Style(charts.ORANGE, "cross")),
    "confidence": ("classifier's confidence", charts.Style(charts.BLUE, "circle")),
    "entropy": ("attention entropy", charts.Style(charts.VERMILLION, "square")),
    "both": ("both", charts.Style(charts.GREEN, "diamond")),
}
"""Variants, then signals of failure detection, in the order in which they are shown."""

_RULES = {
    "softmax": "The trained model, β = 1.",
    "paper": "β is a polynomial of the row's entropy, with the coefficients printed in the paper.",
    "refit": "A polynomial fitted to inputs that these models rank wrongly.",
    "log-length": "β grows with ln n, the logarithm of the number of items.",
    "entropy-target": "β is solved per row so that its entropy stays where it was in training.",
    "hard": "All weight on the largest logit, the limit β → ∞.",
}

REFERENCE = "paper"
"""The recipe whose tables have plain names."""

LEVEL = 0.05
"""A difference is significant when its p value is below this."""

_NEEDS = {
    "accuracy": ("accuracy", "comparison"),
    "heat": ("heat",),
    "focus": ("entropy", "top_weight", "bounds"),
    "fit": ("fit",),
    "detection": ("detection",),
}
"""The tables that each figure is made from."""


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax reproduce`."""
    return any(_drawable(tables, recipe) for recipe in _recipes(tables))


def _recipes(tables: Tables) -> list[str]:
    """The recipes these tables hold something of, the reference first."""
    kinds = {need for needs in _NEEDS.values() for need in needs}
    named = (table.partition("/") for table in tables)
    found = dict.fromkeys(recipe or REFERENCE for name, _, recipe in named if name in kinds)
    return sorted(found, key=lambda recipe: recipe != REFERENCE)


def _drawable(tables: Tables, recipe: str) -> list[str]:
    return [name for name, needs in _NEEDS.items() if all(part(tables, need, recipe) is not None for need in needs)]


def report(tables: Tables) -> Report:
    """The page's contents."""
    setting, parts = tables.get("setting") or {}, []
    for recipe in _recipes(tables):
        name = f"recipe-{check_name(recipe, 'recipe')}"
        shown, details = present(accuracy_table(tables, recipe)), list(_details(tables, recipe))
        figures = [_figure(tables, recipe, figure) for figure in _drawable(tables, recipe)]
        parts.append(Part(name, capital(recipe_name(recipe)), _metrics(tables, recipe), figures, shown, details))
    trained = tables.get("weights") or {}
    origins = [(f"Models of {recipe_name(name)}", origin_of_weights(about)) for name, about in trained.items()]
    about = {"setting": {"classes": None, "train_sizes": None, "samples": None} | setting}
    groups = [(title, rows) for title, rows in _definitions(tables).items() if rows]
    lines = headline(tables)
    return Report("reproduce", lines, parts, list(_notes(tables)), (), groups, origins, about, citation=True)


def key(name: str, recipe: str) -> str:
    """The name of a recipe's table.

    >>> key("accuracy", "paper"), key("accuracy", "sharp")
    ('accuracy', 'accuracy/sharp')
    """
    return name if recipe == REFERENCE else f"{name}/{recipe}"


def part(tables: Tables, name: str, recipe: str) -> Any:
    """A recipe's table, or None if the run does not hold it."""
    return tables.get(key(name, recipe))


def file_name(name: str, recipe: str) -> str:
    """The name of a recipe's file."""
    return key(name, recipe).replace("/", "-")


def recipe_name(recipe: str) -> str:
    """A recipe in a sentence."""
    return "the paper's recipe" if recipe == REFERENCE else f"the {recipe} recipe"


def in_order(names: Iterable[str]) -> list[str]:
    """Variants or signals in the order in which they are shown; unknown ones last, by name.

    >>> in_order(["mine", "hard", "softmax"])
    ['softmax', 'hard', 'mine']
    """
    known = list(_STYLES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def label(variant: str) -> str:
    """The name of a variant or signal on the page."""
    return _STYLES[variant][0] if variant in _STYLES else variant


def _styles(names: Iterable[str]) -> dict[str, charts.Style]:
    return {label(name): _STYLES[name][1] if name in _STYLES else charts.Style(charts.SOFT) for name in in_order(names)}


def _labelled(table: Mapping[str, Any]) -> dict[str, Any]:
    return {label(name): table[name] for name in in_order(table)}


def _softmax(tables: Tables, name: str, recipe: str) -> Mapping[str, Any]:
    return (part(tables, name, recipe) or {}).get("softmax") or {}


class Gain(NamedTuple):
    """The gain of a variant over softmax at a size, in points, with its p value."""

    points: float
    variant: str
    size: str
    p: float | None

    @property
    def sure(self) -> str:
        """The test in words."""
        return "no test" if self.p is None else probability(self.p) + ("" if self.p < LEVEL else ", not significant")


def best(tables: Tables, recipe: str) -> Gain | None:
    """The largest gain over softmax of any variant but argmax."""
    table = part(tables, "comparison", recipe) or {}
    gains = [
        Gain(row[n]["gain"], name, n, row[n]["p"]) for name, row in table.items() if name != "hard" for n in sizes(row)
    ]
    return max(gains, default=None, key=lambda gain: gain.points)


def headline(tables: Tables) -> list[str]:
    """The answer in numbers, a sentence for each recipe."""
    found: list[str] = []
    for recipe in _recipes(tables):
        row, gain, parts = _softmax(tables, "accuracy", recipe), best(tables, recipe), []
        if known := sizes(row):
            ends = [f"{percent(row[n]['mean'])} at {count(n)}" for n in dict.fromkeys((known[0], known[-1]))]
            parts.append(f"Accuracy of softmax: {' items, '.join(ends)}{' items' if len(ends) == 1 else ''}.")
        if gain:
            who = capital(label(gain.variant))
            parts.append(f"{who}: {points(gain.points)} points at {count(gain.size)} ({gain.sure}).")
        if parts:
            found.append(" ".join([*([f"{capital(recipe_name(recipe))}."] if found else []), *parts]))
    return found or [f"{capital(recipe_name(one))}: {', '.join(_drawable(tables, one))}." for one in _recipes(tables)]


def _notes(tables: Tables) -> Iterator[str]:
    """How far the accuracy of softmax is from the published one, and what was left out."""
    ours, theirs = _softmax(tables, "accuracy", REFERENCE), (tables.get("published") or {}).get("softmax") or {}
    apart = {n: abs(ours[n]["mean"] - theirs[n]) for n in sizes(ours) if n in theirs}
    if apart:
        worst = max(apart, key=apart.__getitem__)
        yield (
            f"Accuracy of softmax is within {apart[worst]:.1f} points of the published one at every size (furthest at "
            f"{count(worst)} items: {percent(theirs[worst])} published, {percent(ours[worst]['mean'])} here)."
        )
    for recipe, known in ((tables.get("setting") or {}).get("left_out") or {}).items():
        for what, why in known.items():
            yield f"Left out of {recipe_name(recipe)}: {what}, because {why}."


def _metrics(tables: Tables, recipe: str) -> list[Metric]:
    found = []
    for name, what in (("accuracy", "accuracy of softmax"), ("top_weight", "top weight of softmax")):
        row = _softmax(tables, name, recipe)
        if len(known := sizes(row)) > 1:
            values = " → ".join(percent(row[n]["mean"]) for n in (known[0], known[-1]))
            found.append(Metric(values, what, f"{count(known[0])} → {count(known[-1])} items"))
    if gain := best(tables, recipe):
        detail = f"at {count(gain.size)} items, {gain.sure}"
        found.insert(1, Metric(f"{points(gain.points)} points", label(gain.variant), detail))
    if bounds := part(tables, "bounds", recipe):
        detail = f"logits within {nats(bounds['spread']['mean'])} nats"
        found.append(Metric(f"{whole_from_log10(bounds['horizon_log10']['mean'])} items", "sharpness horizon", detail))
    table = part(tables, "detection", recipe) or {}
    pooled = {name: row["pooled"] for name, row in table.items() if (row.get("pooled") or {}).get("auroc") is not None}
    if pooled:
        name, cell = max(pooled.items(), key=lambda one: float(one[1]["auroc"]))
        detail = f"{label(name)}; {cell['low']:.2f} to {cell['high']:.2f} (95%)"
        found.append(Metric(f"AUROC {cell['auroc']:.2f}", "detecting wrong answers", detail))
    return found


def accuracy_table(tables: Tables, recipe: str) -> Table | None:
    """One row per variant: accuracy with its gain over softmax by size, and the paper's own numbers below."""
    table, gains = part(tables, "accuracy", recipe), part(tables, "comparison", recipe) or {}
    if not table:
        return None
    # The paper's numbers stand beside ours where both come from the same training.
    published = (tables.get("published") or {}) if recipe == REFERENCE else {}
    rows: dict[str, Any] = {}
    for name in in_order(table):
        rows[label(name)] = {n: (table[name][n], (gains.get(name) or {}).get(n)) for n in sizes(table[name])}
        if name in published:
            known = {n: published[name][n] for n in sizes(table[name]) if n in published[name]}
            rows[f"{label(name)}, published"] = known

    def cell(value: Any) -> Cell:
        if isinstance(value, float):
            return Cell(share(value), faint=True)
        mean, gain = value
        text, _, error = estimate(share(mean["mean"]), mean["sem"]).partition(" ± ")
        small = [f"± {error}"] if error else []
        small += [] if gain is None else [points(gain["gain"])]
        sure = gain is not None and gain["p"] is not None and gain["p"] < LEVEL
        return Cell(text, ", ".join(small), strong=sure)

    note = (
        "Small: standard error over seeds, then the gain over softmax in points. Bold: p < "
        f"{LEVEL} in a paired t-test over seeds, not corrected for multiple comparisons."
    )
    return size_table("Accuracy (%)", note, rows, cell)


def _details(tables: Tables, recipe: str) -> Iterator[Table]:
    theory = part(tables, "bounds", recipe) or {}
    for name, title, words, bounds in (
        ("top_weight", "Top weight (%)", share, {"theory: at most": "largest_weight"}),
        ("entropy", "Entropy of the attention row (nats)", nats,
         {"theory: at least": "least_entropy", "ln n": "most_entropy"}),
    ):  # fmt: skip
        if table := part(tables, name, recipe):
            rows = _labelled(table) | {line: theory[bound] for line, bound in bounds.items() if theory.get(bound)}
            note = "Small: standard error over seeds. Bounds hold for softmax."
            yield size_table(title, note, rows, partial(_measured, words))
    if table := part(tables, "detection", recipe):
        counts = {
            f"{word} answers": {n: cell[key] for n, cell in next(iter(table.values())).items()}
            for word, key in (("wrong", "wrong"), ("correct", "right"))
        }
        note = "Answers of softmax; 95% bootstrap intervals. 0.5 is chance."
        yield size_table("Detecting wrong answers (AUROC)", note, _labelled(table) | counts, _auroc, "signal")
    if fit := part(tables, "fit", recipe):
        yield _coefficients_table(fit)


def _measured(words: Callable[[float], str], value: Any) -> Cell:
    if isinstance(value, Mapping):
        text, _, error = estimate(words(value["mean"]), value["sem"]).partition(" ± ")
        return Cell(text, error and f"± {error}")
    return Cell(words(value), faint=True)


def _auroc(cell: Any) -> Cell:
    if not isinstance(cell, Mapping):
        return Cell(count(cell), faint=True)
    if cell["auroc"] is None:
        return EMPTY
    return Cell(f"{cell['auroc']:.3f}", f"{cell['low']:.2f}–{cell['high']:.2f}")


def _coefficients_table(table: Mapping[str, Any]) -> Table:
    degree = max(len(table["coefficients"]), len(PAPER.coefficients)) - 1
    powers = [f"H{SUPERSCRIPTS[power]}" if power > 1 else "H" if power else "1" for power in range(degree, -1, -1)]
    rows = []
    for name, coefficients, span, r2 in (
        ("refit", table["coefficients"], table["acts_on"], table["r2"]),
        ("paper", PAPER.coefficients, table["paper_acts_on"], None),
    ):
        padded = [0.0] * (degree + 1 - len(coefficients)) + list(coefficients)
        acts = "never"
        if span and span[0] is not None:
            acts = f"{nats(span[0])} to {'∞' if span[1] is None else nats(span[1])}"
        fitted = cell_of(r2, lambda value: f"{value:.2f}")
        rows.append([*cells(label(name), *(f"{c:.4g}".replace("-", "−") for c in padded), acts), fitted])
    return Table(
        "Coefficients of the polynomials",
        f"β = max(1, polynomial of H) where the entropy H exceeds a threshold ({table['threshold']:g} nats for the "
        f"refit), else 1. Fitted to {count(table['wrong'])} wrongly ranked inputs of {count(table['inputs'])}, with "
        f"entropies of {nats(table['fitted_on'][0])} to {nats(table['fitted_on'][1])} nats; "
        f"{count(table['dropped'])} more have no usable best β.",
        cells("polynomial", *powers, "acts on (nats)", "R²"),
        rows,
    )


def _figure(tables: Tables, recipe: str, name: str) -> Figure:
    title, caption, chart = {
        "accuracy": (
            "Accuracy by number of items",
            "Bars: standard error over seeds. Hollow: published in the paper, with its own training.",
            _accuracy_chart,
        ),
        "heat": (
            "Attention weights of the best items",
            "First seed. Rows: sets; columns: the items with the highest priority, the correct one first.",
            _heat_chart,
        ),
        "focus": (
            "Top weight and entropy by number of items",
            "Dashed: bounds for softmax from the measured spread of logits. Horizon: beyond it no item can hold half "
            "of the weight.",
            _focus_chart,
        ),
        "fit": (
            "Best β of wrongly ranked inputs",
            "Each point: the β that gives the correct item the most weight. Lines: the polynomials of entropy.",
            _fit_chart,
        ),
        "detection": (
            "Detecting wrong answers (AUROC)",
            "Answers of softmax; 95% bootstrap intervals. 0.5 is chance, 1 is perfect.",
            _detection_chart,
        ),
    }[name]
    about = f"{capital(recipe_name(recipe))}. {caption}"
    return Figure(file_name(name, recipe), title, about, f"{title}.", partial(chart, tables, recipe))


def _x(table: Mapping[str, Any]) -> Any:
    return charts.size_axis([int(n) for n in sizes(*table.values())], "number of items n")


def _accuracy_chart(tables: Tables, recipe: str) -> Any:
    table, gains = part(tables, "accuracy", recipe), part(tables, "comparison", recipe)
    known, styles, x = sizes(*table.values()), _styles(table), _x(table)
    theirs = {name: row for name, row in (tables.get("published") or {}).items() if name in table}
    hollow = [
        {"variant": label(name), "x": int(n), "y": row[n]} for name, row in theirs.items() for n in known if n in row
    ]
    # Argmax lies underneath what comes close to it.
    rows = sorted(charts.size_rows(_labelled(table)), key=lambda row: row["variant"] != label("hard"))
    apart = [
        {"variant": label(name), "x": int(n), "y": cell["gain"],
         "test": "no test" if cell["p"] is None else probability(cell["p"])}
        for name in sorted(in_order(gains), key=lambda name: name != "hard") if name in table
        for n, cell in gains[name].items()
    ]  # fmt: skip
    y = charts.axis("y", "percentage points")
    panels = [
        charts.lines_panel("Accuracy", rows, x, charts.percent_axis("accuracy (%)"), styles, hollow=hollow),
        charts.lines_panel("Gain over softmax", apart, x, y, styles, under=charts.rule("y", 0.0)),
    ]
    return charts.figure(*panels, names=list(styles))


def _heat_chart(tables: Tables, recipe: str) -> Any:
    table = part(tables, "heat", recipe)
    tips = charts.tooltip(y="set", x="item by priority", value="weight (%)|.3g")
    panels = []
    for variant in in_order(table["arms"]):
        for n in map(str, table["sizes"]):
            rows = [
                {"x": x, "y": y, "value": float(f"{value:.3g}")}
                for y, line in enumerate(table["arms"][variant][n], start=1)
                for x, value in enumerate(line, start=1)
            ]
            title = [label(variant), f"n = {count(n)}"]
            look: dict[str, Any] = {"domain": (0, 100), "tips": tips, "height": 130, "ticks": [1]}
            panels.append(charts.heat_panel(title, rows, "", "", "weight (%)", **look))
    return charts.figure(*panels, columns=len(table["sizes"]), minimum=150, around=26)


_BOUND, _LIMIT = "theory's bound for softmax", "theory's limit for large n"


def _focus_chart(tables: Tables, recipe: str) -> Any:
    weight, entropy, bounds = (part(tables, name, recipe) for name in ("top_weight", "entropy", "bounds"))
    known, x = [int(n) for n in sizes(*weight.values())], _x(weight)
    styles = _styles({*weight, *entropy}) | {_BOUND: charts.Style(charts.SOFT, charts.LINE, (5, 3))}
    if "limit_weight" in bounds:
        styles[_LIMIT] = charts.Style(charts.SOFT, charts.LINE, (2, 2))
    horizon = bounds["horizon_log10"]["mean"]
    inside = math.log10(known[0]) <= horizon <= math.log10(known[-1])
    panels = []
    for title, y, table, lines in (
        ("Top weight", charts.percent_axis("top weight (%)"), weight,
         {"largest_weight": _BOUND, "limit_weight": _LIMIT}),
        ("Entropy", charts.axis("y", "entropy (nats)"), entropy,
         {"least_entropy": _BOUND, "most_entropy": _BOUND, "limit_entropy": _LIMIT}),
    ):  # fmt: skip
        under = charts.rule("x", 10.0**horizon, f"horizon {whole_from_log10(horizon)}") if inside else []
        for name, variant in lines.items():
            line = (bounds.get(name) or {}).items()
            rows = [{"variant": variant, "x": int(n), "y": value} for n, value in line if value is not None]
            under += charts.Plot(x, y, styles).lines(rows, width=1.3)
        panels.append(charts.lines_panel(title, charts.size_rows(_labelled(table)), x, y, styles, under=under))
    return charts.figure(*panels, names=list(styles))


_SHOWN = 0.98
"""Share of the points that the axis makes room for: a few best temperatures are enormous."""


def _fit_chart(tables: Tables, recipe: str) -> Any:
    table = part(tables, "fit", recipe)
    curve, ordered = table["curve"], sorted(table["points"]["beta"])
    top = 1.1 * float(max(*curve["refit"], *curve["paper"], *ordered[: round(_SHOWN * len(ordered))][-1:]))
    styles = {"wrongly ranked input": charts.Style(charts.PALE, "circle")} | _styles(["refit", "paper"])

    def rows(variant: str, xs: Sequence[float], ys: Sequence[float]) -> list[dict[str, Any]]:
        return [{"variant": variant, "x": x, "y": y} for x, y in zip(xs, ys, strict=True) if y <= top]

    dots = rows("wrongly ranked input", table["points"]["entropy"], table["points"]["beta"])
    lines = [row for name in ("refit", "paper") for row in rows(label(name), curve["entropy"], curve[name])]
    tips = charts.tooltip(variant="", x="entropy (nats)|.2f", y="β|.2f")
    x = charts.axis("x", "entropy H of the attention row (nats)", grid=False)
    plot = charts.Plot(x, charts.axis("y", "inverse temperature β", (0.0, top)), styles, tips)
    layers = [plot.points(dots, size=14.0), *plot.lines(lines), plot.hover(lines), *charts.rule("y", 1.0)]
    if (end := table["paper_acts_on"][1]) is not None:
        layers += charts.rule("x", end, f"paper's end: {nats(end)}", charts.VERMILLION)
    return charts.figure(charts.panel("", *layers, height=320), columns=1, names=list(styles))


def _detection_chart(tables: Tables, recipe: str) -> Any:
    table = part(tables, "detection", recipe)
    rows = [
        {"variant": label(name), "x": int(n), "y": cell["auroc"], "low": cell["low"], "high": cell["high"]}
        for name in in_order(table)
        for n, cell in table[name].items()
        if n != "pooled" and cell["auroc"] is not None
    ]
    y = charts.axis("y", "AUROC", (max(0.0, min([0.45, *(row["low"] - 0.05 for row in rows)])), 1.01))
    under, styles = charts.rule("y", 0.5, "chance"), _styles(table)
    panel = charts.lines_panel("", rows, _x(table), y, styles, under=under, height=300)
    return charts.figure(panel, columns=1, names=list(styles))


def _definitions(tables: Tables) -> dict[str, Pairs]:
    setting = tables.get("setting") or {}
    names = in_order({name for recipe in _recipes(tables) for name in part(tables, "accuracy", recipe) or {}})
    variants = []
    for name in names:
        known = (setting.get("policies") or {}).items()
        rules = [f"{capital(recipe_name(recipe))}: {rule[name]}." for recipe, rule in known if rule.get(name)]
        variants.append((label(name), " ".join([_RULES.get(name, ""), *rules]).strip()))
    recipes = []
    for recipe, about in (setting.get("recipes") or {}).items():
        training = f"{plural(about['steps'], 'step')}, {plural(len(about['seeds']), 'seed')}"
        recipes.append((capital(recipe_name(recipe)), f"{str(about['describe']).rstrip('. ')}; {training}"))
    return {"Variants": variants, "Recipes": recipes}
