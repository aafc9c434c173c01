"""The page of `sharpmax reproduce`: max retrieval with one attention head, as in the paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sharpmax.policies.polynomial import PAPER
from sharpmax.report import charts
from sharpmax.report.tables import (
    EMPTY,
    NOTHING,
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
    sizes,
)
from sharpmax.report.words import (
    SUPERSCRIPTS,
    Pairs,
    capital,
    count,
    estimate,
    joined,
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
    parts, notes = [], []
    recipes = [check_name(recipe, "recipe") for recipe in _recipes(tables)]
    for recipe in recipes:
        shown = present(accuracy_table(tables, recipe), gain_table(tables, recipe))
        numbers, figures, details = metrics(tables, recipe), _figures(tables, recipe), _details(tables, recipe)
        parts.append(Part(f"recipe-{recipe}", capital(recipe_name(recipe)), numbers, figures, shown, details))
        start = f"{capital(recipe_name(recipe))}: " if len(recipes) > 1 else ""
        notes += [start + sentence for sentence in _notes(tables, recipe)]
    trained = tables.get("weights") or {}
    origins = [(f"Models of {recipe_name(name)}", origin_of_weights(about)) for name, about in trained.items()]
    answer, definitions = headline(tables), _definitions(tables)
    return Report("reproduce", answer, parts, notes, _method(tables), definitions, origins, citation=True)


def key(name: str, recipe: str) -> str:
    """The name of a recipe's table or file.

    >>> key("accuracy", "paper"), key("accuracy", "sharp")
    ('accuracy', 'accuracy/sharp')
    """
    return name if recipe == REFERENCE else f"{name}/{recipe}"


def part(tables: Tables, name: str, recipe: str) -> Any:
    """A recipe's table, or None if the run does not hold it."""
    return tables.get(key(name, recipe))


def file_name(name: str, recipe: str) -> str:
    """The name of a recipe's file.

    >>> file_name("accuracy", "paper"), file_name("accuracy", "sharp")
    ('accuracy', 'accuracy-sharp')
    """
    return key(name, recipe).replace("/", "-")


def recipe_name(recipe: str) -> str:
    """A recipe in a sentence.

    >>> recipe_name("paper"), recipe_name("sharp")
    ("the paper's recipe", 'the sharp recipe')
    """
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


def _row(tables: Tables, name: str, recipe: str, variant: str) -> Any:
    return (part(tables, name, recipe) or {}).get(variant)


def _setting(tables: Tables) -> Mapping[str, Any]:
    return tables.get("setting") or {}


def _recipe(tables: Tables, recipe: str) -> Mapping[str, Any]:
    """The settings of a recipe."""
    return (_setting(tables).get("recipes") or {}).get(recipe) or {}


def _about(tables: Tables, recipe: str) -> str:
    """How a recipe is described, and over how many seeds its numbers are means."""
    words = [str(_recipe(tables, recipe).get("describe", "")).rstrip(". "), _over_seeds(tables, recipe)]
    listed = "; ".join(filter(None, words))
    return capital(recipe_name(recipe)) + (f": {listed}." if listed else ".")


def _over_seeds(tables: Tables, recipe: str) -> str:
    seeds = len(_recipe(tables, recipe).get("seeds", []))
    return "" if not seeds else "a single seed" if seeds == 1 else f"mean of {seeds} seeds ± standard error"


def _ends(row: Mapping[str, Any] | None) -> tuple[str, str] | None:
    known = sizes(row or {})
    return (known[0], known[-1]) if len(known) > 1 else None


@dataclass(frozen=True)
class VariantComparison:
    """How a variant compares with softmax: gains in points and p values by size."""

    variant: str
    gains: Mapping[str, float]
    p: Mapping[str, float | None]
    of_argmax: Mapping[str, float]

    @property
    def better(self) -> list[str]:
        """Sizes with a significant gain."""
        return [n for n, p in self.p.items() if p is not None and p < LEVEL and self.gains[n] > 0]

    @property
    def worse(self) -> list[str]:
        """Sizes with a significant loss."""
        return [n for n, p in self.p.items() if p is not None and p < LEVEL and self.gains[n] < 0]

    @property
    def shown(self) -> str:
        """The size to report: the largest gain, or the largest loss where only losses are significant."""
        if self.worse and not self.better:
            return min(self.worse, key=self.gains.__getitem__)
        return max(self.better or self.gains, key=self.gains.__getitem__)

    @property
    def sure(self) -> str:
        """The test at that size in words."""
        p = self.p[self.shown]
        if p is None:
            return "no test" if any(self.gains.values()) else "no difference"
        return probability(p) if p < LEVEL else f"{probability(p)}, not significant"


