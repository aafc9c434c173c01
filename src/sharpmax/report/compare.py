"""The page of `sharpmax compare`: softmax and its alternatives by size, and models by capacity (`--capacity`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

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
    header,
    interval,
    mean_cell,
)
from sharpmax.report.words import Pairs, capital, count, joined, nats, percent, plural, points, share, span

_HIGHLIGHTED, _ALL = 5, 6
"""So many methods are coloured among many; up to so many all are."""

_COLUMNS = 5
"""Sizes that have a column in tables."""

_LEARNED = 90.0
"""Accuracy in percent at the smallest size below which a method has not learned the task."""

FACTORS = ("width", "heads", "depth")
MEASURES = {
    "accuracy": ("half_accuracy_size", "accuracy halves"),
    "top": ("half_top_weight_size", "the top weight falls below ½"),
}
"""The two limits of a model: the key of the size at which it is reached, and what happens there."""

_EDGE = 2.0**0.5
"""Models whose limit is outside the sizes tested are drawn this factor beyond them."""


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax compare`."""
    return "league" in tables or ("capacity" in tables and "laws" in tables)


def report(tables: Tables) -> Report:
    """The page's contents."""
    parts: list[Part] = []
    if "league" in tables:
        shown, details = [leaderboard_table(tables)], [_causes_table(tables)]
        parts.append(Part("leaderboard", "Leaderboard", _metrics(tables), _figures(tables), shown, details))
    for place, method in enumerate(tables.get("capacity", ()), start=1):
        name, figures = f"capacity-{place}", list(_capacity_figures(tables, method, f"capacity-{place}"))
        shown, details = [_rules_table(tables, method)], [_models_table(tables, method)]
        parts.append(Part(name, f"Capacity: {method}", _capacity_metrics(tables, method), figures, shown, details))
    definitions = [("Methods", _definitions(tables))] if "league" in tables else []
    about = {"setting": tables["setting"], "ranked": "league" in tables, "capacity": "capacity" in tables}
    return Report("compare", headline(tables), parts, list(notes(tables)), definitions=definitions, about=about)


def headline(tables: Tables) -> list[str]:
    """The answer in numbers: accuracy of the best method and of softmax, or where accuracy halves."""
    if "league" not in tables:
        return [_capacity_headline(tables, method) for method in tables["capacity"]]
    first, *rest = methods(tables)
    other = "softmax" if "softmax" in rest else rest[0] if rest else None
    shown = ", ".join(f"{one} {percent(_mean(tables, 'accuracy', one))}" for one in (first, other) if one)
    found = [f"Accuracy at {_largest(tables)}: {shown}."]
    subject = "softmax" if "softmax" in rest else first
    if (lost := _lost(tables, subject)) is not None:
        dispersion, ranking = map(_lost_words, lost)
        found.append(f"{subject} loses {dispersion} points to dispersion, {ranking} to wrong ranking.")
    return found


def notes(tables: Tables) -> Iterator[str]:
    """What limits the conclusions: one seed, divergence, tasks not learned, models outside the sizes tested."""
    setting = tables["setting"]
    if len(setting["seeds"]) == 1:
        yield "One seed: there are no intervals and no tests; ranks are by the mean alone."
    if "league" in tables:
        gone = {name: tables["training"][name]["diverged"] for name in methods(tables)}
        if diverged := [f"{name} (seed {', '.join(map(str, seeds))})" for name, seeds in gone.items() if seeds]:
            yield f"Diverged, counted as wrong: {joined(diverged)}."
        smallest = str(setting["sizes"][0])
        accuracy = {name: _mean(tables, "accuracy", name, smallest) for name in methods(tables)}
        if weak := [f"{name} ({percent(value)})" for name, value in accuracy.items() if value < _LEARNED]:
            yield f"Below {_LEARNED:.0f}% at {count(smallest)} {setting['unit']}, so not learned: {joined(weak)}."
    for method in tables.get("capacity", ()):
        if beyond := tables["laws"][method]["accuracy"]["beyond"]:
            where = f"up to {count(setting['sizes'][-1])}: the rule excludes them, its exponents tend to be too small"
            yield f"{method}: accuracy of {plural(beyond, 'model')} does not halve {where}."


