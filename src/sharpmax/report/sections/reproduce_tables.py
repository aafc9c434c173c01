"""Facts and tables of `sharpmax reproduce`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpmax.policies.polynomial import PAPER
from sharpmax.report.section import NOTHING, Cell, Grid
from sharpmax.report.tables import Tables, check_name, sizes, spread_over
from sharpmax.report.theme import (
    BLACK,
    BLUE,
    CIRCLE,
    DIAMOND,
    DOWN,
    GREEN,
    ORANGE,
    PURPLE,
    SOFT,
    SQUARE,
    STAR,
    UP,
    VERMILLION,
    Look,
)
from sharpmax.report.words import SUPERSCRIPTS, capital, count, estimate, nats, points, probability, share

# Lines that meet stay visible: what tends to lie underneath is wide, what lies on top of it is thin.
_ARMS = {
    "softmax": Look(
        "plain softmax",
        BLACK,
        CIRCLE,
        "plain softmax",
        "The model as it was trained, with β = 1 everywhere.",
        width=1.5,
        size=4.5,
        layer=4.0,
    ),
    "paper": Look(
        "paper's polynomial",
        VERMILLION,
        SQUARE,
        "the paper's polynomial",
        "β is a polynomial of the row's entropy, with the coefficients the paper prints.",
        size=6.0,
    ),
    "refit": Look(
        "refitted polynomial",
        PURPLE,
        DOWN,
        "the refitted polynomial",
        "A polynomial of the same kind, with coefficients fitted to inputs that these very models rank wrongly.",
    ),
    "log-length": Look(
        "log-length",
        BLUE,
        UP,
        "the log-length law",
        "β grows with ln n, the logarithm of the number of items.",
    ),
    "entropy-target": Look(
        "entropy target",
        GREEN,
        DIAMOND,
        "the entropy target",
        "β is solved for each row so that its entropy stays where it was during training.",
        layer=3.0,
    ),
    "hard": Look(
        "hard argmax",
        ORANGE,
        STAR,
        "hard argmax",
        "All weight on the item with the largest logit, the limit β → ∞; other arms can pass it slightly.",
        width=4.5,
        size=11.0,
        layer=1.0,
    ),
}

_SIGNALS = {
    "confidence": Look(
        "classifier's confidence", BLUE, CIRCLE, "the classifier's confidence", "Largest class probability."
    ),
    "entropy": Look(
        "attention entropy", VERMILLION, SQUARE, "the entropy of attention", "Entropy of the attention row."
    ),
    "both": Look(
        "both together",
        GREEN,
        DIAMOND,
        "both together",
        "Logistic regression on confidence and entropy, fitted on other items.",
    ),
}

PUBLISHED = Look("published in the paper", SOFT, CIRCLE)
BOUND = Look("theory's bound for plain softmax", SOFT, width=1.3, layer=1.5)
LARGE_N = Look("theory's limit for large n", SOFT, width=1.6, layer=1.5)
BEST = Look("best β of a wrongly ranked input", SOFT, CIRCLE, size=3.0, layer=1.0)


def look(arm: str) -> Look:
    """How an arm looks; one nobody has heard of is grey and goes by its own name."""
    return _ARMS.get(arm) or Look(arm, SOFT, CIRCLE, arm)


def signal(name: str) -> Look:
    """How a signal of failure detection looks."""
    return _SIGNALS.get(name) or Look(name, SOFT, CIRCLE, name)


def in_order(names: Iterable[str]) -> list[str]:
    """Arms or signals in the order in which they are always shown; unknown ones last, by name.

    >>> in_order(["mine", "hard", "softmax"])
    ['softmax', 'hard', 'mine']
    """
    known = [*_ARMS, *_SIGNALS]
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


REFERENCE = "paper"
"""The recipe whose tables have plain names."""

_OF_A_RECIPE = ("accuracy", "comparison", "entropy", "top_weight", "bounds", "fit", "heat", "detection")


def key(name: str, recipe: str) -> str:
    """The name under which a recipe's table is saved.

    >>> key("accuracy", "paper"), key("accuracy", "sharp")
    ('accuracy', 'accuracy/sharp')
    """
    return name if recipe == REFERENCE else f"{name}/{recipe}"


def part(tables: Tables, name: str, recipe: str) -> Any:
    """A recipe's table, or None if the run does not hold it."""
    return tables.get(key(name, recipe))