def comparison(tables: Tables, recipe: str, variant: str) -> VariantComparison | None:
    """The comparison of a variant with softmax, or None if the run did not make it."""
    row = _row(tables, "comparison", recipe, variant)
    if not row:
        return None
    gains, p = ({n: row[n][key] for n in sizes(row)} for key in ("gain", "p"))
    of_argmax = {n: row[n]["of_ceiling"] for n in gains if row[n].get("of_ceiling") is not None}
    return VariantComparison(variant, gains, p, of_argmax)


def best(tables: Tables, recipe: str) -> VariantComparison | None:
    """The variant to report: the entropy target, else the one with the largest gain; never argmax."""
    known = [name for name in in_order(part(tables, "comparison", recipe) or {}) if name != "hard"]
    found = [one for name in known if (one := comparison(tables, recipe, name))]
    for one in found:
        if one.variant == "entropy-target":
            return one
    return max(found, key=lambda one: (len(one.better) > 0, one.gains[one.shown]), default=None)


def headline(tables: Tables) -> list[str]:
    """The answer in numbers, a sentence for each recipe."""
    found: list[str] = []
    for recipe in _recipes(tables):
        parts = []
        row = _row(tables, "accuracy", recipe, "softmax")
        if ends := _ends(row):
            small, large = (f"{percent(row[n]['mean'])} at {count(n)}" for n in ends)
            parts.append(f"Accuracy of softmax: {small} items, {large}.")
        if fix := best(tables, recipe):
            n, after = fix.shown, _row(tables, "accuracy", recipe, fix.variant)
            change = f"{points(fix.gains[n])} points"
            if row and after and n in row and n in after:
                change = f"{percent(row[n]['mean'])} → {percent(after[n]['mean'])}"
            parts.append(f"With the {label(fix.variant)} at {count(n)}: {change} ({fix.sure}).")
        if parts:
            start = f"{capital(recipe_name(recipe))}. " if found else ""
            found.append(start + " ".join(parts))
    return found or [f"{capital(recipe_name(_recipes(tables)[0]))}: {joined(_drawable(tables, _recipes(tables)[0]))}."]


def _notes(tables: Tables, recipe: str) -> Iterator[str]:
    """Numbers that no table shows: the horizon, the distance to the published numbers, where the polynomial ends."""
    weight = _row(tables, "top_weight", recipe, "softmax")
    if bounds := part(tables, "bounds", recipe):
        spread, items = nats(bounds["spread"]["mean"]), whole_from_log10(bounds["horizon_log10"]["mean"])
        yield (
            f"The logits of a row differ by up to {spread} nats: one item can hold half of the weight among at most "
            f"{items} items."
        )
        largest = sizes(bounds["largest_weight"])[-1]
        limit = (bounds.get("limit_weight") or {}).get(largest)
        if limit is not None and weight and largest in weight:
            yield (
                f"Top weight among {count(largest)} items in the limit of many random items: {percent(limit)}; "
                f"measured: {percent(weight[largest]['mean'])}."
            )
    ours = _row(tables, "accuracy", recipe, "softmax") or {}
    theirs = (tables.get("published") or {}).get("softmax") or {}
    apart = {n: abs(ours[n]["mean"] - theirs[n]) for n in sizes(ours) if n in theirs and recipe == REFERENCE}
    if apart:
        worst = max(apart, key=apart.__getitem__)
        yield (
            f"Accuracy of softmax is within {apart[worst]:.1f} points of the published one at every size (furthest at "
            f"{count(worst)} items: {percent(theirs[worst])} published, {percent(ours[worst]['mean'])} here)."
        )
    fit, entropy = part(tables, "fit", recipe), _row(tables, "entropy", recipe, "softmax")
    if fit and fit["paper_acts_on"][1] is not None:
        begin, end = fit["paper_acts_on"]
        where = crossing(entropy, end) if entropy else None
        reached = f", which the mean entropy of softmax exceeds from about {count(where)} items" if where else ""
        yield f"The paper's polynomial exceeds β = 1 between {nats(begin)} and {nats(end)} nats only{reached}."
    if (fix := best(tables, recipe)) and fix.of_argmax:
        least = percent(min(fix.of_argmax.values()))
        yield f"The {label(fix.variant)} reaches at least {least} of argmax's accuracy at every size."
    pooled = _pooled(tables, recipe)
    if chance := [label(name) for name in in_order(pooled) if pooled[name]["low"] <= 0.5]:
        yield f"Detecting wrong answers over all sizes, not better than chance: {joined(chance)}."
    if {"confidence", "both"} <= pooled.keys():
        adds = pooled["both"]["low"] > pooled["confidence"]["high"]
        shown = "the 95% intervals do not overlap" if adds else "not shown, the 95% intervals overlap"
        yield f"Entropy adds to confidence in detecting wrong answers: {shown}."


