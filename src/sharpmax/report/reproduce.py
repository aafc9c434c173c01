"""The page of `sharpmax reproduce`: max retrieval with one attention head, as in the paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    cells,
    check_name,
    present,
    sizes,
)  # fmt: skip
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
)  # fmt: skip

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
    "accuracy": ("accuracy", "comparison"), "heat": ("heat",), "focus": ("entropy", "top_weight", "bounds"),
    "fit": ("fit",),
    "detection": ("detection",),
}  # fmt: skip
"""The tables that each figure is made from."""


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax reproduce`."""
    return any(_drawable(tables, recipe) for recipe in _recipes(tables))


def _recipes(tables: Tables) -> list[str]:
    """The recipes these tables hold something of, the reference first."""
    kinds = {need for needs in _NEEDS.values() for need in needs}
    found = dict.fromkeys(
        recipe or REFERENCE for name, _, recipe in (table.partition("/") for table in tables) if name in kinds
    )
    return sorted(found, key=lambda recipe: recipe != REFERENCE)


def _drawable(tables: Tables, recipe: str) -> list[str]:
    return [name for name, needs in _NEEDS.items() if all(part(tables, need, recipe) is not None for need in needs)]


def report(tables: Tables) -> Report:
    """The page's contents."""
    recipes = [check_name(recipe, "recipe") for recipe in _recipes(tables)]
    parts = [
        Part(
            f"recipe-{recipe}", capital(recipe_name(recipe)), metrics(tables, recipe), _figures(tables, recipe),
            present(accuracy_table(tables, recipe), gain_table(tables, recipe)), _details(tables, recipe),
        )
        for recipe in recipes
    ]  # fmt: skip
    notes = [sentence for recipe in recipes for sentence in _notes(tables, recipe)]
    origins = [
        (f"Models of {recipe_name(name)}", origin_of_weights(about))
        for name, about in (tables.get("weights") or {}).items()
    ]
    return Report(
        "reproduce", headline(tables), parts, notes, _method(tables), _definitions(tables), origins, citation=True
    )


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


def _about(tables: Tables, recipe: str) -> str:
    """How a recipe is described, and over how many seeds its numbers are means."""
    about = (_setting(tables).get("recipes") or {}).get(recipe) or {}
    words = [str(about.get("describe", "")).rstrip(". "), _over_seeds(tables, recipe)]
    return (
        f"{capital(recipe_name(recipe))}: {'; '.join(filter(None, words))}."
        if any(words)
        else f"{capital(recipe_name(recipe))}."
    )


def _over_seeds(tables: Tables, recipe: str) -> str:
    about = (_setting(tables).get("recipes") or {}).get(recipe) or {}
    seeds = len(about.get("seeds", []))
    return "" if not seeds else "a single seed" if seeds == 1 else f"mean of {seeds} seeds ± standard error"


def _ends(row: Mapping[str, Any] | None) -> tuple[str, str] | None:
    known = sizes(row or {})
    return (known[0], known[-1]) if len(known) > 1 else None


@dataclass(frozen=True)
class Comparison:
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


def comparison(tables: Tables, recipe: str, variant: str) -> Comparison | None:
    """The comparison of a variant with softmax, or None if the run did not make it."""
    row = _row(tables, "comparison", recipe, variant)
    if not row:
        return None
    known = sizes(row)
    return Comparison(
        variant, {n: row[n]["gain"] for n in known}, {n: row[n]["p"] for n in known},
        {n: row[n]["of_ceiling"] for n in known if row[n].get("of_ceiling") is not None},
    )  # fmt: skip


def best(tables: Tables, recipe: str) -> Comparison | None:
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
            small, large = ends
            parts.append(
                f"Accuracy of softmax: {percent(row[small]['mean'])} at {count(small)} items, "
                f"{percent(row[large]['mean'])} at {count(large)}."
            )
        if fix := best(tables, recipe):
            n = fix.shown
            after = _row(tables, "accuracy", recipe, fix.variant)
            known = row and after and n in row and n in after
            change = (
                f"{percent(row[n]['mean'])} → {percent(after[n]['mean'])}"
                if known
                else f"{points(fix.gains[n])} points"
            )
            parts.append(f"With the {label(fix.variant)} at {count(n)}: {change} ({fix.sure}).")
        if parts:
            start = f"{capital(recipe_name(recipe))}. " if found else ""
            found.append(start + " ".join(parts))
    return found or [f"{capital(recipe_name(_recipes(tables)[0]))}: {joined(_drawable(tables, _recipes(tables)[0]))}."]


