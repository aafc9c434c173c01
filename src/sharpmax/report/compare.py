"""The page of `sharpmax compare`: softmax and its alternatives by size, and models by capacity (`--capacity`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    is_name,
    markdown,
    mean_cell,
    present,
)
from sharpmax.report.words import Pairs, capital, count, joined, nats, percent, plural, points, share, span

SOFTMAX = "softmax"
_HIGHLIGHTED, _ALL = 5, 6
"""So many methods are coloured among many; up to so many all are."""

_COLUMNS = 5
"""Sizes that have a column in tables."""

_LEARNED = 90.0
"""Accuracy in percent at the smallest size below which a method has not learned the task."""

_AT_LARGEST = {"hard": "argmax", "ranking": "ranked first", "close": "near-ties"}
"""Columns at the largest size: tables of the results, and their titles."""

FACTORS = ("width", "heads", "depth")
MEASURES = {
    "accuracy": ("half_accuracy_size", "accuracy halves"),
    "top": ("half_top_weight_size", "the top weight falls below ½"),
}
"""The two limits of a model: the key of the size at which it is reached, and what happens there."""

_BEYOND = "beyond"
_EDGE = 2.0**0.5
"""Models whose limit is outside the sizes tested are drawn this factor beyond them."""


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax compare`."""
    return "league" in tables or has_capacity(tables)


def has_capacity(tables: Tables) -> bool:
    """Whether models of several capacities were compared."""
    return "capacity" in tables and "laws" in tables


def report(tables: Tables) -> Report:
    """The page's contents."""
    parts: list[Part] = []
    notes: list[str] = []
    if "league" in tables:
        shown, details = [leaderboard_table(tables)], present(causes_table(tables), near_ties_table(tables))
        parts.append(Part("leaderboard", "Leaderboard", metrics(tables), _figures(tables), shown, details))
        notes += leaderboard_notes(tables)
    if has_capacity(tables):
        for place, method in enumerate(tables["capacity"], start=1):
            name = f"capacity-{method if is_name(method) else place}"
            numbers, figures = capacity_metrics(tables, method), list(_capacity_figures(tables, method, name))
            rules, models = rules_table(tables, method), models_table(tables, method)
            parts.append(Part(name, f"Capacity: {method}", numbers, figures, [rules], [models]))
        notes += capacity_notes(tables)
    return Report("compare", list(headline(tables)), parts, notes, _method(tables), _definitions(tables))


def headline(tables: Tables) -> Iterator[str]:
    """The answer in numbers: who leads at the largest size, and what softmax loses there to what."""
    if "league" in tables:
        yield from leaderboard_headline(tables)
    else:
        for method in tables["capacity"]:
            yield from _capacity_sentences(tables, method)


# The leaderboard: methods, the best first.