def _pooled(tables: Tables, recipe: str) -> dict[str, Mapping[str, Any]]:
    """Failure detection over all sizes: the signals that have a value."""
    table = part(tables, "detection", recipe) or {}
    found = {name: table[name].get("pooled") or {} for name in in_order(table)}
    return {name: cell for name, cell in found.items() if cell.get("auroc") is not None}


def crossing(row: Mapping[str, Any], level: float) -> float | None:
    """The size at which a rising line of means passes `level`, interpolated on the log axis."""
    for a, b in itertools.pairwise(sizes(row)):
        low, high = row[a]["mean"], row[b]["mean"]
        if low <= level < high:
            return math.exp(math.log(int(a)) + (level - low) / (high - low) * math.log(int(b) / int(a)))
    return None


def metrics(tables: Tables, recipe: str) -> list[Metric]:
    """What softmax loses with size, the gain of the best variant, the horizon, and failure detection."""
    found = []
    for name, what in (("accuracy", "accuracy of softmax"), ("top_weight", "top weight of softmax")):
        row = _row(tables, name, recipe, "softmax")
        if ends := _ends(row):
            value = " → ".join(percent(row[n]["mean"]) for n in ends)
            found.append(Metric(value, what, f"{count(ends[0])} → {count(ends[1])} items"))
    if fix := best(tables, recipe):
        n = fix.shown
        detail = f"at {count(n)} items, {fix.sure}; better at {len(fix.better)}, worse at {len(fix.worse)} of "
        detail += plural(len(fix.gains), "size")
        found.insert(1, Metric(f"{points(fix.gains[n])} points", label(fix.variant), detail))
    if bounds := part(tables, "bounds", recipe):
        detail = f"with logits within {nats(bounds['spread']['mean'])} nats"
        found.append(Metric(f"{whole_from_log10(bounds['horizon_log10']['mean'])} items", "sharpness horizon", detail))
    if pooled := _pooled(tables, recipe):
        name, cell = max(pooled.items(), key=lambda one: one[1]["auroc"])
        detail = f"{label(name)}; {cell['low']:.2f} to {cell['high']:.2f} (95%)"
        found.append(Metric(f"AUROC {cell['auroc']:.2f}", "detecting wrong answers", detail))
    return found


def _by_size(
    table: Mapping[str, Any], known: Sequence[str], words: Callable[[Any], Cell]
) -> tuple[list[Cell], list[list[Cell]]]:
    """One row per variant, one column per size."""
    head = [Cell("variant"), *(Cell(count(n), "items") for n in known)]
    return head, [
        [Cell(label(name)), *(words(table[name][n]) if n in table[name] else EMPTY for n in known)]
        for name in in_order(table)
    ]


def accuracy_table(tables: Tables, recipe: str) -> Table | None:
    """Accuracy of every variant, and of the paper below it."""
    table = part(tables, "accuracy", recipe)
    if not table:
        return None
    known = sizes(*table.values())
    # The paper's numbers stand beside ours where both come from the same training.
    published = (tables.get("published") or {}) if recipe == REFERENCE else {}
    head, rows = _by_size(table, known, lambda cell: Cell(estimate(share(cell["mean"]), cell["sem"])))
    for name in in_order(table)[::-1]:
        if name in published:
            place = in_order(table).index(name) + 1
            values = [Cell(share(published[name][n]), faint=True) if n in published[name] else EMPTY for n in known]
            rows.insert(place, [Cell(f"{label(name)}, published", faint=True), *values])
    note = f"Percent of sets answered correctly. {capital(_over_seeds(tables, recipe))}.".replace(" .", "")
    return Table("Accuracy (%)", note, head, rows)