def _notes(tables: Tables, recipe: str) -> list[str]:
    """Numbers that no table shows: the horizon, the distance to the published numbers, where the polynomial ends."""
    found = []
    bounds, weight = part(tables, "bounds", recipe), _row(tables, "top_weight", recipe, "softmax")
    if bounds:
        spread, items = nats(bounds["spread"]["mean"]), whole_from_log10(bounds["horizon_log10"]["mean"])
        found.append(
            f"The logits of a row differ by up to {spread} nats: one item can hold half of the weight among at most "
            f"{items} items."
        )
        largest = sizes(bounds["largest_weight"])[-1]
        limit = (bounds.get("limit_weight") or {}).get(largest)
        if limit is not None and weight and largest in weight:
            found.append(
                f"Top weight among {count(largest)} items in the limit of many random items: {percent(limit)}; "
                f"measured: {percent(weight[largest]['mean'])}."
            )
    ours = _row(tables, "accuracy", recipe, "softmax") or {}
    theirs = (tables.get("published") or {}).get("softmax") or {}
    shared = [n for n in sizes(ours) if n in theirs] if recipe == REFERENCE else []
    if shared:
        worst = max(shared, key=lambda n: abs(ours[n]["mean"] - theirs[n]))
        found.append(
            f"Accuracy of softmax is within {abs(ours[worst]['mean'] - theirs[worst]):.1f} points of the published "
            f"one at every size (furthest at {count(worst)} items: {percent(theirs[worst])} published, "
            f"{percent(ours[worst]['mean'])} here)."
        )
    fit, entropy = part(tables, "fit", recipe), _row(tables, "entropy", recipe, "softmax")
    end = fit["paper_acts_on"][1] if fit else None
    if fit and end is not None:
        where = crossing(entropy, end) if entropy else None
        reached = (
            ""
            if not entropy
            else f", which the mean entropy of softmax exceeds from about {count(where)} items"
            if where
            else ""
        )
        found.append(
            f"The paper's polynomial exceeds β = 1 between {nats(fit['paper_acts_on'][0])} and {nats(end)} nats "
            f"only{reached}."
        )
    fix = best(tables, recipe)
    if fix and fix.of_argmax:
        found.append(
            f"The {label(fix.variant)} reaches at least {percent(min(fix.of_argmax.values()))} of argmax's accuracy "
            "at every size."
        )
    table = part(tables, "detection", recipe) or {}
    chance = [
        label(name)
        for name in in_order(table)
        if (cell := table[name].get("pooled")) and cell["low"] is not None and cell["low"] <= 0.5
    ]
    if chance:
        found.append(f"Detecting wrong answers over all sizes, not better than chance: {joined(chance)}.")
    if {"confidence", "both"} <= set(table) and all(
        (table[name].get("pooled") or {}).get("auroc") is not None for name in ("confidence", "both")
    ):
        adds = table["both"]["pooled"]["low"] > table["confidence"]["pooled"]["high"]
        found.append(
            "Entropy adds to confidence in detecting wrong answers: "
            + ("the 95% intervals do not overlap." if adds else "not shown, the 95% intervals overlap.")
        )
    start = f"{capital(recipe_name(recipe))}: " if len(_recipes(tables)) > 1 else ""
    return [start + sentence for sentence in found]


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
    table = part(tables, "detection", recipe) or {}
    known = {name: row["pooled"] for name, row in table.items() if (row.get("pooled") or {}).get("auroc") is not None}
    if known:
        name = max(in_order(known), key=lambda one: known[one]["auroc"])
        cell = known[name]
        found.append(
            Metric(
                f"AUROC {cell['auroc']:.2f}",
                "detecting wrong answers",
                f"{label(name)}; {cell['low']:.2f} to {cell['high']:.2f} (95%)",
            )
        )
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
    return Table(
        "Accuracy (%)",
        f"Percent of sets answered correctly. {capital(_over_seeds(tables, recipe))}.".replace(" .", ""),
        head,
        rows,
    )