# The leaderboard: methods, the best first.


def methods(tables: Tables) -> list[str]:
    """The methods, the best first."""
    return list(tables["league"])


def _largest(tables: Tables) -> str:
    return f"{count(tables['setting']['sizes'][-1])} {tables['setting']['unit']}"


def _some_sizes(tables: Tables) -> list[str]:
    """The smallest size, and the largest with some in even steps before it."""
    known = [str(size) for size in tables["setting"]["sizes"]]
    if len(known) <= _COLUMNS:
        return known
    step = (len(known) - 1) // (_COLUMNS - 1)
    return [known[0], *known[::-1][: step * (_COLUMNS - 1) : step][::-1]]


def _mean(tables: Tables, table: str, method: str, size: str | None = None) -> Any:
    """A mean at a size, or at the largest."""
    return tables[table][method][size or str(tables["setting"]["sizes"][-1])]["mean"]


def _measured(tables: Tables, table: str) -> bool:
    """Whether a measure has a value anywhere: not every task has near-ties."""
    return any(cell["mean"] is not None for row in tables[table].values() for cell in row.values())


def rank_of(tables: Tables, method: str) -> str:
    """The rank of a method, with = where it is shared."""
    ranks = [place["rank"] for place in tables["league"].values()]
    rank = tables["league"][method]["rank"]
    return f"{rank}=" if ranks.count(rank) > 1 else str(rank)


def _lost(tables: Tables, method: str) -> tuple[float, float] | None:
    """Points lost at the largest size to dispersion and to wrong ranking; None without argmax accuracy.

    The first is negative where spreading its weight helps a method.
    """
    argmax = _mean(tables, "hard", method)
    return None if argmax is None else (argmax - _mean(tables, "accuracy", method), 100.0 - argmax)


def _lost_words(value: float) -> str:
    return points(value).lstrip("+")


def _metrics(tables: Tables) -> list[Metric]:
    first, size = methods(tables)[0], str(tables["setting"]["sizes"][-1])
    cell, scored = tables["accuracy"][first][size], span(tables["setting"]["scored_sizes"])
    found = [Metric(percent(cell["mean"]), f"{first} at {_largest(tables)}", f"95%: {interval(cell) or 'one seed'}")]
    if "softmax" in methods(tables)[1:]:
        ahead = cell["mean"] - _mean(tables, "accuracy", "softmax")
        found.append(Metric(f"{points(ahead)} points", f"{first} over softmax", f"at {_largest(tables)}"))
    score = tables["league"][first]["score"]
    found.append(Metric(percent(score["mean"]), f"{first}, mean at {scored}", f"rank {rank_of(tables, first)}"))
    name = "softmax" if "softmax" in methods(tables) else first
    if (lost := _lost(tables, name)) is not None:
        detail = f"{_lost_words(lost[1])} to wrong ranking, at {_largest(tables)}"
        found.append(Metric(f"{_lost_words(lost[0])} points", f"{name} loses to dispersion", detail))
    return found