def gain_table(tables: Tables, recipe: str) -> Table | None:
    """Gain of every variant over softmax, with its test."""
    table = part(tables, "comparison", recipe)
    if not table:
        return None

    def words(cell: Mapping[str, Any]) -> Cell:
        p = cell["p"]
        test = "no test" if p is None else probability(p)
        return Cell(points(cell["gain"]), test, strong=p is not None and p < LEVEL)

    return Table(
        "Gain over softmax (percentage points)",
        "Same models, same sets. p: two-sided paired t-test over seeds, not corrected for multiple comparisons; "
        f"bold where p < {LEVEL}. “No test”: a single seed, or no difference.",
        *_by_size(table, sizes(*table.values()), words),
    )


def _details(tables: Tables, recipe: str) -> list[Table]:
    theory = part(tables, "bounds", recipe) or {}
    below = {"theory: at most": theory.get("largest_weight")}
    around = {"theory: at least": theory.get("least_entropy"), "ln n": theory.get("most_entropy")}
    return present(
        _of_argmax_table(tables, recipe),
        _measured_table(tables, recipe, "top_weight", "Top weight (%)", share, below),
        _measured_table(tables, recipe, "entropy", "Entropy of the attention row (nats)", nats, around),
        _detection_table(tables, recipe),
        _coefficients_table(tables, recipe),
        _end_table(tables, recipe),
    )


def _of_argmax_table(tables: Tables, recipe: str) -> Table | None:
    table = {
        name: {n: cell for n, cell in row.items() if cell.get("of_ceiling") is not None}
        for name, row in (part(tables, "comparison", recipe) or {}).items()
        if name != "hard"
    }
    if not any(table.values()):
        return None
    note = "Accuracy as a percentage of argmax's with the same models; above 100 where a variant is better."
    # Above 100 there is nothing to round down to.
    body = _by_size(table, sizes(*table.values()), lambda cell: Cell(f"{cell['of_ceiling']:.1f}"))
    return Table("Share of argmax (%)", note, *body)


def _measured_table(
    tables: Tables,
    recipe: str,
    name: str,
    title: str,
    words: Callable[[float], str],
    bounds: Mapping[str, Mapping[str, float] | None],
) -> Table | None:
    table = part(tables, name, recipe)
    if not table:
        return None
    known = sizes(*table.values())
    head, rows = _by_size(table, known, lambda cell: Cell(estimate(words(cell["mean"]), cell["sem"])))
    for bound, row in bounds.items():
        if row is not None:
            rows.append([Cell(bound, faint=True), *(cell_of(row.get(n), words, faint=True) for n in known)])
    note = f"{capital(_over_seeds(tables, recipe))}. Bounds hold for softmax.".removeprefix(". ")
    return Table(title, note, head, rows)


def _detection_table(tables: Tables, recipe: str) -> Table | None:
    table = part(tables, "detection", recipe)
    if not table:
        return None
    known = [*sizes(*table.values()), *(["pooled"] if any("pooled" in row for row in table.values()) else [])]
    rows = [[Cell(label(name)), *(_auroc(table[name].get(n)) for n in known)] for name in in_order(table)]
    first = {n: next((row[n] for row in table.values() if n in row), None) for n in known}
    for title, answers in (("wrong answers", "wrong"), ("correct answers", "right")):
        counts = [Cell(count(cell[answers]), faint=True) if cell else EMPTY for cell in first.values()]
        rows.append([Cell(title, faint=True), *counts])
    head = [Cell("signal"), *(Cell("all sizes") if n == "pooled" else Cell(count(n), "items") for n in known)]
    note = "Answers of softmax; 95% bootstrap intervals. 0.5 is chance."
    return Table("Detecting wrong answers (AUROC)", note, head, rows)


def _auroc(cell: Mapping[str, Any] | None) -> Cell:
    if not cell or cell["auroc"] is None:
        return EMPTY
    return Cell(f"{cell['auroc']:.3f}", f"{cell['low']:.3f} to {cell['high']:.3f}")


