"""The full tables of a run, as they stand on the page: headings, notes and cells of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharpmax.policies.polynomial import PAPER
from sharpmax.report.grid import NOTHING, Cell, Grid
from sharpmax.report.reproduce.facts import LEVEL, headline
from sharpmax.report.reproduce.looks import in_order, look, signal
from sharpmax.report.reproduce.tables import REFERENCE, over_seeds, part, row
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.words import SUPERSCRIPTS, capital, count, estimate, nats, points, probability, share

__all__ = ["end_grid", "grids"]


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