def row(tables: Tables, name: str, recipe: str, arm: str) -> Any:
    """An arm's cells in a recipe's table, or None if the run does not hold them."""
    return (part(tables, name, recipe) or {}).get(arm)


def recipes(tables: Tables) -> list[str]:
    """The recipes these tables hold something of, the reference first."""
    found: dict[str, None] = {}
    for table in tables:
        name, _, recipe = table.partition("/")
        if name in _OF_A_RECIPE:
            found[recipe or REFERENCE] = None
    for recipe in found:
        check_name(recipe, "recipe")
    return sorted(found, key=lambda recipe: recipe != REFERENCE)


def recipe_name(recipe: str) -> str:
    """A recipe in a sentence.

    >>> recipe_name("paper"), recipe_name("sharp")
    ("the paper's recipe", 'the sharp recipe')
    """
    return "the paper's recipe" if recipe == REFERENCE else f"the {recipe} recipe"


def describe(tables: Tables, recipe: str) -> str:
    """The line in which the run describes a recipe, or nothing."""
    setting = tables.get("setting", {}).get("recipes", {}).get(recipe, {})
    return str(setting.get("describe", "")).rstrip(". ")


def over_seeds(tables: Tables, recipe: str) -> str:
    """What a number and its error are, or nothing if the run does not say."""
    seeds = len(tables.get("setting", {}).get("recipes", {}).get(recipe, {}).get("seeds", []))
    return "" if not seeds else "a single seed" if seeds == 1 else f"mean of {seeds} seeds ± standard error"


def crossing(cells: Mapping[str, Any], level: float) -> float | None:
    """The size at which a rising line of means passes `level`, straight between points on the log axis."""
    for a, b in itertools.pairwise(sizes(cells)):
        low, high = cells[a]["mean"], cells[b]["mean"]
        if low <= level < high:
            share = (level - low) / (high - low)
            return math.exp(math.log(int(a)) + share * math.log(int(b) / int(a)))
    return None


LEVEL = 0.05
"""A difference counts as shown when its p value is below this."""

_CLEAR_WITHOUT_ERRORS = 1.0


@dataclass(frozen=True)
class Change:
    """A row of means at its smallest and its largest size."""

    small: str
    large: str
    first: float
    last: float
    clear: bool
    """Whether the difference is more than twice its standard error."""

    @property
    def falls(self) -> bool:
        """Whether it clearly goes down."""
        return self.clear and self.last < self.first

    @property
    def rises(self) -> bool:
        """Whether it clearly goes up."""
        return self.clear and self.last > self.first


def change(cells: Mapping[str, Any] | None) -> Change | None:
    """The change of a row of cells with size, or None where there is nothing to compare."""
    ends = spread_over(cells) if cells else None
    if not cells or ends is None:
        return None
    one, other = cells[ends[0]], cells[ends[1]]
    errors = [one["sem"], other["sem"]]
    # One seed says nothing about chance; a whole percent (or nat) is what one would remark on.
    doubt = _CLEAR_WITHOUT_ERRORS if None in errors else 2.0 * math.hypot(*errors)
    return Change(*ends, one["mean"], other["mean"], abs(other["mean"] - one["mean"]) > doubt)


def trust(cells: Mapping[str, Any]) -> Change | None:
    """How a signal's AUROC changes from the smallest to the largest size that has wrong answers."""
    known = [n for n in sizes(cells) if cells[n]["auroc"] is not None]
    if len(known) < 2:
        return None
    small, large = known[0], known[-1]
    one, other = cells[small], cells[large]
    apart = other["high"] < one["low"] or one["high"] < other["low"]
    return Change(small, large, one["auroc"], other["auroc"], apart)