def leaderboard_table(tables: Tables) -> Table:
    """One row per method: rank, accuracy by size, what is lost to what, and training."""
    setting, known = tables["setting"], _some_sizes(tables)
    best = max(methods(tables), key=lambda method: _mean(tables, "accuracy", method))
    rows = []
    for method in methods(tables):
        training, rank = tables["training"][method], rank_of(tables, method)
        lost = _lost(tables, method)
        memory = "" if training["memory"] is None else f"{training['memory'] / 1e6:,.0f} MB"
        accuracy = [mean_cell(tables["accuracy"][method][n], strong=method == best and n == known[-1]) for n in known]
        rows.append([
            Cell(method, f"{len(training['diverged'])} diverged" if training["diverged"] else ""),
            Cell(rank, strong=rank.rstrip("=") == "1"), mean_cell(tables["league"][method]["score"]), *accuracy,
            *([EMPTY, EMPTY] if lost is None else [Cell(_lost_words(value)) for value in lost]),
            Cell(f"{training['seconds']:,.0f} s", memory),
        ])  # fmt: skip
    scored = span(setting["scored_sizes"])
    lost_to = "dispersion|points lost", "wrong ranking|points lost"
    return Table(
        f"Accuracy (%) of {setting['model']} on {setting['task']}",
        f"Ranked by the mean at {scored} {setting['unit']}; =: no significant difference in a paired t-test over seeds "
        f"(p < {setting['level']:g}). Small: 95% interval. Lost at {_largest(tables)}: to dispersion where argmax is "
        "correct, else to wrong ranking.",
        header("method", "rank", f"mean|at {scored}", *map(count, known), *lost_to, "training"),
        rows,
    )


_KINDS = {
    "accuracy": ("accuracy", charts.Style(charts.BLACK, "circle")),
    "hard": ("argmax accuracy", charts.Style(charts.VERMILLION, "triangle-up")),
    "ranking": ("correct item ranked first", charts.Style(charts.BLUE, "square", (6, 3))),
    "close": ("ranked first in near-ties", charts.Style(charts.GREEN, "diamond", (2, 2))),
}


def _causes_table(tables: Tables) -> Table:
    words = {table: f"{name}|%" for table, (name, _) in _KINDS.items() if _measured(tables, table)}
    words |= {"top_weight": "top weight|%", "entropy": "entropy|nats"}
    rows = []
    for method in methods(tables):
        values = [(_mean(tables, table, method), nats if table == "entropy" else share) for table in words]
        rows.append([Cell(method), *(cell_of(value, form) for value, form in values)])
    return Table(
        f"Attention at {_largest(tables)}",
        "Argmax: only the largest weight counts. Near-ties: the half of the examples whose best two items are closest. "
        "Top weight and entropy: means over the rows of the last layer.",
        header("method", *words.values()),
        rows,
    )


def _styles(tables: Tables) -> dict[str, charts.Style]:
    """Softmax and the best others in colour, the rest grey."""
    known = methods(tables)
    order = list(dict.fromkeys([*(["softmax"] if "softmax" in known else []), *known]))
    coloured = len(known) if len(known) <= _ALL else _HIGHLIGHTED
    grey = charts.Style(charts.PALE, charts.LINE)
    return {name: charts.style_at(place) if place < coloured else grey for place, name in enumerate(order)}


def _figures(tables: Tables) -> list[Figure]:
    grey = " Grey: other methods; click one in the legend." if len(methods(tables)) > _ALL else ""
    words = {
        "accuracy": ("Accuracy by size", f"Bars: 95% intervals.{grey} Dotted: the largest size in training."),
        "sharpness": ("Entropy and top weight by size", "Means over examples and heads of the last layer."),
        "causes": (
            "Lost to dispersion, and to wrong ranking",
            "Between accuracy and argmax: lost to dispersion. Above argmax: lost to wrong ranking.",
        ),
    }
    return [
        Figure(name, title, f"{_note(tables)}. {caption}", f"{title}, for each method.", partial(_chart, tables, name))
        for name, (title, caption) in words.items()
    ]


def _note(tables: Tables) -> str:
    setting = tables["setting"]
    low, high = setting["train_sizes"]
    return (
        f"{setting['model']} on {setting['task']}, trained at {low} to {high} {setting['unit']}; "
        f"{plural(len(setting['seeds']), 'seed')}, {plural(setting['samples'], 'example')} per size and seed"
    )