def _coefficients_table(tables: Tables, recipe: str) -> Table | None:
    table = part(tables, "fit", recipe)
    if not table:
        return None
    degree = max(len(table["coefficients"]), len(PAPER.coefficients)) - 1
    powers = [f"H{SUPERSCRIPTS[power]}" if power > 1 else "H" if power else "1" for power in range(degree, -1, -1)]

    def line(name: str, coefficients: Sequence[float], acts: Sequence[float | None] | None, r2: str) -> list[Cell]:
        padded = [0.0] * (degree + 1 - len(coefficients)) + list(coefficients)
        return [Cell(name), *(Cell(f"{c:.4g}".replace("-", "−")) for c in padded), Cell(_span(acts)), Cell(r2)]

    return Table(
        "Coefficients of the polynomials",
        f"β = max(1, polynomial of H) where the entropy H exceeds a threshold ({table['threshold']:g} nats for the "
        f"refit), else 1. Fitted to {count(table['wrong'])} wrongly ranked inputs of {count(table['inputs'])}, with "
        f"entropies of {nats(table['fitted_on'][0])} to {nats(table['fitted_on'][1])} nats; "
        f"{count(table['dropped'])} more have no usable best β.",
        cells("polynomial", *powers, "acts on (nats)", "R²"),
        [
            line(label("refit"), table["coefficients"], table["acts_on"], f"{table['r2']:.2f}"),
            line(label("paper"), PAPER.coefficients, table["paper_acts_on"], NOTHING),
        ],
    )


def _span(span: Sequence[float | None] | None) -> str:
    if not span or span[0] is None:
        return "never"
    return f"{nats(span[0])} to " + ("∞" if span[1] is None else nats(span[1]))


def _end_table(tables: Tables, recipe: str) -> Table | None:
    """Size by size: the mean entropy of softmax, the paper's β there, and what it gains."""
    entropy, paper = _row(tables, "entropy", recipe, "softmax"), _row(tables, "comparison", recipe, "paper") or {}
    if not entropy or not part(tables, "fit", recipe):
        return None
    fix = best(tables, recipe)
    others = [fix] if fix and fix.variant != "paper" else []
    rows = []
    for n in sizes(entropy):
        beta = float(PAPER.value_at(entropy[n]["mean"]))
        gains = [paper[n]["gain"] if n in paper else None, *(one.gains.get(n) for one in others)]
        effect = Cell(f"{beta:.2f}", "acts" if beta > 1.0 else "no effect", strong=beta > 1.0)
        gained = [cell_of(value, points) for value in gains]
        rows.append([Cell(count(n)), Cell(nats(entropy[n]["mean"])), effect, *gained])
    titles = [f"gain of the {label(name)}" for name in ("paper", *(one.variant for one in others))]
    return Table(
        "The paper's polynomial, size by size",
        "Mean entropies; single rows lie above and below. Gains in percentage points over softmax.",
        cells("items n", "entropy of softmax (nats)", "paper's β there", *titles),
        rows,
    )


def _figures(tables: Tables, recipe: str) -> list[Figure]:
    make = {"accuracy": _accuracy, "heat": _heat, "focus": _focus, "fit": _fit, "detection": _detection}
    return [make[name](tables, recipe, file_name(name, recipe)) for name in _drawable(tables, recipe)]