def horizon(bounds: Mapping[str, Any]) -> float:
    """The sharpness horizon as its logarithm to base 10: wide spreads put it beyond all numbers a float can hold."""
    return float(bounds["horizon_log10"]["mean"])


@dataclass(frozen=True)
class Verdict:
    """How an arm compares with plain softmax: sizes by outcome, and its gains in points."""

    arm: str
    gains: Mapping[str, float]
    p: Mapping[str, float | None]
    of_ceiling: Mapping[str, float]
    better: tuple[str, ...]
    worse: tuple[str, ...]
    tested: bool
    """False if no size has a p value although there are differences, as with a single seed."""

    @property
    def best(self) -> str:
        """The size of the largest gain, among those where a gain is shown if there are any."""
        return max(self.better or self.gains, key=self.gains.__getitem__)

    @property
    def worst(self) -> str:
        """The size of the largest loss, among those where a loss is shown if there are any."""
        return min(self.worse or self.gains, key=self.gains.__getitem__)


def verdict(tables: Tables, recipe: str, arm: str) -> Verdict | None:
    """What the comparison of an arm with plain softmax shows, or None if the run did not make it."""
    cells = row(tables, "comparison", recipe, arm)
    if not cells:
        return None
    known = sizes(cells)
    gains, p = {n: cells[n]["gain"] for n in known}, {n: cells[n]["p"] for n in known}
    shown = [n for n in known if p[n] is not None and p[n] < LEVEL]
    return Verdict(
        arm,
        gains,
        p,
        {n: cells[n]["of_ceiling"] for n in known if cells[n].get("of_ceiling") is not None},
        better=tuple(n for n in shown if gains[n] > 0),
        worse=tuple(n for n in shown if gains[n] < 0),
        tested=any(value is not None for value in p.values()) or not any(gains.values()),
    )


def headline(tables: Tables, recipe: str) -> Verdict | None:
    """The arm to speak of first: the entropy target, or else the one with the largest gain; never hard argmax."""
    arms = [arm for arm in in_order(part(tables, "comparison", recipe) or {}) if arm != "hard"]
    verdicts = [found for arm in arms if (found := verdict(tables, recipe, arm))]
    for found in verdicts:
        if found.arm == "entropy-target":
            return found
    return max(verdicts, key=lambda found: (len(found.better) > 0, found.gains[found.best]), default=None)


def grids(tables: Tables, recipe: str) -> list[Grid]:
    """Every table of a recipe that the run holds."""
    makers = (_accuracy, _gain, _of_hard, _top_weight, _entropy, _detection, _coefficients)
    return [found for make in makers if (found := make(tables, recipe))]


def end_grid(tables: Tables, recipe: str) -> Grid | None:
    """Size by size: the mean entropy of plain softmax, the paper's β there, and what it gains."""
    entropy = row(tables, "entropy", recipe, "softmax")
    if not entropy:
        return None
    paper = row(tables, "comparison", recipe, "paper") or {}
    fix = headline(tables, recipe)
    others = [fix] if fix and fix.arm != "paper" else []
    head = ["items n", "entropy of plain softmax (nats)", "paper's β at that entropy", "gain of the paper's polynomial"]
    rows = []
    for n in sizes(entropy):
        mean = entropy[n]["mean"]
        beta = float(PAPER.value_at(mean))
        rows.append(
            [
                Cell(count(n)),
                Cell(nats(mean)),
                Cell(f"{beta:.2f}", "acts" if beta > 1.0 else "does nothing", strong=beta > 1.0),
                Cell(points(paper[n]["gain"]) if n in paper else NOTHING),
                *(Cell(points(other.gains[n]) if n in other.gains else NOTHING) for other in others),
            ]
        )
    head += [f"gain of {look(other.arm).subject}" for other in others]
    return Grid(
        "The paper's polynomial, size by size",
        "Mean entropies; single rows lie above and below them. Gains in percentage points over plain softmax.",
        [Cell(text) for text in head],
        rows,
    )


