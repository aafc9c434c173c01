"""The page of `sharpmax compare`: softmax and its alternatives by size, and models by capacity (`--capacity`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sharpmax.report import charts
from sharpmax.report.tables import (
    NOTHING,
    Cell,
    Figure,
    Metric,
    Part,
    Report,
    Table,
    Tables,
    interval,
    mean_cell,
    table_of,
)
from sharpmax.report.words import Pairs, capital, count, joined, percent, plural, points, share, span

_COLOURED = 6
"""The number of coloured methods; the others are grey."""

_LEARNED = 90.0
"""Accuracy in percent at the smallest size below which a method has not learned the task."""

FACTORS = ("width", "heads", "depth")
MEASURES = {"half_accuracy_size": "accuracy halves", "half_top_weight_size": "the top weight falls below ½"}
"""The limits of a model, by the key of the size where they are reached; rules have the same order."""


def report(tables: Tables) -> Report:
    """The page's contents."""
    parts: list[Part] = []
    definitions: list[tuple[str, Pairs]] = []
    setting = tables["setting"]
    low, high = setting["train_sizes"]
    caption = (
        f"{setting['task']}, trained at {low} to {high} {setting['unit']}; {plural(len(setting['seeds']), 'seed')}, "
        f"{plural(setting['samples'], 'example')} per size and seed"
    )
    if "leaderboard" in tables:
        grey = " Grey: other methods; click one in the legend." if len(tables["leaderboard"]) > _COLOURED else ""
        words = f"{setting['model']} on {caption}. Bars: 95% intervals.{grey} Dotted: the largest size in training."
        figure = Figure("accuracy", "Accuracy by size", words, partial(_accuracy_chart, tables))
        grids = [_leaderboard_table(tables), _attention_table(tables)]
        parts.append(Part("leaderboard", "Leaderboard", _metrics(tables), [figure], grids))
        definitions.append(("Methods", _definitions(tables)))
    for place, (method, models) in enumerate(tables.get("capacity", {}).items(), start=1):
        words = f"{plural(len(models), 'encoder')} on {caption}. Hollow: outside the sizes tested."
        title, chart = f"{method}: size at which accuracy halves", partial(_capacity_chart, tables, models)
        figure, grid = Figure(f"capacity-{place}-accuracy", title, words, chart), _rules_table(tables, method)
        metrics = []
        for measure, what in MEASURES.items():
            inside = sorted(model[measure] for model in models if isinstance(model[measure], float))
            label = f"{setting['unit']} at which {what} ({method}, {len(inside)} of {plural(len(models), 'model')})"
            metrics.append(Metric(span(inside) if inside else NOTHING, label, f"{span(setting['sizes'])} tested"))
        parts.append(Part(f"capacity-{place}", f"Capacity: {method}", metrics, [figure], [grid]))
    return Report("compare", parts, list(_notes(tables)), definitions)


def _notes(tables: Tables) -> Iterator[str]:
    """Limits of the conclusions: one seed, tasks not learned, models outside the sizes tested."""
    setting = tables["setting"]
    if len(setting["seeds"]) == 1:
        yield "One seed: there are no intervals and no tests; ranks are by the mean alone."
    smallest = setting["sizes"][0]
    accuracy = {name: tables["accuracy"][name][str(smallest)]["mean"] for name in tables.get("leaderboard", ())}
    if weak := [f"{name} ({percent(value)})" for name, value in accuracy.items() if value < _LEARNED]:
        yield f"Below {_LEARNED:.0f}% at {count(smallest)} {setting['unit']}, so not learned: {joined(weak)}."
    for method in tables.get("capacity", ()):
        if beyond := tables["rules"][method]["accuracy"]["beyond"]:
            where = f"up to {count(setting['sizes'][-1])}: the rule excludes them, its exponents tend to be too small"
            yield f"{method}: accuracy of {plural(beyond, 'model')} does not halve {where}."


# The leaderboard: methods, the best first.


def _mean(tables: Tables, table: str, method: str) -> Any:
    """A mean at the largest size."""
    return tables[table][method][str(tables["setting"]["sizes"][-1])]["mean"]