@dataclass(frozen=True)
class Gap:
    """The lead of one method over another in points, paired by seed; with several seeds it has a 95% interval."""

    mean: float
    low: float | None
    high: float | None

    @property
    def significant(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high

    @property
    def interval(self) -> str:
        """The interval in words."""
        if self.low is None or self.high is None:
            return "one seed, no interval"
        return f"{points(self.low)} to {points(self.high)}"


def methods(tables: Tables) -> list[str]:
    """The methods, the best first."""
    return list(tables["league"])


def _sizes(tables: Tables) -> list[str]:
    return [str(size) for size in tables["setting"]["sizes"]]


def _largest(tables: Tables) -> str:
    return _sizes(tables)[-1]


def _some_sizes(tables: Tables) -> list[str]:
    """The smallest size, and the largest with some in even steps before it."""
    known = _sizes(tables)
    if len(known) <= _COLUMNS:
        return known
    step = (len(known) - 1) // (_COLUMNS - 1)
    return [known[0], *known[::-1][: step * (_COLUMNS - 1) : step][::-1]]


def _mean_of(tables: Tables, table: str, method: str, size: str) -> Any:
    return tables[table][method][size]["mean"]


def _measured(tables: Tables, table: str) -> bool:
    """Whether a measure has a value anywhere: not every task has near-ties."""
    return any(cell["mean"] is not None for row in tables[table].values() for cell in row.values())


def rank_of(tables: Tables, method: str) -> str:
    """The rank of a method, with = where it is shared."""
    ranks = [place["rank"] for place in tables["league"].values()]
    rank = tables["league"][method]["rank"]
    return f"{rank}=" if ranks.count(rank) > 1 else str(rank)


def leader(tables: Tables) -> str:
    """The method with the highest accuracy at the largest size."""
    return max(methods(tables), key=lambda method: _mean_of(tables, "accuracy", method, _largest(tables)))


def gap(tables: Tables, one: str, other: str, size: str) -> Gap:
    """The lead of a method over another at a size, paired by seed."""
    pairs = zip(tables["per_seed"][one][size], tables["per_seed"][other][size], strict=True)
    apart = [first - second for first, second in pairs]
    mean = sum(apart) / len(apart)
    reach = _quantile(tables, len(apart))
    if reach is None:
        return Gap(mean, None, None)
    sem = math.sqrt(sum((value - mean) ** 2 for value in apart) / (len(apart) - 1) / len(apart))
    return Gap(mean, mean - reach * sem, mean + reach * sem)


def _quantile(tables: Tables, seeds: int) -> float | None:
    """Student's quantile for so many seeds, read off the intervals of the results."""
    if seeds < 2:
        return None
    known = [cell for row in tables["accuracy"].values() for cell in row.values() if cell["n"] == seeds and cell["sem"]]
    widest = max(known, key=lambda cell: cell["sem"], default=None)
    # Without any difference between seeds, there is no doubt about a difference between methods.
    return 0.0 if widest is None else (widest["mean"] - widest["low"]) / widest["sem"]


def level_with(tables: Tables) -> list[str]:
    """Methods that the leader is not significantly ahead of at the largest size, the closest first."""
    first, size = leader(tables), _largest(tables)
    gaps = {method: gap(tables, first, method, size) for method in methods(tables) if method != first}
    return sorted((method for method, one in gaps.items() if not one.significant), key=lambda method: gaps[method].mean)


def loss_of(tables: Tables, method: str, size: str) -> tuple[float, float] | None:
    """Points lost to dispersion and to wrong ranking; None where argmax accuracy was not measured.

    The first is negative where spreading its weight helps a method.
    """
    accuracy, argmax = (_mean_of(tables, table, method, size) for table in ("accuracy", "hard"))
    return None if argmax is None else (argmax - accuracy, 100.0 - argmax)


def _subject(tables: Tables) -> str:
    """Softmax, or the last method where softmax was not compared."""
    known = methods(tables)
    return SOFTMAX if SOFTMAX in known else known[-1]


def _n(tables: Tables) -> str:
    return f"{count(_largest(tables))} {tables['setting']['unit']}"


def leaderboard_headline(tables: Tables) -> Iterator[str]:
    """Accuracy at the largest size of the leader, of softmax and of the runner-up, and what is lost to what."""
    first, subject = leader(tables), _subject(tables)
    accuracy = {name: _mean_of(tables, "accuracy", name, _largest(tables)) for name in methods(tables)}
    if len(accuracy) == 1:
        yield f"Accuracy at {_n(tables)}: {first} {percent(accuracy[first])}."
    else:
        second = max((name for name in accuracy if name != first), key=accuracy.__getitem__)
        other = subject if subject != first else second
        yield f"Accuracy at {_n(tables)}: {first} {percent(accuracy[first])}, {other} {percent(accuracy[other])}."
        ahead, level = gap(tables, first, second, _largest(tables)), level_with(tables)
        some = joined(level) if len(level) <= 4 else f"{', '.join(level[:4])} and {len(level) - 4} more"
        doubt = f"; not significantly ahead of {some}" if level and ahead.low is not None else ""
        yield f"{first} leads {second} by {share(max(0.0, ahead.mean))} points ({ahead.interval}){doubt}."
    for name in dict.fromkeys([subject, first]):
        if (loss := loss_of(tables, name, _largest(tables))) is not None:
            causes = f": {share(loss[0])} to dispersion, {share(loss[1])} to wrong ranking"
            if loss[0] < 0.0:
                causes = f", none to dispersion: argmax would lose {share(-loss[0])} more"
            yield f"{name} loses {share(100.0 - accuracy[name])} points{causes}."


def metrics(tables: Tables) -> list[Metric]:
    """The leader, its lead over softmax, and what both lose to what."""
    first, last = leader(tables), _largest(tables)
    level = len(level_with(tables))
    doubt = f"; not significantly ahead of {plural(level, 'other')}" if level else ""
    cell = tables["accuracy"][first][last]
    reach = "" if cell["low"] is None else f"; {interval(cell)} (95%)"
    detail = f"rank {rank_of(tables, first)}{reach}{doubt}"
    found = [Metric(percent(cell["mean"]), f"{first}, best at {_n(tables)}", detail)]
    if SOFTMAX in methods(tables) and first != SOFTMAX:
        ahead = gap(tables, first, SOFTMAX, last)
        found.append(Metric(f"{points(ahead.mean)} points", f"{first} over softmax", ahead.interval))
    for name in dict.fromkeys([_subject(tables), first]):
        if (loss := loss_of(tables, name, last)) is not None:
            causes = zip((max(0.0, value) for value in loss), ("dispersion", "wrong ranking"), strict=True)
            (less, other), (most, cause) = sorted(causes)
            detail = f"and {share(less)} to {other}, at {_n(tables)}"
            found.append(Metric(f"{share(most)} points", f"{name} loses to {cause}", detail))
    return found


def leaderboard_notes(tables: Tables) -> Iterator[str]:
    """What limits the conclusions: one seed, divergence, methods that did not learn the task."""
    if len(tables["setting"]["seeds"]) == 1:
        yield "One seed: no difference was tested, ranks are by the mean alone."
    for name in methods(tables):
        if seeds := ", ".join(map(str, tables["training"][name]["diverged"])):
            yield f"{name} diverged for seed {seeds}; its answers count as wrong."
    smallest = _sizes(tables)[0]
    accuracy = {name: _mean_of(tables, "accuracy", name, smallest) for name in methods(tables)}
    if weak := [f"{name} ({percent(value)})" for name, value in accuracy.items() if value < _LEARNED]:
        where = f"{count(smallest)} {tables['setting']['unit']}"
        yield f"Below {_LEARNED:.0f}% at {where}, so not learned: {joined(weak)}."
    if not _measured(tables, "close"):
        yield "The task has no near-ties."


def leaderboard_table(tables: Tables) -> Table:
    """One row per method: rank, mean, accuracy by size, and training."""
    setting, last = tables["setting"], count(_largest(tables))
    scored, shown = span(setting["scored_sizes"]), [f"{count(n)}|{setting['unit']}" for n in _some_sizes(tables)]
    ends = f"argmax|at {last}", f"ranked first|at {last}", "training|seconds", "memory|MB"
    return Table(
        f"Accuracy (%) of {setting['model']} on {setting['task']}",
        f"Ranked by mean accuracy at {scored} {setting['unit']}; methods that a paired t-test over seeds (p < "
        f"{setting['level']:g}) cannot tell apart share a rank (=). {_intervals(tables)} Argmax: accuracy of "
        "attending only to the largest weight. Ranked first: how often that is the correct item.",
        header("method", "rank", f"mean|at {scored}", *shown, *ends),
        [_leaderboard_row(tables, method) for method in methods(tables)],
    )


def _leaderboard_row(tables: Tables, method: str) -> list[Cell]:
    training, last = tables["training"][method], _largest(tables)
    gone, rank = training["diverged"], rank_of(tables, method)
    best = method == leader(tables)
    return [
        Cell(method, f"diverged: {len(gone)} of {plural(len(tables['setting']['seeds']), 'seed')}" if gone else ""),
        Cell(rank, strong=rank.rstrip("=") == "1"),
        mean_cell(tables["league"][method]["score"]),
        *(mean_cell(tables["accuracy"][method][n], strong=best and n == last) for n in _some_sizes(tables)),
        *(mean_cell(tables[table][method][last]) for table in ("hard", "ranking")),
        Cell(f"{training['seconds']:,.1f}"),
        cell_of(training["memory"], lambda memory: f"{memory / 1e6:,.0f}"),
    ]


def causes_table(tables: Tables) -> Table:
    """What each method loses at the largest size, and to what."""
    near = ["ranked first in near-ties|%"] if _measured(tables, "close") else []
    lost = "lost to dispersion|points", "lost to wrong ranking|points"
    return Table(
        f"Dispersion or wrong ranking, at {_n(tables)}",
        "Points missing from 100%. To dispersion: argmax over the same scores would be correct (negative where "
        "argmax would be correct less often). To wrong ranking: it would not. Top weight and entropy: means over "
        "the rows of the last layer.",
        header("method", "accuracy|%", "argmax|%", *lost, "ranked first|%", *near, "top weight|%", "entropy|nats"),
        [_cause_row(tables, method, near=bool(near)) for method in methods(tables)],
    )


def _cause_row(tables: Tables, method: str, *, near: bool) -> list[Cell]:
    size = _largest(tables)
    loss = loss_of(tables, method, size)
    lost = [EMPTY, EMPTY] if loss is None else [_points(value, value == max(loss) and value >= 1.0) for value in loss]
    weights = ["ranking", "close", "top_weight"] if near else ["ranking", "top_weight"]
    before, after = (
        [cell_of(_mean_of(tables, table, method, size), share) for table in names]
        for names in (["accuracy", "hard"], weights)
    )
    return [Cell(method), *before, *lost, *after, cell_of(_mean_of(tables, "entropy", method, size), nats)]


def _points(value: float, strong: bool) -> Cell:
    return Cell(f"{value:.1f}".replace("-0.0", "0.0").replace("-", "−"), strong=strong)


def near_ties_table(tables: Tables) -> Table | None:
    """How often the correct item is ranked first where another is nearly as good."""
    if not _measured(tables, "close"):
        return None
    return Table(
        "Near-ties: correct item ranked first (%)",
        "The half of the examples whose best two items are closest; sharpening cannot fix a wrong ranking. "
        f"{_intervals(tables)}",
        header("method", *(f"{count(n)}|{tables['setting']['unit']}" for n in _some_sizes(tables))),
        [[Cell(name), *(mean_cell(tables["close"][name][n]) for n in _some_sizes(tables))] for name in methods(tables)],
    )


def _intervals(tables: Tables) -> str:
    seeds = len(tables["setting"]["seeds"])
    return "One seed: no intervals." if seeds == 1 else f"Student's 95% intervals over {seeds} seeds."


def markdown_lines(tables: Tables) -> list[str]:
    """The leaderboard as a Markdown table; bold is the leader at the largest size."""
    known, first = _some_sizes(tables), leader(tables)
    kinds = [table for table in _AT_LARGEST if _measured(tables, table)]
    head = ["method", "rank", *(count(n) for n in known), *(_AT_LARGEST[table] for table in kinds), "train s"]

    def number(table: str, method: str, size: str) -> str:
        value = _mean_of(tables, table, method, size)
        text = NOTHING if value is None else f"{value:.1f}"
        return f"**{text}**" if table == "accuracy" and (method, size) == (first, known[-1]) else text

    rows = []
    for method in methods(tables):
        accuracy = [number("accuracy", method, n) for n in known]
        others = [number(table, method, _largest(tables)) for table in kinds]
        seconds = f"{tables['training'][method]['seconds']:.0f}"
        rows.append([f"`{method}`", rank_of(tables, method), *accuracy, *others, seconds])
    return markdown(head, rows)


def _styles(tables: Tables) -> dict[str, charts.Style]:
    """Softmax, the leader and the best others in colour, the rest grey."""
    known = methods(tables)
    order = list(dict.fromkeys([*(one for one in (SOFTMAX, leader(tables)) if one in known), *known]))
    chosen = order if len(known) <= _ALL else order[:_HIGHLIGHTED]
    return {
        name: charts.style_at(chosen.index(name)) if name in chosen else charts.Style(charts.PALE, charts.LINE)
        for name in order
    }


def _figures(tables: Tables) -> list[Figure]:
    last, styles, note = _largest(tables), _styles(tables), _note(tables)
    grey = sum(style.shape == charts.LINE for style in styles.values())
    click = f" Grey: {plural(grey, 'other method')}; click one in the legend." if grey else ""
    ends = {name: _mean_of(tables, "accuracy", name, last) for name in styles}
    listed = joined([f"{name} {percent(value)}" for name, value in sorted(ends.items(), key=lambda one: -one[1])])
    return [
        Figure(
            "accuracy",
            "Accuracy by size",
            f"{note}. {_intervals(tables)}{click} Dotted: the largest size in training.",
            f"Accuracy in percent against size, a line for each method; at {_n(tables)}: {listed}.",
            partial(_accuracy_chart, tables),
        ),
        Figure(
            "sharpness",
            "Entropy and top weight by size",
            f"{note}. Means over the examples and heads of the last layer. Dispersion: entropy grows with ln n, the "
            "top weight falls.",
            "Entropy in nats and top weight in percent against size, a line for each method.",
            partial(_sharpness_chart, tables),
        ),
        Figure(
            "causes",
            "Lost to dispersion, and to wrong ranking",
            f"{note}. Between accuracy and argmax: lost to dispersion. Above argmax: lost to wrong ranking.",
            "A panel for each method with accuracy, argmax accuracy and correct rankings in percent against size.",
            partial(_causes_chart, tables),
        ),
    ]


def _note(tables: Tables) -> str:
    setting = tables["setting"]
    low, high = setting["train_sizes"]
    return (
        f"{setting['model']} on {setting['task']}, trained at {low} to {high} {setting['unit']} for "
        f"{plural(setting['steps'], 'step')}; {plural(len(setting['seeds']), 'seed')}, "
        f"{plural(setting['samples'], 'example')} per size and seed"
    )


def _size_axis(tables: Tables) -> Any:
    return charts.size_axis(tables["setting"]["sizes"], f"number of {tables['setting']['unit']} n")


def _training_rule(tables: Tables) -> list[Any]:
    known, end = tables["setting"]["sizes"], tables["setting"]["train_sizes"][1]
    return charts.rule("x", end) if len(known) > 1 and known[0] <= end <= known[-1] else []


def _rows(tables: Tables, table: str, method: str, label: str, *, bars: bool = True) -> list[dict[str, Any]]:
    most = math.inf if table == "entropy" else 100.0
    rows = []
    for n in _sizes(tables):
        cell = tables[table][method][n]
        if cell["mean"] is None:
            continue
        row = {"variant": label, "x": int(n), "y": cell["mean"], "low": None, "high": None}
        if bars and cell["low"] is not None:
            row |= {"low": max(0.0, cell["low"]), "high": min(most, cell["high"])}
        rows.append(row)
    return rows


def _lines(tables: Tables, table: str, y: Any, what: str) -> list[Any]:
    styles = _styles(tables)
    tips = charts.tooltip(variant="method", x="n|,", y=f"{what}|.2f", low="95% from|.2f", high="to|.2f")
    plot = charts.Plot(_size_axis(tables), y, styles, tips)
    grey = [name for name, style in styles.items() if style.shape == charts.LINE]
    pale = [row for name in grey for row in _rows(tables, table, name, name, bars=False)]
    shown = [row for name in styles if name not in grey for row in _rows(tables, table, name, name)]
    return [*([*plot.lines(pale, width=1.2), plot.hover(pale)] if pale else []), *plot.all(shown)]


def _accuracy_chart(tables: Tables) -> Any:
    layers = _lines(tables, "accuracy", charts.percent_axis("accuracy (%)"), "accuracy (%)")
    panel = charts.panel("", *_training_rule(tables), *layers, height=360)
    return charts.figure(panel, columns=1, names=list(_styles(tables)))


def _sharpness_chart(tables: Tables) -> Any:
    entropy = _lines(tables, "entropy", charts.axis("y", "entropy (nats)"), "entropy (nats)")
    weight = _lines(tables, "top_weight", charts.percent_axis("top weight (%)"), "top weight (%)")
    alt = charts.altair()
    even = [{"x": n, "y": math.log(n)} for n in tables["setting"]["sizes"]]
    uniform = alt.Chart(charts.data(even)).mark_line(strokeDash=[2, 3], color=charts.SOFT).encode(x="x:Q", y="y:Q")
    panels = [
        charts.panel("Entropy (dotted: ln n)", *entropy, uniform, *_training_rule(tables)),
        charts.panel("Top weight", *weight, *_training_rule(tables)),
    ]
    return charts.figure(*panels, names=list(_styles(tables)))


_KINDS = {
    "accuracy": ("accuracy", charts.Style(charts.BLACK, "circle")),
    "hard": ("argmax accuracy", charts.Style(charts.VERMILLION, "triangle-up")),
    "ranking": ("correct item ranked first", charts.Style(charts.BLUE, "square", (6, 3))),
    "close": ("ranked first in near-ties", charts.Style(charts.GREEN, "diamond", (2, 2))),
}


def _causes_chart(tables: Tables) -> Any:
    known = {table: kind for table, kind in _KINDS.items() if _measured(tables, table)}
    styles = dict(known.values())
    tips = charts.tooltip(variant="measure", x="n|,", y="examples (%)|.1f")
    plot = charts.Plot(_size_axis(tables), charts.percent_axis(""), styles, tips)
    panels = []
    for method in methods(tables):
        rows = [row for table, (name, _) in known.items() for row in _rows(tables, table, method, name, bars=False)]
        panels.append(charts.panel(method, *plot.all(rows, size=18.0), height=130))
    return charts.figure(*panels, columns=4, minimum=165, around=46, names=list(styles))


# Capacity: models of several widths, heads and depths.


def limit_of(model: Mapping[str, Any], measure: str) -> float | str | None:
    """The size at which a model reaches a limit, or in a word why there is none."""
    found: float | str | None = model[MEASURES[measure][0]]
    return found


def _limit_text(tables: Tables, model: Mapping[str, Any], measure: str) -> str:
    limit, known = limit_of(model, measure), tables["setting"]["sizes"]
    if limit is None:
        return NOTHING
    if isinstance(limit, str):
        return f"> {count(known[-1])}" if limit == _BEYOND else f"< {count(known[0])}"
    return count(limit)


def _inside(tables: Tables, method: str, measure: str) -> list[Mapping[str, Any]]:
    """The models whose limit is among the sizes tested, the earliest first."""
    key = MEASURES[measure][0]
    return sorted((one for one in tables["capacity"][method] if isinstance(one[key], float)), key=lambda one: one[key])


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


def _exponent_reach(one: Mapping[str, Any]) -> str:
    return "" if one["low"] is None else f"{exponent_text(one['low'])} to {exponent_text(one['high'])}"


def _unsure(one: Mapping[str, Any]) -> bool:
    return bool(one["low"] is not None and one["low"] <= 0.0 <= one["high"])


def _constant(value: float) -> str:
    return count(value) if value >= 1000.0 else f"{value:.3g}"


def _formula(rule: Mapping[str, Any]) -> str:
    powers = [
        f"{name}^{exponent_text(one['mean'])}" + (f" ({reach})" if (reach := _exponent_reach(one)) else "")
        for name, one in rule["exponents"].items()
    ]
    return " · ".join([_constant(rule["constant"]), *powers])


def _factor(name: str, value: int) -> str:
    return plural(value, "head") if name == "heads" else f"{name} {value}"


def _model_name(model: Mapping[str, Any]) -> str:
    return ", ".join(_factor(name, model[name]) for name in FACTORS)


def _deep(tables: Tables, method: str) -> dict[str, Mapping[str, Any]]:
    """Models of several layers in which measured and predicted dispersion can be compared."""
    return {label: found for label, found in tables["layers"].get(method, {}).items() if found is not None}


def _as_predicted(known: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(one["first_measured"] == one["first_forecast"] for one in known.values())


def _capacity_sentences(tables: Tables, method: str) -> Iterator[str]:
    known, models = tables["setting"]["sizes"], tables["capacity"][method]
    for measure, (_, what) in MEASURES.items():
        inside, parts = _inside(tables, method, measure), []
        if inside:
            ends = dict.fromkeys(
                f"{_limit_text(tables, model, measure)} {tables['setting']['unit']} ({_model_name(model)})"
                for model in (inside[0], inside[-1])
            )
            parts.append(f"{what} at {' to '.join(ends)}")
        limits = [limit_of(model, measure) for model in models]
        for where, limit in ((f"before {count(known[0])}", "never above"), (f"not up to {count(known[-1])}", _BEYOND)):
            if many := limits.count(limit):
                parts.append(f"{where} in {many} of {plural(len(models), 'model')}")
        if parts:
            yield f"{method}: {'' if inside else f'{what} '}{'; '.join(parts)}."
    for name, rule in tables["laws"][method].items():
        used, what = f"{rule['used']} of {plural(rule['models'], 'model')}", MEASURES[name][1]
        if rule["exponents"] is None:
            yield f"{method}: no rule for the size at which {what}: too few models reach it ({used})."
        else:
            fit = "" if rule["r2"] is None else f", R² {rule['r2']:.2f}"
            yield f"{method}: {what} at about {_formula(rule)} ({used}{fit})."
    if deep := _deep(tables, method):
        ((layer, times), *_) = Counter(one["first_measured"] + 1 for one in deep.values()).most_common()
        yield (
            f"{method}: layer {layer} disperses first in {times} of {plural(len(deep), 'deep model')}; predicted "
            f"from sizes up to 64, the layer is right in {_as_predicted(deep)}."
        )


def capacity_notes(tables: Tables) -> Iterator[str]:
    """What limits the rules: models outside the sizes, divergence, one seed."""
    for method, models in tables["capacity"].items():
        if beyond := tables["laws"][method]["accuracy"]["beyond"]:
            yield (
                f"{method}: the accuracy of {plural(beyond, 'model')} does not halve up to "
                f"{count(tables['setting']['sizes'][-1])}; the rule is fitted without them, and its exponents tend "
                "to be too small."
            )
        if gone := [_model_name(model) for model in models if model["diverged"]]:
            yield f"{method}: seeds diverged in {joined(gone)}; their answers count as wrong."
    if len(tables["setting"]["seeds"]) == 1:
        yield "One seed: the rules have no intervals."


def capacity_metrics(tables: Tables, method: str) -> list[Metric]:
    """Where accuracy halves, the two steepest exponents, and the predicted layers."""
    models, unit = tables["capacity"][method], tables["setting"]["unit"]
    if inside := _inside(tables, method, "accuracy"):
        ends = " to ".join(dict.fromkeys(_limit_text(tables, one, "accuracy") for one in (inside[0], inside[-1])))
        many = f"{len(inside)} of {plural(len(models), 'model')}"
        found = [Metric(ends, f"{unit} at which accuracy halves", many)]
    else:
        known = tables["setting"]["sizes"]
        tested = f"tested at {count(known[0])} to {count(known[-1])} {unit}"
        found = [Metric(f"0 of {len(models)}", "models whose accuracy halves", tested)]
    exponents = tables["laws"][method]["accuracy"]["exponents"] or {}
    for name, one in sorted(exponents.items(), key=lambda pair: -abs(pair[1]["mean"]))[:2]:
        reach = (_exponent_reach(one) or "one seed: no interval") + ("; not significant" if _unsure(one) else "")
        found.append(Metric(f"{name}^{exponent_text(one['mean'])}", f"size by {name}", reach))
    if deep := _deep(tables, method):
        right = f"{_as_predicted(deep)} of {len(deep)}"
        found.append(Metric(right, "first layer as predicted", "deep models, from sizes up to 64"))
    return found


def rules_table(tables: Tables, method: str) -> Table:
    """The fitted exponents."""
    rules = tables["laws"][method]
    names = [name for name in FACTORS if any(name in (rule["exponents"] or {}) for rule in rules.values())]
    rows = []
    for name, rule in rules.items():
        exponents = [_exponent((rule["exponents"] or {}).get(one)) for one in names]
        constant, fit = cell_of(rule["constant"], _constant), cell_of(rule["r2"], lambda r2: f"{r2:.2f}")
        used = [Cell(f"{rule['used']} of {rule['models']}"), Cell(str(rule["beyond"]))]
        rows.append([Cell(capital(MEASURES[name][1])), constant, *exponents, fit, *used])
    titles = [f"exponent of {name}" for name in names]
    return Table(
        f"Fitted rules of {method}: size ≈ constant · width^a · heads^b · depth^c",
        "Least squares of the logarithms; 95% intervals from bootstrapping seeds. Bold: the interval excludes zero.",
        header("limit", "constant", *titles, "R²", "models|in the fit", "models|beyond the sizes"),
        rows,
    )


def _exponent(one: Mapping[str, Any] | None) -> Cell:
    if one is None:
        return EMPTY
    return Cell(exponent_text(one["mean"]), _exponent_reach(one), strong=one["low"] is not None and not _unsure(one))


def models_table(tables: Tables, method: str) -> Table:
    """One row per model: both limits, measured and by the rule, and the layer that disperses first."""
    deep, unit = _deep(tables, method), tables["setting"]["unit"]
    limits = [title for _, what in MEASURES.values() for title in (f"{what}|{unit}", "by the rule")]
    layers = ["first layer|measured", "first layer|predicted"] if deep else []
    return Table(
        f"Models of {method}",
        "Accuracy halves: falls to half of its value at the smallest size. > and <: outside the sizes tested, and not "
        "in the fit." + (" First layer: whose entropy grows fastest." if deep else ""),
        header(*FACTORS, "parameters", *limits, *layers, "diverged|seeds"),
        [_model_row(tables, method, model, deep) for model in tables["capacity"][method]],
    )


def _model_row(
    tables: Tables, method: str, model: Mapping[str, Any], deep: Mapping[str, Mapping[str, Any]]
) -> list[Cell]:
    row = [*(Cell(str(model[name])) for name in FACTORS), Cell(count(model["parameters"]))]
    for measure in MEASURES:
        predicted = _predicted(tables["laws"][method][measure], model)
        expected = NOTHING if predicted is None else count(predicted)
        row += [Cell(_limit_text(tables, model, measure)), Cell(expected, faint=True)]
    if deep:
        first = deep.get(model["model"])
        wrong = first is not None and first["first_measured"] != first["first_forecast"]
        for key in ("first_measured", "first_forecast"):
            row.append(EMPTY if first is None else Cell(str(first[key] + 1), strong=wrong))
    gone = ", ".join(map(str, model["diverged"]))
    return [*row, Cell(gone, strong=True) if gone else Cell("none", faint=True)]


def _capacity_figures(tables: Tables, method: str, name: str) -> Iterator[Figure]:
    note = f"{plural(len(tables['capacity'][method]), 'encoder')} on {_note(tables).partition(' on ')[2]}"
    # A map of models whose limits are all outside the sizes shows nothing.
    for measure in [measure for measure in MEASURES if _inside(tables, method, measure)] or ["accuracy"]:
        what, rule = MEASURES[measure][1], tables["laws"][method][measure]
        fitted = "No rule could be fitted."
        if rule["exponents"] is not None:
            fitted = f"{capital(what)} at about {_formula(rule)}."
        yield Figure(
            f"{name}-{measure}",
            f"{method}: size at which {what}",
            f"{note}. One point per model; dotted: the fitted rule. {fitted} Hollow: outside the sizes tested, not in "
            "the fit.",
            f"The size at which {what} in models of {method}. {fitted}",
            partial(_capacity_chart, tables, method, measure),
        )
    if deep := _deep(tables, method):
        same = f"{_as_predicted(deep)} of {plural(len(deep), 'model')}"
        yield Figure(
            f"{name}-layers",
            f"{method}: first layer to disperse, as predicted in {same}",
            f"{note}. Growth of entropy per nat of ln n beyond 64, and its prediction from sizes up to 64; 1: uniform "
            "attention.",
            f"Growth of entropy by layer, measured and predicted, a panel for each deep model; as predicted in {same}.",
            partial(_layers_chart, deep),
        )


def _capacity_chart(tables: Tables, method: str, measure: str) -> Any:
    alt = charts.altair()
    models, rule = tables["capacity"][method], tables["laws"][method][measure]
    several = {name: len({model[name] for model in models}) > 1 for name in FACTORS}
    across, by_line, by_panel = sorted(FACTORS, key=lambda name: not several[name])
    known = tables["setting"]["sizes"]
    styles = charts.styles_of([_factor(by_line, value) for value in sorted({model[by_line] for model in models})])

    def rows(group: Any, kind: str) -> list[dict[str, Any]]:
        found = []
        for model in (model for model in models if model[by_panel] == group):
            limit = limit_of(model, measure)
            if kind == "rule":
                value = _predicted(rule, model)
            elif kind == "inside":
                value = limit if isinstance(limit, float) else None
            elif isinstance(limit, str):
                value = known[-1] * _EDGE if limit == _BEYOND else known[0] / _EDGE
            else:
                value = None
            if value is not None:
                row = {"variant": _factor(by_line, model[by_line]), "x": model[across], "y": value}
                row |= {"model": _model_name(model), "limit": _limit_text(tables, model, measure)}
                found.append(row)
        return found

    values = sorted({model[across] for model in models})
    groups = sorted({model[by_panel] for model in models})
    ends = [row["y"] for group in groups for kind in ("inside", "outside") for row in rows(group, kind)] or list(known)
    low, high = min(ends) / 1.3, max(ends) * 1.3
    scale = alt.Scale(type="log", domain=[low, high], nice=False, clamp=True)
    # At least two ticks; a scale that clamps would put others at its ends.
    inside = [size for size in (*known, *(100 * step for step in range(1, 10))) if low <= size <= high]
    ticks = alt.Axis(values=sorted(set(inside)), format=",d", labelOverlap="greedy", labelSeparation=5)
    y = alt.Y("y:Q", title=f"size ({tables['setting']['unit']})", scale=scale, axis=ticks)
    tips = charts.tooltip(model="model", limit="size")
    plot = charts.Plot(charts.size_axis(values, across), y, styles, tips)
    panels = []
    for group in groups:
        reached, outside = rows(group, "inside"), rows(group, "outside")
        layers = [*plot.lines(reached), plot.points(reached)] if reached else []
        layers += [plot.points(outside, filled=False, size=70.0)] if outside else []
        layers += plot.lines(rows(group, "rule"), dash=(2, 3), width=1.3)
        panels.append(charts.panel(_factor(by_panel, group) if len(groups) > 1 else "", *layers, height=240))
    return charts.figure(*panels, columns=3, minimum=250, names=list(styles))


def _layers_chart(deep: Mapping[str, Mapping[str, Any]]) -> Any:
    styles = {
        "measured": charts.Style(charts.BLACK, "circle"),
        "predicted": charts.Style(charts.VERMILLION, "square", (5, 3)),
    }
    tips = charts.tooltip(variant="growth", x="layer", y="per nat|.2f")
    slopes = [0.0, *(value for one in deep.values() for kind in ("measured", "forecast") for value in one[kind])]
    margin = 0.08 * max(0.1, max(slopes) - min(slopes))
    y = charts.axis("y", "", (min(slopes) - margin, max(slopes) + margin))
    panels = []
    for label, one in deep.items():
        rows = [
            {"variant": variant, "x": place, "y": value}
            for variant, key in (("measured", "measured"), ("predicted", "forecast"))
            for place, value in enumerate(one[key], start=1)
        ]
        deepest = len(one["measured"])
        ticks = list(range(1, deepest + 1))
        x = charts.axis("x", "layer", (0.6, deepest + 0.4), values=ticks, format="d", grid=False)
        title = label.removeprefix("encoder ").removesuffix(" global").removesuffix(" causal")
        panels.append(charts.panel(title, *charts.Plot(x, y, styles, tips).all(rows, size=25.0), height=130))
    return charts.figure(*panels, columns=4, minimum=165, around=46, names=list(styles))


def _method(tables: Tables) -> list[str]:
    setting = tables["setting"]
    low, high = setting["train_sizes"]
    found = [
        f"Task “{setting['task']}”: {setting['task_summary'].rstrip('.')}. Trained at {low} to {high} "
        f"{setting['unit']} for {plural(setting['steps'], 'step')} of {plural(setting['batch'], 'example')} (peak "
        f"learning rate {setting['learning_rate']:g}, {plural(setting['warmup'], 'step')} of warmup) on "
        f"{setting['device']}; {plural(len(setting['seeds']), 'seed')}, "
        f"{plural(setting['samples'], 'test example')} per size and seed, the same for all methods."
    ]
    if "league" in tables:
        found.append(
            "A diverged seed counts as wrong throughout. Time and memory are those of training all seeds together. "
            "Attention fails in two ways: dispersion (the correct item is ranked first but gets too little weight) "
            "and wrong ranking, which sharpening cannot fix."
        )
    if has_capacity(tables):
        found.append(
            "Limits are interpolated between the sizes tested. A layer disperses as fast as its entropy grows with "
            "ln n."
        )
    return found


_GIVEN = ("options", "recipe", "data")


def _definitions(tables: Tables) -> list[tuple[str, Pairs]]:
    if "league" not in tables:
        return []
    found = []
    for name in methods(tables):
        one = tables["methods"][name]
        words = [one["summary"] or one["normaliser"]]
        given = {what: ", ".join(f"{key} = {value}" for key, value in one[what].items()) for what in _GIVEN}
        words += [f"{what}: {values}" for what, values in given.items() if values]
        if one["at_test"] is not None:
            words.append(f"at test: {one['at_test']['normaliser']}")
        if one["feed_forward"] != "gelu":
            words.append(f"feed-forward layers: {one['feed_forward']}")
        words.append(f"{tables['training'][name]['parameters']:,} parameters")
        found.append((name, "; ".join(words)))
    return [("Methods", found)]