def _by_size(
    table: Mapping[str, Any], known: Sequence[str], names: Callable[[str], str], words: Callable[[Any], Cell]
) -> tuple[list[Cell], list[list[Cell]]]:
    columns = in_order(table)
    rows = [
        [Cell(count(n)), *(words(table[name][n]) if n in table[name] else Cell(NOTHING) for name in columns)]
        for n in known
    ]
    return [Cell("items n"), *(Cell(names(name)) for name in columns)], rows


def _estimates(form: Callable[[float], str]) -> Callable[[Any], Cell]:
    def words(cell: Mapping[str, Any]) -> Cell:
        return Cell(estimate(form(cell["mean"]), cell["sem"]))

    return words


def _sentences(*parts: str) -> str:
    return " ".join(f"{capital(part)}." for part in parts if part)


def _arm_label(arm: str) -> str:
    return look(arm).label


def _add_column(head: list[Cell], rows: list[list[Cell]], place: int, title: str, values: Sequence[str]) -> None:
    head.insert(place, Cell(title, faint=True))
    for line, value in zip(rows, values, strict=True):
        line.insert(place, Cell(value, faint=True))


def _accuracy(tables: Tables, recipe: str) -> Grid | None:
    table = part(tables, "accuracy", recipe)
    if not table:
        return None
    known = sizes(*table.values())
    head, rows = _by_size(table, known, _arm_label, _estimates(share))
    note = _sentences("percent of sets answered correctly", over_seeds(tables, recipe))
    # The paper's numbers belong beside ours where both come from the same way of training.
    published = tables.get("published", {}) if recipe == REFERENCE else {}
    for arm in [arm for arm in in_order(table) if arm in published]:
        place = 1 + [cell.text for cell in head].index(_arm_label(arm))
        values = [share(published[arm][n]) if n in published[arm] else NOTHING for n in known]
        _add_column(head, rows, place, "published", values)
    if published:
        note += " “Published” is what the paper prints for the arm to the left."
    return Grid("Accuracy (%)", note, head, rows)


def _gain(tables: Tables, recipe: str) -> Grid | None:
    table = part(tables, "comparison", recipe)
    if not table:
        return None

    def words(cell: Mapping[str, Any]) -> Cell:
        p = cell["p"]
        return Cell(
            points(cell["gain"]), "no test" if p is None else probability(p), strong=p is not None and p < LEVEL
        )

    return Grid(
        "Gain over plain softmax (percentage points)",
        "The same models on the same sets. p: two-sided paired t-test across seeds, not corrected for the number of "
        f"comparisons; bold where p < {LEVEL}. “No test”: a single seed, or no difference at all.",
        *_by_size(table, sizes(*table.values()), _arm_label, words),
    )


def _of_hard(tables: Tables, recipe: str) -> Grid | None:
    table = part(tables, "comparison", recipe) or {}
    shown = {
        arm: {n: cell for n, cell in cells.items() if cell.get("of_ceiling") is not None}
        for arm, cells in table.items()
        if arm != "hard"
    }
    if not any(shown.values()):
        return None
    return Grid(
        "Share of hard argmax (%)",
        "Accuracy as a percentage of what hard argmax reaches with the same models; above 100 where an arm passes it.",
        *_by_size(shown, sizes(*shown.values()), _arm_label, lambda cell: Cell(share(cell["of_ceiling"]))),
    )


def _entropy(tables: Tables, recipe: str) -> Grid | None:
    bounds = (("least_entropy", "theory: at least"), ("most_entropy", "ln n"))
    note = _sentences(over_seeds(tables, recipe), "theory's bounds hold for plain softmax")
    return _measured(tables, recipe, "entropy", "Entropy of the attention row (nats)", note, nats, bounds)


def _top_weight(tables: Tables, recipe: str) -> Grid | None:
    note = _sentences(over_seeds(tables, recipe), "theory's bound holds for plain softmax")
    bounds = (("largest_weight", "theory: at most"),)
    return _measured(tables, recipe, "top_weight", "Weight of the heaviest item (%)", note, share, bounds)