def _chart(tables: Tables, name: str) -> Any:
    setting, styles = tables["setting"], _styles(tables)
    x = charts.size_axis(setting["sizes"], f"number of {setting['unit']} n")
    known, end = setting["sizes"], setting["train_sizes"][1]
    trained = charts.rule("x", end) if len(known) > 1 and known[0] <= end <= known[-1] else []

    def rows(table: str) -> list[dict[str, Any]]:
        found = charts.size_rows({method: tables[table][method] for method in styles}, most=_most(table))
        # The last drawn is on top.
        return sorted(found, key=lambda row: styles[row["variant"]].shape != charts.LINE)

    if name == "accuracy":
        y = charts.percent_axis("accuracy (%)")
        panel = charts.lines_panel("", rows("accuracy"), x, y, styles, under=trained, height=360)
        return charts.figure(panel, columns=1, names=list(styles))
    if name == "sharpness":
        y, even = charts.axis("y", "entropy (nats)"), [{"x": n, "y": math.log(n)} for n in known]
        line = charts.altair().Chart(charts.data(even)).mark_line(strokeDash=[2, 3], color=charts.SOFT)
        under = [*trained, line.encode(x=x, y=y)]
        weight = charts.percent_axis("top weight (%)")
        panels = [
            charts.lines_panel("Entropy (dotted: ln n)", rows("entropy"), x, y, styles, under=under),
            charts.lines_panel("Top weight", rows("top_weight"), x, weight, styles, under=trained),
        ]
        return charts.figure(*panels, names=list(styles))
    kinds = {table: kind for table, kind in _KINDS.items() if _measured(tables, table)}
    panels = []
    for method in methods(tables):
        found = charts.size_rows({kind: tables[table][method] for table, (kind, _) in kinds.items()})
        plain = [row | {"low": None, "high": None} for row in found]
        y = charts.percent_axis("")
        panels.append(charts.lines_panel(method, plain, x, y, dict(kinds.values()), height=130, size=18.0))
    return charts.figure(*panels, columns=4, minimum=165, around=46, names=list(dict(kinds.values())))


def _most(table: str) -> float:
    return math.inf if table == "entropy" else 100.0


_GIVEN = ("options", "recipe", "data")


def _definitions(tables: Tables) -> Pairs:
    found = []
    for name in methods(tables):
        one = tables["methods"][name]
        words = [one["summary"] or one["normaliser"]]
        given = {what: ", ".join(f"{key} = {value}" for key, value in one[what].items()) for what in _GIVEN}
        words += [f"{what}: {values}" for what, values in given.items() if values]
        words += [f"at test: {one['at_test']['normaliser']}"] if one["at_test"] is not None else []
        words += [f"feed-forward layers: {one['feed_forward']}"] if one["feed_forward"] != "gelu" else []
        found.append((name, "; ".join([*words, f"{tables['training'][name]['parameters']:,} parameters"])))
    return found


# Capacity: models of several widths, heads and depths.


def _limit(tables: Tables, model: Mapping[str, Any], measure: str) -> str:
    """The size at which a model reaches a limit, or on which side of the sizes tested."""
    found, known = model[MEASURES[measure][0]], tables["setting"]["sizes"]
    if isinstance(found, str):
        return f"> {count(known[-1])}" if found == "beyond" else f"< {count(known[0])}"
    return NOTHING if found is None else count(found)


def _inside(tables: Tables, method: str, measure: str) -> list[float]:
    """The limits among the sizes tested, the earliest first."""
    found = [model[MEASURES[measure][0]] for model in tables["capacity"][method]]
    return sorted(limit for limit in found if isinstance(limit, float))


def _predicted(rule: Mapping[str, Any], model: Mapping[str, Any]) -> float | None:
    if rule["exponents"] is None:
        return None
    powers = [float(model[name]) ** one["mean"] for name, one in rule["exponents"].items()]
    return float(rule["constant"] * math.prod(powers))


def exponent_text(value: float) -> str:
    """An exponent to two places.

    >>> exponent_text(-0.002), exponent_text(-0.25)
    ('0.00', '−0.25')
    """
    return nats(round(value, 2) + 0.0)  # no zero has a sign


def _reach(one: Mapping[str, Any]) -> str:
    return "" if one["low"] is None else f"{exponent_text(one['low'])} to {exponent_text(one['high'])}"