def _rank(tables: Tables, method: str) -> str:
    """The rank of a method, with = where it is shared."""
    ranks = [place["rank"] for place in tables["leaderboard"].values()]
    rank = tables["leaderboard"][method]["rank"]
    return f"{rank}=" if ranks.count(rank) > 1 else str(rank)


def _lost(tables: Tables, method: str) -> list[str] | None:
    """Points lost at the largest size to dispersion and to wrong ranking; None without argmax accuracy.

    The first is negative if a method is better than its argmax.
    """
    argmax = _mean(tables, "hard", method)
    if argmax is None:
        return None
    return [points(lost).lstrip("+") for lost in (argmax - _mean(tables, "accuracy", method), 100.0 - argmax)]


def _metrics(tables: Tables) -> list[Metric]:
    """Accuracy of the best method and of softmax, and why softmax loses points."""
    known, size = list(tables["leaderboard"]), tables["setting"]["sizes"][-1]
    other = "softmax" if "softmax" in known[1:] else known[-1]
    found = []
    for name in dict.fromkeys((known[0], other)):
        between = interval(tables["accuracy"][name][str(size)]) or "one seed"
        label = f"accuracy of {name} at {count(size)} {tables['setting']['unit']}"
        detail = f"95%: {between}; rank {_rank(tables, name)}"
        found.append(Metric(percent(_mean(tables, "accuracy", name)), label, detail))
    if lost := _lost(tables, other):
        detail = "dispersion: ranked first, but with too little weight"
        found.append(Metric(f"{lost[0]} points to dispersion, {lost[1]} to wrong ranking", f"{other} loses", detail))
    return found