def _measured(
    tables: Tables,
    recipe: str,
    name: str,
    title: str,
    note: str,
    form: Callable[[float], str],
    bounds: Sequence[tuple[str, str]],
) -> Grid | None:
    table, theory = part(tables, name, recipe), part(tables, "bounds", recipe) or {}
    if not table:
        return None
    known = sizes(*table.values())
    head, rows = _by_size(table, known, _arm_label, _estimates(form))
    for key, label in bounds:
        if key in theory:
            values = [form(theory[key][n]) if n in theory[key] else NOTHING for n in known]
            _add_column(head, rows, len(head), label, values)
    return Grid(title, note, head, rows)


def _detection(tables: Tables, recipe: str) -> Grid | None:
    table = part(tables, "detection", recipe)
    if not table:
        return None
    names, first = in_order(table), table[in_order(table)[0]]
    rows = []
    for n in [*sizes(*table.values()), *(["pooled"] if "pooled" in first else [])]:
        cells = [table[name].get(n) for name in names]
        known = next((cell for cell in cells if cell), None)
        numbers = [count(known["wrong"]), count(known["right"])] if known else [NOTHING, NOTHING]
        rows.append(
            [
                Cell("all sizes" if n == "pooled" else count(n), strong=n == "pooled"),
                *(_auroc(cell) for cell in cells),
                *(Cell(number, faint=True) for number in numbers),
            ]
        )
    return Grid(
        "Telling wrong answers from right ones (AUROC)",
        "Answers of plain softmax; in brackets 95% bootstrap intervals. 0.5 is chance, 1 is certainty.",
        [
            Cell("items n"),
            *(Cell(signal(name).label) for name in names),
            Cell("wrong answers", faint=True),
            Cell("right answers", faint=True),
        ],
        rows,
    )


def _auroc(cell: Mapping[str, Any] | None) -> Cell:
    if not cell or cell["auroc"] is None:
        return Cell(NOTHING)
    return Cell(f"{cell['auroc']:.3f}", f"{cell['low']:.3f} to {cell['high']:.3f}")


def _coefficients(tables: Tables, recipe: str) -> Grid | None:
    table = part(tables, "fit", recipe)
    if not table:
        return None
    degree = max(len(table["coefficients"]), len(PAPER.coefficients)) - 1
    powers = [f"H{SUPERSCRIPTS[power]}" if power > 1 else "H" if power else "1" for power in range(degree, -1, -1)]

    def line(name: str, coefficients: Sequence[float], acts: Sequence[float | None] | None, r2: str) -> list[Cell]:
        padded = [0.0] * (degree + 1 - len(coefficients)) + list(coefficients)
        return [Cell(name), *(Cell(f"{c:.4g}".replace("-", "−")) for c in padded), Cell(_span(acts)), Cell(r2)]

    return Grid(
        "Coefficients of the polynomials",
        f"β = max(1, polynomial of H) where the entropy H exceeds a threshold ({table['threshold']:g} nats for the "
        f"refit), else 1. The refit uses {count(table['wrong'])} wrongly ranked inputs of {count(table['inputs'])}, "
        f"with entropies of {nats(table['fitted_on'][0])} to {nats(table['fitted_on'][1])} nats; "
        f"{count(table['dropped'])} more have no best β that could be used.",
        [Cell("polynomial"), *map(Cell, powers), Cell("acts on (nats)"), Cell("R²")],
        [
            line(_arm_label("refit"), table["coefficients"], table["acts_on"], f"{table['r2']:.2f}"),
            line(_arm_label("paper"), PAPER.coefficients, table["paper_acts_on"], NOTHING),
        ],
    )


def _span(span: Sequence[float | None] | None) -> str:
    if not span or span[0] is None:
        return "never"
    return f"{nats(span[0])} to " + ("∞" if span[1] is None else nats(span[1]))