def _formula(rule: Mapping[str, Any]) -> str:
    if rule["exponents"] is None:
        return "no rule: too few models reach it"
    powers = [f"{name}^{exponent_text(one['mean'])}" for name, one in rule["exponents"].items()]
    return " · ".join([_constant(rule["constant"]), *powers])


def _constant(value: float) -> str:
    return count(value) if value >= 1000.0 else f"{value:.3g}"


def _factor(name: str, value: int) -> str:
    return plural(value, "head") if name == "heads" else f"{name} {value}"


def _deep(tables: Tables, method: str) -> dict[str, Mapping[str, Any]]:
    """Models of several layers in which measured and predicted dispersion can be compared."""
    return {label: found for label, found in tables["layers"].get(method, {}).items() if found is not None}


def _as_predicted(known: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{sum(one['first_measured'] == one['first_forecast'] for one in known.values())} of {len(known)}"


def _capacity_headline(tables: Tables, method: str) -> str:
    inside, rule = _inside(tables, method, "accuracy"), tables["laws"][method]["accuracy"]
    models = f"{len(inside)} of {plural(len(tables['capacity'][method]), 'model')}"
    where = f" at {span(inside)} {tables['setting']['unit']}" if inside else ""
    fitted = f": about {_formula(rule)}" if rule["exponents"] else ""
    return f"Accuracy of {method} halves{where} in {models}{fitted}."


def _capacity_metrics(tables: Tables, method: str) -> list[Metric]:
    models, setting, found = tables["capacity"][method], tables["setting"], []
    for measure, (_, what) in MEASURES.items():
        inside = _inside(tables, method, measure)
        detail = f"{len(inside)} of {plural(len(models), 'model')}, {span(setting['sizes'])} {setting['unit']} tested"
        found.append(Metric(span(inside) if inside else NOTHING, f"{setting['unit']} at which {what}", detail))
    exponents = tables["laws"][method]["accuracy"]["exponents"] or {}
    for name, one in sorted(exponents.items(), key=lambda pair: -abs(pair[1]["mean"]))[:1]:
        detail = _reach(one) or "one seed: no interval"
        found.append(Metric(f"{name}^{exponent_text(one['mean'])}", "largest exponent, accuracy", detail))
    if deep := _deep(tables, method):
        found.append(Metric(_as_predicted(deep), "first layer as predicted", "deep models, from sizes up to 64"))
    return found


def _rules_table(tables: Tables, method: str) -> Table:
    rules = tables["laws"][method]
    names = [name for name in FACTORS if any(name in (rule["exponents"] or {}) for rule in rules.values())]
    rows = []
    for measure, rule in rules.items():
        row = [Cell(capital(MEASURES[measure][1])), cell_of(rule["constant"], _constant)]
        for one in ((rule["exponents"] or {}).get(name) for name in names):
            sure = one is not None and one["low"] is not None and not one["low"] <= 0.0 <= one["high"]
            row.append(EMPTY if one is None else Cell(exponent_text(one["mean"]), _reach(one), strong=sure))
        row.append(cell_of(rule["r2"], lambda r2: f"{r2:.2f}"))
        rows.append([*row, Cell(f"{rule['used']} of {rule['models']}"), Cell(str(rule["beyond"]))])
    titles = [f"exponent of {name}" for name in names]
    return Table(
        f"Fitted rules of {method}: size ≈ constant · width^a · heads^b · depth^c",
        "Least squares of the logarithms; 95% intervals from bootstrapping seeds. Bold: the interval excludes zero.",
        header("limit", "constant", *titles, "R²", "models|in the fit", "models|beyond the sizes"),
        rows,
    )


def _models_table(tables: Tables, method: str) -> Table:
    """One row per model: both limits, measured and by the rule, and the layer that disperses first."""
    deep, unit = _deep(tables, method), tables["setting"]["unit"]
    rows = []
    for model in tables["capacity"][method]:
        row = [*(Cell(str(model[name])) for name in FACTORS), Cell(count(model["parameters"]))]
        for measure in MEASURES:
            predicted = cell_of(_predicted(tables["laws"][method][measure], model), count, faint=True)
            row += [Cell(_limit(tables, model, measure)), predicted]
        first = deep.get(model["model"])
        if deep:
            row += [Cell(str(first[key] + 1)) if first else EMPTY for key in ("first_measured", "first_forecast")]
        rows.append([*row, Cell(", ".join(map(str, model["diverged"])) or "none")])
    limits = [title for _, what in MEASURES.values() for title in (f"{what}|{unit}", "by the rule")]
    layers = ["first layer|measured", "first layer|predicted"] if deep else []
    return Table(
        f"Models of {method}",
        "Accuracy halves: falls to half of its value at the smallest size. > and <: outside the sizes tested, and not "
        "in the fit." + (" First layer: whose entropy grows fastest." if deep else ""),
        header(*FACTORS, "parameters", *limits, *layers, "diverged|seeds"),
        rows,
    )


def _capacity_figures(tables: Tables, method: str, name: str) -> Iterator[Figure]:
    note = f"{plural(len(tables['capacity'][method]), 'encoder')} on {_note(tables).partition(' on ')[2]}"
    # A chart of models whose limits are all outside the sizes shows nothing.
    for measure in [measure for measure in MEASURES if _inside(tables, method, measure)] or ["accuracy"]:
        title = f"{method}: size at which {MEASURES[measure][1]}"
        yield Figure(
            f"{name}-{measure}",
            title,
            f"{note}. Dotted: {_formula(tables['laws'][method][measure])}. Hollow: outside the sizes tested.",
            f"{title}, a point for each model.",
            partial(_capacity_chart, tables, method, measure),
        )


def _capacity_chart(tables: Tables, method: str, measure: str) -> Any:
    alt, (key, _) = charts.altair(), MEASURES[measure]
    models, rule, known = tables["capacity"][method], tables["laws"][method][measure], tables["setting"]["sizes"]
    across, by_line, by_panel = sorted(FACTORS, key=lambda name: len({model[name] for model in models}) == 1)
    styles = charts.styles_of([_factor(by_line, value) for value in sorted({model[by_line] for model in models})])
    edges = {"beyond": known[-1] * _EDGE, "never above": known[0] / _EDGE}
    found = [edges.get(model[key], model[key]) for model in models]
    ends = [limit for limit in found if limit is not None] or list(known)
    low, high = min(ends) / 1.3, max(ends) * 1.3
    # At least two ticks; a scale that clamps would put others at its ends.
    ticks = {size for size in (*known, *(100 * step for step in range(1, 10))) if low <= size <= high}
    marks = alt.Axis(values=sorted(ticks), format=",d", labelOverlap="greedy", labelSeparation=5)
    scale = alt.Scale(type="log", domain=[low, high], nice=False, clamp=True)
    y = alt.Y("y:Q", title=f"size ({tables['setting']['unit']})", scale=scale, axis=marks)
    x = charts.size_axis(sorted({model[across] for model in models}), across)

    def row(model: Mapping[str, Any], value: float) -> dict[str, Any]:
        variant = _factor(by_line, model[by_line])
        return {"variant": variant, "x": model[across], "y": value, "measured": _limit(tables, model, measure)}

    panels = []
    groups = sorted({model[by_panel] for model in models})
    for group in groups:
        ours = [model for model in models if model[by_panel] == group]
        fitted = [row(model, value) for model in ours if (value := _predicted(rule, model)) is not None]
        under = charts.Plot(x, y, styles).lines(fitted, dash=(2, 3), width=1.3) if fitted else []
        inside = [row(model, model[key]) for model in ours if isinstance(model[key], float)]
        outside = [row(model, edges[model[key]]) for model in ours if model[key] in edges]
        title = _factor(by_panel, group) if len(groups) > 1 else ""
        panels.append(charts.lines_panel(title, inside, x, y, styles, under=under, hollow=outside, height=240))
    return charts.figure(*panels, columns=3, minimum=250, names=list(styles))