def _leaderboard_table(tables: Tables) -> Table:
    """One row per method: rank, accuracy by size, points lost, and training."""
    setting = tables["setting"]
    sizes, scored = setting["sizes"], span(setting["scored_sizes"])
    step = max(1, (len(sizes) - 1) // 4)
    shown = list(
        dict.fromkeys([sizes[0], *sizes[::-step][:4][::-1]])
    )  # the smallest, and the largest with three before it in even steps
    rows = []
    for method, place in tables["leaderboard"].items():
        training, rank = tables["training"][method], _rank(tables, method)
        memory = "" if training["memory"] is None else f"{training['memory'] / 1e6:,.0f} MB"
        rows.append([
            Cell(method, f"{len(training['diverged'])} diverged" if training["diverged"] else ""),
            Cell(rank, strong=rank.rstrip("=") == "1"), mean_cell(place["score"]),
            *(mean_cell(tables["accuracy"][method][str(n)]) for n in shown),
            *(_lost(tables, method) or (None, None)), Cell(f"{training['seconds']:,.0f} s", memory),
        ])  # fmt: skip
    return table_of(
        f"Accuracy (%) of {setting['model']} on {setting['task']}",
        f"Ranked by the mean at {scored} {setting['unit']}; =: no significant difference in a paired t-test over seeds "
        f"(p < {setting['level']:g}). Small: 95% interval. Lost at {count(sizes[-1])} {setting['unit']}: to dispersion "
        "where argmax is correct, else to wrong ranking. Diverged seeds count as wrong.",
        ["method", "rank", f"mean|at {scored}", *map(count, shown), "dispersion|points lost",
         "wrong ranking|points lost", "training"],
        rows,
    )  # fmt: skip


_MEASURED = {
    "accuracy": "accuracy|%", "hard": "argmax accuracy|%", "ranking": "correct item ranked first|%",
    "close": "ranked first in near-ties|%", "top_weight": "top weight|%", "entropy": "entropy|nats",
}  # fmt: skip


def _attention_table(tables: Tables) -> Table:
    rows: list[list[str | None]] = []
    for method in tables["leaderboard"]:
        rows.append([method])
        for table in _MEASURED:
            value = _mean(tables, table, method)
            rows[-1].append(None if value is None else f"{value:.2f}" if table == "entropy" else share(value))
    return table_of(
        f"Attention at {count(tables['setting']['sizes'][-1])} {tables['setting']['unit']}",
        "Argmax: only the largest weight counts. Near-ties: the half of the examples whose best two items are closest. "
        "Top weight and entropy: means over the rows of the last layer.",
        ["method", *_MEASURED.values()],
        rows,
    )


def _accuracy_chart(tables: Tables) -> Any:
    setting = tables["setting"]
    sizes, end = setting["sizes"], setting["train_sizes"][1]
    order = sorted(tables["leaderboard"], key="softmax".__ne__)
    styles = charts.styles_of(order[:_COLOURED])
    styles |= dict.fromkeys(order[_COLOURED:], charts.Style(charts.PALE, charts.LINE))
    trained = [charts.rule("x", end)] if len(sizes) > 1 and sizes[0] <= end <= sizes[-1] else []
    rows, y = {method: tables["accuracy"][method] for method in styles}, charts.percent_axis("accuracy (%)")
    panel = charts.by_size("", rows, f"number of {setting['unit']} n", y, styles, under=trained, height=360)
    return charts.figure(panel, names=list(styles))


def _definitions(tables: Tables) -> Pairs:
    found = []
    for name in tables["leaderboard"]:
        one = tables["methods"][name]
        given = {f"{key} = {value}": None for what in ("options", "recipe", "data") for key, value in one[what].items()}
        at_test = [f"at test: {one['at_test']['normaliser']}"] if one["at_test"] is not None else []
        parameters = f"{tables['training'][name]['parameters']:,} parameters"
        found.append((name, "; ".join([one["summary"] or one["normaliser"], *given, *at_test, parameters])))
    return found


# Capacity: models of several widths, heads and depths.


def _rules_table(tables: Tables, method: str) -> Table:
    rows: list[list[Any]] = []
    for what, rule in zip(MEASURES.values(), tables["rules"][method].values(), strict=True):
        rows.append([capital(what), None if rule["constant"] is None else f"{rule['constant']:,.3g}"])
        for name in FACTORS:
            one = (rule["exponents"] or {}).get(name)
            cell = None if one is None else Cell(points(one["mean"], 2))
            if one is not None and one["low"] is not None:
                between = f"{points(one['low'], 2)} to {points(one['high'], 2)}"
                cell = Cell(points(one["mean"], 2), between, strong=not one["low"] <= 0.0 <= one["high"])
            rows[-1].append(cell)
        r2 = None if rule["r2"] is None else f"{rule['r2']:.2f}"
        rows[-1] += [r2, f"{rule['used']} of {rule['models']}", str(rule["beyond"])]
    return table_of(
        f"Fitted rules of {method}: size ≈ constant · width^a · heads^b · depth^c",
        "Least squares of the logarithms; 95% intervals from bootstrapping seeds. Bold: the interval excludes zero.",
        ["limit", "constant", *(f"exponent of {name}" for name in FACTORS), "R²", "models|in the fit",
         "models|beyond the sizes"],
        rows,
    )  # fmt: skip


def _capacity_chart(tables: Tables, models: Any) -> Any:
    known = tables["setting"]["sizes"]
    across, line, group = sorted(FACTORS, key=lambda name: len({model[name] for model in models}) == 1)
    styles = charts.styles_of([_factor(line, value) for value in sorted({model[line] for model in models})])
    edges = {"beyond": known[-1] * 1.3, "never above": known[0] / 1.3}  # just outside the sizes tested
    x = charts.size_axis(sorted({model[across] for model in models}), across)
    y = charts.size_axis(known, f"size ({tables['setting']['unit']})", list(edges.values()), "y")
    panels = []
    for value in sorted({model[group] for model in models}):
        inside, outside = [], []
        for model in (one for one in models if one[group] == value):
            size, row = model["half_accuracy_size"], {"variant": _factor(line, model[line]), "x": model[across]}
            if isinstance(size, float):
                inside.append(row | {"y": size})
            elif size in edges:
                outside.append(row | {"y": edges[size]})
        panels.append(charts.lines_panel(_factor(group, value), inside, x, y, styles, hollow=outside, height=240))
    return charts.figure(*panels, columns=3, minimum=250, names=list(styles))


def _factor(name: str, value: int) -> str:
    return plural(value, "head") if name == "heads" else f"{name} {value}"