def gain_table(tables: Tables, recipe: str) -> Table | None:
    """Gain of every variant over softmax, with its test."""
    table = part(tables, "comparison", recipe)
    if not table:
        return None

    def words(cell: Mapping[str, Any]) -> Cell:
        p = cell["p"]
        return Cell(
            points(cell["gain"]), "no test" if p is None else probability(p), strong=p is not None and p < LEVEL
        )

    return Table(
        "Gain over softmax (percentage points)",
        "Same models, same sets. p: two-sided paired t-test over seeds, not corrected for multiple comparisons; "
        f"bold where p < {LEVEL}. “No test”: a single seed, or no difference.",
        *_by_size(table, sizes(*table.values()), words),
    )


def _details(tables: Tables, recipe: str) -> list[Table]:
    theory = part(tables, "bounds", recipe) or {}
    return present(
        _of_argmax_table(tables, recipe),
        _measured_table(
            tables, recipe, "top_weight", "Top weight (%)", share, {"largest_weight": "theory: at most"}, theory
        ),
        _measured_table(
            tables, recipe, "entropy", "Entropy of the attention row (nats)", nats,
            {"least_entropy": "theory: at least", "most_entropy": "ln n"}, theory
        ),
        _detection_table(tables, recipe), _coefficients_table(tables, recipe), _end_table(tables, recipe),
    )  # fmt: skip


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
    return Table(
        "Share of argmax (%)",
        note,
        *_by_size(table, sizes(*table.values()), lambda cell: Cell(f"{cell['of_ceiling']:.1f}")),
    )


def _measured_table(
    tables: Tables,
    recipe: str,
    name: str,
    title: str,
    words: Callable[[float], str],
    bounds: Mapping[str, str],
    theory: Mapping[str, Any],
) -> Table | None:
    table = part(tables, name, recipe)
    if not table:
        return None
    known = sizes(*table.values())
    head, rows = _by_size(table, known, lambda cell: Cell(estimate(words(cell["mean"]), cell["sem"])))
    for key_of, title_of in bounds.items():
        if key_of in theory:
            row = theory[key_of]
            rows.append(
                [Cell(title_of, faint=True), *(Cell(words(row[n]), faint=True) if n in row else EMPTY for n in known)]
            )
    return Table(
        title, f"{capital(_over_seeds(tables, recipe))}. Bounds hold for softmax.".removeprefix(". "), head, rows
    )


def _detection_table(tables: Tables, recipe: str) -> Table | None:
    table = part(tables, "detection", recipe)
    if not table:
        return None
    known = [*sizes(*table.values()), *(["pooled"] if any("pooled" in row for row in table.values()) else [])]
    rows = [[Cell(label(name)), *(_auroc(table[name].get(n)) for n in known)] for name in in_order(table)]
    first = {n: next((row[n] for row in table.values() if n in row), None) for n in known}
    for title, answers in (("wrong answers", "wrong"), ("correct answers", "right")):
        rows.append(
            [
                Cell(title, faint=True),
                *(Cell(count(cell[answers]), faint=True) if cell else EMPTY for cell in first.values()),
            ]
        )
    return Table(
        "Detecting wrong answers (AUROC)", "Answers of softmax; 95% bootstrap intervals. 0.5 is chance.",
        [Cell("signal"), *(Cell("all sizes") if n == "pooled" else Cell(count(n), "items") for n in known)], rows,
    )  # fmt: skip


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
        rows.append([
            Cell(count(n)), Cell(nats(entropy[n]["mean"])),
            Cell(f"{beta:.2f}", "acts" if beta > 1.0 else "no effect", strong=beta > 1.0),
            *(EMPTY if value is None else Cell(points(value)) for value in gains),
        ])  # fmt: skip
    return Table(
        "The paper's polynomial, size by size",
        "Mean entropies; single rows lie above and below. Gains in percentage points over softmax.",
        cells(
            "items n", "entropy of softmax (nats)", "paper's β there", "gain of the paper's polynomial",
            *(f"gain of the {label(one.variant)}" for one in others),
        ),
        rows,
    )  # fmt: skip


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
    table = part(tables, "accuracy", recipe)
    published = (
        " Hollow: published in the paper" + ("." if recipe == REFERENCE else ", with its own training.")
        if tables.get("published")
        else ""
    )
    return Figure(
        name, "Accuracy by number of items", f"{_about(tables, recipe)} Gain: on the same sets.{published}",
        f"Accuracy in percent against the number of items, a line for each variant: {_ends_words(table, percent)}.",
        partial(_accuracy_chart, tables, recipe),
    )  # fmt: skip