def _rows(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name in in_order(table):
        for n in sizes(table[name]):
            mean, sem = table[name][n]["mean"], table[name][n]["sem"]
            ends = (None, None) if sem is None else (mean - sem, mean + sem)
            found.append({"variant": label(name), "x": int(n), "y": mean, "low": ends[0], "high": ends[1], "sem": sem})
    return found


def _ends_words(table: Mapping[str, Any], words: Callable[[float], str]) -> str:
    known = [(label(name), table[name], ends) for name in in_order(table) if (ends := _ends(table[name]))]
    return ", ".join(f"{name} from {words(row[a]['mean'])} to {words(row[b]['mean'])}" for name, row, (a, b) in known)


def _accuracy(tables: Tables, recipe: str, name: str) -> Figure:
    ends, published = _ends_words(part(tables, "accuracy", recipe), percent), ""
    if tables.get("published"):
        published = " Hollow: published in the paper" + ("." if recipe == REFERENCE else ", with its own training.")
    return Figure(
        name,
        "Accuracy by number of items",
        f"{_about(tables, recipe)} Gain: on the same sets.{published}",
        f"Accuracy in percent against the number of items, a line for each variant: {ends}.",
        partial(_accuracy_chart, tables, recipe),
    )


def _accuracy_chart(tables: Tables, recipe: str) -> Any:
    table, gains = part(tables, "accuracy", recipe), part(tables, "comparison", recipe)
    known = sizes(*table.values())
    styles, x = _styles(table), charts.size_axis([int(n) for n in known], "number of items n")
    printed = {
        name: {n: row[n] for n in known if n in row}
        for name, row in (tables.get("published") or {}).items()
        if name in table
    }

    def hollow(plot: charts.Plot, values: Mapping[str, Mapping[str, float]], **about: str) -> list[Any]:
        rows = [
            {"variant": label(name), "x": int(n), "y": y, "source": "published"} | about
            for name, row in values.items()
            for n, y in row.items()
        ]
        return [plot.points(rows, filled=False, size=70.0)] if rows else []

    tips = charts.tooltip(
        variant="variant", x="items|,", y="accuracy (%)|.1f", sem="standard error|.2f", source="source"
    )
    plot = charts.Plot(x, charts.percent_axis("accuracy (%)"), styles, tips)
    # Argmax lies underneath what comes close to it.
    rows = sorted(
        (row | {"source": "this run"} for row in _rows(table)), key=lambda row: row["variant"] != label("hard")
    )
    panels = [charts.panel("Accuracy", *plot.all(rows), *hollow(plot, printed))]
    rows = []
    for one in sorted(in_order(gains), key=lambda name: name != "hard"):
        for n in sizes(gains[one]) if label(one) in styles else ():
            gain, p = gains[one][n]["gain"], gains[one][n]["p"]
            test = "no test" if p is None else probability(p)
            rows.append({"variant": label(one), "x": int(n), "y": gain, "p": test})
    tips = charts.tooltip(variant="variant", x="items|,", y="points|+.1f", p="test")
    plot = charts.Plot(x, charts.axis("y", "percentage points"), styles, tips)
    theirs = {}
    # Gains depend on the training: the paper's belong to its own recipe.
    if recipe == REFERENCE and "softmax" in printed:
        plain = printed["softmax"]
        theirs = {
            one: {n: y - plain[n] for n, y in row.items() if n in plain} for one, row in printed.items() if one in gains
        }
    layers = [*charts.rule("y", 0.0), *plot.all(rows), *hollow(plot, theirs, p="published")]
    panels.append(charts.panel("Gain over softmax", *layers))
    return charts.figure(*panels, names=list(styles))


def _heat(tables: Tables, recipe: str, name: str) -> Figure:
    table = part(tables, "heat", recipe)
    known = [str(n) for n in table["sizes"]]
    means = {
        variant: [sum(line[0] for line in rows[n]) / len(rows[n]) for n in (known[0], known[-1])]
        for variant, rows in table["arms"].items()
    }
    ends = "; ".join(
        f"{label(one)} {percent(means[one][0])} at {count(known[0])} items, {percent(means[one][1])} at "
        f"{count(known[-1])}"
        for one in in_order(means)
    )
    return Figure(
        name,
        "Attention weights of the best items",
        f"{capital(recipe_name(recipe))}, first seed. Each row is one of {count(table['sets'])} sets, each column "
        f"one of the {count(table['items'])} items with the highest priority, the correct one first. Mean weight of "
        f"the correct item: {ends}.",
        f"Heat maps of attention weights. Mean weight of the correct item: {ends}.",
        partial(_heat_chart, table),
    )


def _heat_chart(table: Mapping[str, Any]) -> Any:
    variants, known = in_order(table["arms"]), [str(n) for n in table["sizes"]]
    panels = []
    for variant in variants:
        for n in known:
            rows = [
                {"x": x, "y": y, "value": float(f"{value:.3g}")}
                for y, line in enumerate(table["arms"][variant][n], start=1)
                for x, value in enumerate(line, start=1)
            ]
            tips = charts.tooltip(y="set", x="item by priority", value="weight (%)|.3g")
            title = [label(variant), f"n = {count(n)}"]
            heat = charts.heat_panel(
                title, rows, "", "", "weight (%)", domain=(0, 100), tips=tips, height=130, ticks=[1]
            )
            panels.append(heat)
    return charts.figure(*panels, columns=len(known), minimum=150, around=26)


_BOUND, _LIMIT = "theory's bound for softmax", "theory's limit for large n"


def _focus(tables: Tables, recipe: str, name: str) -> Figure:
    bounds, weight = part(tables, "bounds", recipe), part(tables, "top_weight", recipe)
    items = whole_from_log10(bounds["horizon_log10"]["mean"])
    return Figure(
        name,
        "Top weight and entropy by number of items",
        f"{_about(tables, recipe)} Dashed: bounds for softmax from the measured spread of logits "
        f"({nats(bounds['spread']['mean'])} nats) and ln n. Sharpness horizon: {items} items; beyond it no item can "
        "hold half of the weight.",
        f"Top weight in percent against the number of items: {_ends_words(weight, percent)}. Beside it the entropy "
        "in nats.",
        partial(_focus_chart, tables, recipe),
    )


def _focus_chart(tables: Tables, recipe: str) -> Any:
    weight, entropy, bounds = (part(tables, name, recipe) for name in ("top_weight", "entropy", "bounds"))
    known = [int(n) for n in sizes(*weight.values(), *entropy.values())]
    styles = _styles({*weight, *entropy}) | {_BOUND: charts.Style(charts.SOFT, charts.LINE, (5, 3))}
    if "limit_weight" in bounds:
        styles[_LIMIT] = charts.Style(charts.SOFT, charts.LINE, (2, 2))
    horizon = bounds["horizon_log10"]["mean"]
    inside = math.log10(known[0]) <= horizon <= math.log10(known[-1])
    x = charts.size_axis(known, "number of items n")

    panels = []
    for title, y, table, unit, below, limit in (
        ("Top weight", charts.percent_axis("top weight (%)"), weight, "%", ["largest_weight"], "limit_weight"),
        ("Entropy", charts.axis("y", "entropy (nats)"), entropy, "nats", ["least_entropy", "most_entropy"],
         "limit_entropy"),
    ):  # fmt: skip
        tips = charts.tooltip(variant="variant", x="items|,", y=f"{unit}|.2f", sem="standard error|.2f")
        plot = charts.Plot(x, y, styles, tips)
        marks = []
        if inside:
            text = "" if title == "Top weight" else f"horizon {whole_from_log10(horizon)}"
            marks += charts.rule("x", 10.0**horizon, text)
        for name, variant in (*((name, _BOUND) for name in below), (limit, _LIMIT)):
            line = (bounds.get(name) or {}).items()
            rows = [{"variant": variant, "x": int(n), "y": value} for n, value in line if value is not None]
            marks += plot.lines(rows, width=1.3)
        panels.append(charts.panel(title, *marks, *plot.all(_rows(table))))
    return charts.figure(*panels, names=list(styles))


_SHOWN = 0.98
"""Share of the points that the axis makes room for: a few best temperatures are enormous."""


def _fit(tables: Tables, recipe: str, name: str) -> Figure:
    table = part(tables, "fit", recipe)
    top = _top(table)
    above = sum(value > top for value in table["points"]["beta"])
    hidden = f" Above the frame: {plural(above, 'point')} of {count(len(table['points']['beta']))}." if above else ""
    return Figure(
        name,
        "Best β of wrongly ranked inputs",
        f"{capital(recipe_name(recipe))}; {count(table['wrong'])} wrongly ranked inputs of "
        f"{count(table['inputs'])}; R² of the refit {table['r2']:.2f}. Each point: the β that gives the correct "
        f"item the most weight. The refit {_acts(table['acts_on'])}, the paper's polynomial "
        f"{_acts(table['paper_acts_on'])}.{hidden}",
        "Scatter of the best β of wrongly ranked inputs against the entropy of their attention rows, with the "
        "refitted polynomial and the paper's.",
        partial(_fit_chart, table, top),
    )


def _top(table: Mapping[str, Any]) -> float:
    ordered = sorted(table["points"]["beta"])
    curve = table["curve"]
    return 1.1 * float(max(*curve["refit"], *curve["paper"], *ordered[: round(_SHOWN * len(ordered))][-1:]))


def _acts(span: Sequence[float | None] | None) -> str:
    if not span or span[0] is None:
        return "never exceeds β = 1"
    return f"acts from {nats(span[0])} nats" + ("" if span[1] is None else f" to {nats(span[1])}")


def _fit_chart(table: Mapping[str, Any], top: float) -> Any:
    found = "wrongly ranked input"
    styles = {found: charts.Style(charts.PALE, "circle")} | _styles(["refit", "paper"])
    rows = [
        {"variant": found, "x": x, "y": y}
        for x, y in zip(table["points"]["entropy"], table["points"]["beta"], strict=True)
        if y <= top
    ]
    curve = table["curve"]
    lines = [
        {"variant": label(name), "x": x, "y": y}
        for name in ("refit", "paper")
        for x, y in zip(curve["entropy"], curve[name], strict=True)
    ]
    tips = charts.tooltip(variant="", x="entropy (nats)|.2f", y="β|.2f")
    x = charts.axis("x", "entropy H of the attention row (nats)", grid=False)
    plot = charts.Plot(x, charts.axis("y", "inverse temperature β", (0.0, top)), styles, tips)
    layers = [plot.points(rows, size=14.0), *plot.lines(lines), plot.hover(lines), *charts.rule("y", 1.0)]
    if (end := table["paper_acts_on"][1]) is not None:
        layers += charts.rule("x", end, f"paper's end: {nats(end)}", charts.VERMILLION)
    return charts.figure(charts.panel("", *layers, height=320), columns=1, names=list(styles))


def _detection(tables: Tables, recipe: str, name: str) -> Figure:
    table = part(tables, "detection", recipe)
    pooled = _pooled(tables, recipe)
    values = ", ".join(f"{label(one)} {cell['auroc']:.2f}" for one, cell in pooled.items()) or "no value"
    missing = [
        n for n in sizes(*table.values()) if all((row.get(n) or {}).get("auroc") is None for row in table.values())
    ]
    less = f" No value at {', '.join(map(count, missing))} items: no wrong answers." if missing else ""
    return Figure(
        name,
        "Detecting wrong answers (AUROC)",
        f"{capital(recipe_name(recipe))}; answers of softmax; 95% bootstrap intervals. 0.5 is chance, 1 is perfect. "
        f"Over all sizes: {values}.{less}",
        f"AUROC against the number of items for {len(table)} signals. Over all sizes: {values}.",
        partial(_detection_chart, table),
    )


def _detection_chart(table: Mapping[str, Any]) -> Any:
    known = [int(n) for n in sizes(*table.values())]
    styles = _styles(table)
    rows = []
    for place, name in enumerate(in_order(table)):
        aside = 2.0 ** (0.14 * (place - (len(table) - 1) / 2))  # neighbouring intervals would overlap
        for n in sizes(table[name]):
            cell = table[name][n]
            if cell["auroc"] is not None:
                row = {"variant": label(name), "x": int(n) * aside, "items": int(n), "y": cell["auroc"]}
                rows.append(row | {key: cell[key] for key in ("low", "high", "wrong", "right")})
    floor = min([0.45, *(row["low"] - 0.05 for row in rows)])
    numbers = {"y": "AUROC|.3f", "low": "95% from|.3f", "high": "to|.3f", "wrong": "wrong|,", "right": "correct|,"}
    tips = charts.tooltip(variant="signal", items="items|,", **numbers)
    x, y = charts.size_axis(known, "number of items n"), charts.axis("y", "AUROC", (max(0.0, floor), 1.01))
    plot = charts.Plot(x, y, styles, tips)
    panel = charts.panel("", *charts.rule("y", 0.5, "chance"), *plot.all(rows), height=300)
    return charts.figure(panel, columns=1, names=list(styles))


def _method(tables: Tables) -> list[str]:
    setting, trained, tested = _setting(tables), "", ""
    if setting.get("train_sizes"):
        trained = f" Training uses sets of {' to '.join(map(count, setting['train_sizes']))} items."
    if setting.get("samples"):
        listed = joined([count(n) for n in setting.get("sizes") or []])
        tested = f" Testing uses {setting['samples']} sets per size and model: {listed} items."
    return [
        f"A set of items, each with a priority and one of {setting.get('classes') or 'several'} classes: the model "
        "names the class of the item with the highest priority. One query attends to all items with one softmax "
        f"head, between two-layer networks.{trained}{tested}",
        "Weights are softmax(β·s) of logits s; a variant is a rule for β on the same trained weights and the same "
        "sets. Entropy is in nats.",
    ]


def _definitions(tables: Tables) -> list[tuple[str, Pairs]]:
    setting = _setting(tables)
    names = in_order({name for recipe in _recipes(tables) for name in part(tables, "accuracy", recipe) or {}})
    policies = setting.get("policies") or {}
    variants = []
    for name in names:
        rules = [f"{recipe_name(recipe)}: {known[name]}" for recipe, known in policies.items() if known.get(name)]
        words = [_RULES.get(name, ""), "; ".join(capital(rule) for rule in rules)]
        variants.append((label(name), " ".join(words).strip()))
    recipes = []
    for recipe, about in (setting.get("recipes") or {}).items():
        training = f"{plural(about['steps'], 'step')}, {plural(len(about['seeds']), 'seed')}"
        recipes.append((capital(recipe_name(recipe)), f"{str(about['describe']).rstrip('. ')}; {training}"))
    for recipe, known in (setting.get("left_out") or {}).items():
        if known:
            why = "; ".join(f"{what}: {reason}" for what, reason in known.items())
            recipes.append((f"Left out of {recipe_name(recipe)}", why))
    return [(title, rows) for title, rows in (("Variants", variants), ("Recipes", recipes)) if rows]