def _accuracy_chart(tables: Tables, recipe: str) -> Any:
    table, gains = part(tables, "accuracy", recipe), part(tables, "comparison", recipe)
    known = sizes(*table.values())
    styles, x = _styles(table), charts.size_axis([int(n) for n in known], "number of items n")
    printed = {
        name: {n: row[n] for n in known if n in row}
        for name, row in (tables.get("published") or {}).items()
        if name in table
    }

    def hollow(values: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
        return [
            {"variant": label(name), "x": int(n), "y": y, "source": "published"}
            for name, row in values.items()
            for n, y in row.items()
        ]

    tips = charts.tooltip(
        variant="variant", x="items|,", y="accuracy (%)|.1f", sem="standard error|.2f", source="source"
    )
    plot = charts.Plot(x, charts.percent_axis("accuracy (%)"), styles, tips)
    # Argmax lies underneath what comes close to it.
    rows = sorted(
        (row | {"source": "this run"} for row in _rows(table)), key=lambda row: row["variant"] != label("hard")
    )
    extra = [plot.points(hollow(printed), filled=False, size=70.0)] if any(printed.values()) else []
    panels = [charts.panel("Accuracy", *plot.all(rows), *extra)]
    found = [
        {
            "variant": label(one),
            "x": int(n),
            "y": gains[one][n]["gain"],
            "p": "no test" if gains[one][n]["p"] is None else probability(gains[one][n]["p"]),
        }
        for one in sorted(in_order(gains), key=lambda name: name != "hard")
        if label(one) in styles
        for n in sizes(gains[one])
    ]
    plot = charts.Plot(
        x,
        charts.axis("y", "percentage points"),
        styles,
        charts.tooltip(variant="variant", x="items|,", y="points|+.1f", p="test"),
    )
    extra = []
    # Gains depend on the training: the paper's belong to its own recipe.
    if recipe == REFERENCE and "softmax" in printed:
        apart = {
            one: {n: y - printed["softmax"][n] for n, y in row.items() if n in printed["softmax"]}
            for one, row in printed.items()
            if one in gains
        }
        extra = (
            [plot.points([row | {"p": "published"} for row in hollow(apart)], filled=False, size=70.0)]
            if any(apart.values())
            else []
        )
    panels.append(charts.panel("Gain over softmax", *charts.rule("y", 0.0), *plot.all(found), *extra))
    return charts.figure(*panels, names=list(styles))


def _heat(tables: Tables, recipe: str, name: str) -> Figure:
    table = part(tables, "heat", recipe)
    known = [str(n) for n in table["sizes"]]
    first = {
        one: [
            sum(line[0] for line in table["arms"][one][n]) / len(table["arms"][one][n]) for n in (known[0], known[-1])
        ]
        for one in in_order(table["arms"])
    }
    ends = "; ".join(
        f"{label(one)} {percent(a)} at {count(known[0])} items, {percent(b)} at {count(known[-1])}"
        for one, (a, b) in first.items()
    )
    return Figure(
        name, "Attention weights of the best items",
        f"{capital(recipe_name(recipe))}, first seed. Each row is one of {count(table['sets'])} sets, each column "
        f"one of the {count(table['items'])} items with the highest priority, the correct one first. Mean weight of "
        f"the correct item: {ends}.",
        f"Heat maps of attention weights. Mean weight of the correct item: {ends}.", partial(_heat_chart, table),
    )  # fmt: skip


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
            panels.append(
                charts.heat_panel(
                    title, rows, "", "", "weight (%)", domain=(0, 100), tips=tips, height=130, ticks=[1], legend=True
                )
            )
    return charts.figure(*panels, columns=len(known), minimum=150, around=26)


_BOUND, _LIMIT = "theory's bound for softmax", "theory's limit for large n"


def _focus(tables: Tables, recipe: str, name: str) -> Figure:
    bounds, weight = part(tables, "bounds", recipe), part(tables, "top_weight", recipe)
    items = whole_from_log10(bounds["horizon_log10"]["mean"])
    return Figure(
        name, "Top weight and entropy by number of items",
        f"{_about(tables, recipe)} Dashed: bounds for softmax from the measured spread of logits "
        f"({nats(bounds['spread']['mean'])} nats) and ln n. Sharpness horizon: {items} items; beyond it no item can "
        "hold half of the weight.",
        f"Top weight in percent against the number of items: {_ends_words(weight, percent)}. Beside it the entropy "
        "in nats.",
        partial(_focus_chart, tables, recipe),
    )  # fmt: skip


def _focus_chart(tables: Tables, recipe: str) -> Any:
    weight, entropy, bounds = (part(tables, name, recipe) for name in ("top_weight", "entropy", "bounds"))
    known = [int(n) for n in sizes(*weight.values(), *entropy.values())]
    styles = _styles({*weight, *entropy}) | {_BOUND: charts.Style(charts.SOFT, charts.LINE, (5, 3))}
    if "limit_weight" in bounds:
        styles[_LIMIT] = charts.Style(charts.SOFT, charts.LINE, (2, 2))
    horizon = bounds["horizon_log10"]["mean"]
    inside = math.log10(known[0]) <= horizon <= math.log10(known[-1])
    x = charts.size_axis(known, "number of items n")

    def theory(names: Sequence[str], variant: str) -> list[list[dict[str, Any]]]:
        return [
            [{"variant": variant, "x": int(n), "y": y} for n, y in bounds[name].items() if y is not None]
            for name in names
            if name in bounds
        ]

    panels = []
    for title, axis, table, unit, lines in (
        ("Top weight", charts.percent_axis("top weight (%)"), weight, "%", (["largest_weight"], ["limit_weight"])),
        (
            "Entropy",
            charts.axis("y", "entropy (nats)"),
            entropy,
            "nats",
            (["least_entropy", "most_entropy"], ["limit_entropy"]),
        ),
    ):
        tips = charts.tooltip(variant="variant", x="items|,", y=f"{unit}|.2f", sem="standard error|.2f")
        plot = charts.Plot(x, axis, styles, tips)
        drawn = [
            layer
            for names, variant in zip(lines, (_BOUND, _LIMIT), strict=True)
            for rows in theory(names, variant)
            if rows
            for layer in plot.lines(rows, width=1.3)
        ]
        mark = (
            charts.rule("x", 10.0**horizon, "" if title == "Top weight" else f"horizon {whole_from_log10(horizon)}")
            if inside
            else []
        )
        panels.append(charts.panel(title, *mark, *drawn, *plot.all(_rows(table))))
    return charts.figure(*panels, names=list(styles))


_SHOWN = 0.98
"""Share of the points that the axis makes room for: a few best temperatures are enormous."""


def _fit(tables: Tables, recipe: str, name: str) -> Figure:
    table = part(tables, "fit", recipe)
    top = _top(table)
    above = sum(value > top for value in table["points"]["beta"])
    hidden = f" Above the frame: {plural(above, 'point')} of {count(len(table['points']['beta']))}." if above else ""
    return Figure(
        name, "Best β of wrongly ranked inputs",
        f"{capital(recipe_name(recipe))}; {count(table['wrong'])} wrongly ranked inputs of "
        f"{count(table['inputs'])}; R² of the refit {table['r2']:.2f}. Each point: the β that gives the correct "
        f"item the most weight. The refit {_acts(table['acts_on'])}, the paper's polynomial "
        f"{_acts(table['paper_acts_on'])}.{hidden}",
        "Scatter of the best β of wrongly ranked inputs against the entropy of their attention rows, with the "
        "refitted polynomial and the paper's.",
        partial(_fit_chart, table, top),
    )  # fmt: skip


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
    plot = charts.Plot(
        charts.axis("x", "entropy H of the attention row (nats)", grid=False),
        charts.axis("y", "inverse temperature β", (0.0, top)),
        styles,
        tips,
    )
    end = table["paper_acts_on"][1]
    marks = charts.rule("x", end, f"paper's end: {nats(end)}", charts.VERMILLION) if end is not None else []
    panel = charts.panel(
        "",
        plot.points(rows, size=14.0),
        *plot.lines(lines),
        plot.hover(lines),
        *charts.rule("y", 1.0),
        *marks,
        height=320,
    )
    return charts.figure(panel, columns=1, names=list(styles))


def _detection(tables: Tables, recipe: str, name: str) -> Figure:
    table = part(tables, "detection", recipe)
    pooled = {
        one: table[one]["pooled"]
        for one in in_order(table)
        if (table[one].get("pooled") or {}).get("auroc") is not None
    }
    values = ", ".join(f"{label(one)} {cell['auroc']:.2f}" for one, cell in pooled.items()) or "no value"
    missing = [
        n for n in sizes(*table.values()) if all((row.get(n) or {}).get("auroc") is None for row in table.values())
    ]
    less = f" No value at {', '.join(map(count, missing))} items: no wrong answers." if missing else ""
    return Figure(
        name, "Detecting wrong answers (AUROC)",
        f"{capital(recipe_name(recipe))}; answers of softmax; 95% bootstrap intervals. 0.5 is chance, 1 is perfect. "
        f"Over all sizes: {values}.{less}",
        f"AUROC against the number of items for {len(table)} signals. Over all sizes: {values}.",
        partial(_detection_chart, table),
    )  # fmt: skip


def _detection_chart(table: Mapping[str, Any]) -> Any:
    known = [int(n) for n in sizes(*table.values())]
    styles = _styles(table)
    rows = []
    for place, name in enumerate(in_order(table)):
        aside = 2.0 ** (0.14 * (place - (len(table) - 1) / 2))  # neighbouring intervals would overlap
        for n in sizes(table[name]):
            cell = table[name][n]
            if cell["auroc"] is not None:
                rows.append({
                    "variant": label(name), "x": int(n) * aside, "items": int(n), "y": cell["auroc"],
                    "low": cell["low"], "high": cell["high"],
                    "wrong": cell["wrong"], "right": cell["right"],
                })  # fmt: skip
    floor = min([0.45, *(row["low"] - 0.05 for row in rows)])
    tips = charts.tooltip(
        variant="signal",
        items="items|,",
        y="AUROC|.3f",
        low="95% from|.3f",
        high="to|.3f",
        wrong="wrong|,",
        right="correct|,",
    )
    plot = charts.Plot(
        charts.size_axis(known, "number of items n"), charts.axis("y", "AUROC", (max(0.0, floor), 1.01)), styles, tips
    )
    panel = charts.panel("", *charts.rule("y", 0.5, "chance"), *plot.all(rows), height=300)
    return charts.figure(panel, columns=1, names=list(styles))


def _method(tables: Tables) -> list[str]:
    setting = _setting(tables)
    trained = (
        f" Training uses sets of {' to '.join(map(count, setting['train_sizes']))} items."
        if setting.get("train_sizes")
        else ""
    )
    tested = (
        f" Testing uses {setting['samples']} sets per size and model: "
        f"{joined([count(n) for n in setting.get('sizes') or []])} items."
        if setting.get("samples")
        else ""
    )
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
        variants.append(
            (label(name), " ".join([_RULES.get(name, ""), "; ".join(capital(rule) for rule in rules)]).strip())
        )
    recipes = [
        (
            capital(recipe_name(recipe)),
            f"{str(about['describe']).rstrip('. ')}; {plural(about['steps'], 'step')}, "
            f"{plural(len(about['seeds']), 'seed')}",
        )
        for recipe, about in (setting.get("recipes") or {}).items()
    ]
    left = [
        (f"Left out of {recipe_name(recipe)}", "; ".join(f"{what}: {why}" for what, why in known.items()))
        for recipe, known in (setting.get("left_out") or {}).items() if known
    ]  # fmt: skip
    return [(title, rows) for title, rows in (("Variants", variants), ("Recipes", [*recipes, *left])) if rows]
