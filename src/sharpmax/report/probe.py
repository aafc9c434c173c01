"""The page of `sharpmax probe`: which heads lose focus as inputs grow; one run, or two side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.report import charts
from sharpmax.report.tables import (
    NOTHING,
    RUNS,
    Cell,
    Figure,
    Metric,
    Part,
    Report,
    Table,
    Tables,
    cells,
    check_name,
    named,
    present,
    sizes,
)
from sharpmax.report.words import capital, count, joined, nats, origin_of_run, percent, points, span, whole

LOSES_FOCUS = ("dispersing", "uniform")
"""The kinds of heads whose weights spread as inputs grow."""

_LETTERS = {"dispersing": "D", "uniform": "U", "sharp": "S", "local": "L", "sink": "K", "unknown": "?"}
_SHOWN_HEADS = 20
_MAX_POINTS = 12_000
"""Points of curves that a page holds; of larger models it has the heads that change most."""

_STYLES = {
    "": charts.Style(charts.BLUE),
    "A": charts.Style(charts.BLUE),
    "B": charts.Style(charts.VERMILLION, "square"),
}


@dataclass(frozen=True)
class ProbeRun:
    """One probed model; of two runs each has a letter."""

    letter: str
    name: str
    tables: Tables

    @property
    def label(self) -> str:
        """Letter and name."""
        return f"{self.letter}: {self.name}" if self.letter else self.name

    @property
    def setting(self) -> Any:
        """How the model was probed."""
        return self.tables["setting"]

    def heads(self, task: str) -> Any:
        """Every head by its name, layer.head."""
        return self.tables[f"heads/{task}"]

    def table(self, kind: str, task: str) -> Mapping[str, Any]:
        """The table `layers`, `forecast` or `chain` of a task; empty where the run has none."""
        return self.tables.get(f"{kind}/{task}") or {}

    def unit(self, task: str) -> str:
        """The unit of sizes."""
        return str(self.setting["unit"][task])

    def known(self, task: str) -> int:
        """How many heads have numbers."""
        return sum(about["kind"] != "unknown" for about in self.heads(task).values())

    def losing(self, task: str) -> int:
        """How many heads lose focus."""
        return sum(about["kind"] in LOSES_FOCUS for about in self.heads(task).values())

    def horizons(self, task: str) -> dict[str, float]:
        """The measured horizons of all heads that have one."""
        found = {name: about["horizon"]["tokens"] for name, about in self.heads(task).items()}
        return {name: tokens for name, tokens in found.items() if tokens is not None}

    def layers(self, task: str) -> dict[str, Mapping[str, Any]]:
        """The layers in the order in which they disperse."""
        return dict(sorted(self.table("layers", task).items(), key=lambda one: one[1]["rank"] or math.inf))

    def error(self, task: str) -> tuple[str, Mapping[str, Any]] | None:
        """The largest size at which the forecast was tested, and its errors there."""
        tested = self.table("forecast", task).get("tested") or {}
        return (sizes(tested)[-1], tested[sizes(tested)[-1]]) if tested else None

    def measured_on(self, task: str) -> str:
        """How many prompts of which sizes were measured."""
        prompts = sorted(self.setting["prompts_of_size"][task].values())
        return f"{span(prompts)} prompts per size, {span(self.setting['sizes'][task])} {self.unit(task)}"


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax probe`, or two runs of it."""
    return RUNS in tables or bool(named(tables, "heads"))


def report(tables: Tables) -> Report:
    """The page's contents."""
    found = runs(tables)
    parts = []
    for task in _tasks(found):
        name, figures = f"task-{check_name(task, 'task')}", list(_figures(found, task))
        each = (make(run, task) for make in (_heads_table, _layers_table, _errors_table) for run in found)
        parts.append(
            Part(name, f"Task {task}", _metrics(found, task), figures, [_runs_table(found, task)], present(*each))
        )
    origins = [
        (run.label, origin_of_run(saved["command"], saved["provenance"], saved["tables"]))
        for run, saved in zip(found, tables.get(RUNS, ()), strict=False)
    ]
    forecasts = [run.table("forecast", task) for run in found for task in _tasks(found)]
    about = {"methods": joined(sorted({_method(str(one["method"])) for one in forecasts if one}))}
    rules = {kind: rule for run in found for kind, rule in (run.setting.get("kind_rule") or {}).items()}
    definitions = [
        ("Kinds of heads", [(f"{letter_of(kind)} {kind}", capital(str(rule))) for kind, rule in rules.items()]),
        (
            "Models",
            [(run.label, ", ".join(f"{name}: {run.setting.get(name) or 'none'}" for name in _MODEL)) for run in found],
        ),
    ]
    return Report("probe", headline(tables), parts, _notes(found), (), definitions, origins, about)


def runs(tables: Tables) -> list[ProbeRun]:
    """The run of these tables, or both."""
    if RUNS not in tables:
        return [ProbeRun("", _name(tables["setting"]), tables)]
    settings = [run["tables"]["setting"] for run in tables[RUNS]]
    names = [_name(setting) for setting in settings]
    if len(set(names)) < len(names):  # the same model, from different folders
        names = [f"{name} ({run['name']})" for name, run in zip(names, tables[RUNS], strict=True)]
    elif len({setting["model"] for setting in settings}) == 1:
        names = [name + ("" if one.get("policy") else " baseline") for name, one in zip(names, settings, strict=True)]
    return [ProbeRun(letter, name, run["tables"]) for letter, name, run in zip("AB", names, tables[RUNS], strict=True)]


def _name(setting: Mapping[str, Any]) -> str:
    policy = setting.get("policy")
    return f"{setting['model']} with {policy}" if policy else str(setting["model"])


_MODEL = ("family", "layers", "heads", "context", "policy", "dtype", "device", "rows")
"""Settings of a model that a page lists."""


def _method(name: str) -> str:
    """The name of a forecast method; earlier results call key replication "crowding"."""
    return name.replace("crowding", "key replication")


def _tasks(found: Sequence[ProbeRun]) -> list[str]:
    """The tasks of a run; of two runs those that both have."""
    first, *rest = (named(run.tables, "heads") for run in found)
    shared = [task for task in first if all(task in other for other in rest)]
    if not shared:
        given = " and ".join(", ".join(known) for known in (first, *rest))
        raise FileFormatError(f"results: no task is in both of them ({given}); allowed: two runs that share a task")
    return shared


def _place(name: str) -> tuple[int, int]:
    layer, _, head = name.partition(".")
    return int(layer), int(head)


def letter_of(kind: str) -> str:
    """The letter of a kind of heads.

    >>> letter_of("sink"), letter_of("wide")
    ('K', 'W')
    """
    return _LETTERS.get(kind, kind[:1].upper())


def in_order(kinds: Iterable[str]) -> list[str]:
    """Kinds from the least focused, each once; unknown ones last.

    >>> in_order(["sink", "wide", "dispersing", "sink"])
    ['dispersing', 'sink', 'wide']
    """
    known = set(kinds)
    return [kind for kind in _LETTERS if kind in known] + sorted(known - _LETTERS.keys())


def _same_heads(found: Sequence[ProbeRun], task: str) -> bool:
    return len(found) > 1 and len({tuple(sorted(run.heads(task))) for run in found}) == 1


def signed(value: float | None) -> str:
    """A slope or a bias.

    >>> signed(0.744), signed(None)
    ('+0.74', '–')
    """
    return NOTHING if value is None else points(value, 2)


def _nats(value: float | None) -> str:
    return NOTHING if value is None else nats(value)


def weight(value: float | None) -> str:
    """A weight between 0 and 1, in percent without its sign.

    >>> weight(0.25), weight(0.00001), weight(0.0)
    ('25.0', '< 0.1', '0.0')
    """
    return NOTHING if value is None else "< 0.1" if 0.0 < value < 0.001 else f"{100.0 * value:.1f}"


def _keys(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}" if value < 100.0 else count(value)


def _slope(about: Mapping[str, Any]) -> str:
    low, high = about.get("slope_low"), about.get("slope_high")
    return signed(about["slope"]) + ("" if low is None or high is None else f" ({signed(low)} to {signed(high)})")


def _horizon(about: Mapping[str, Any]) -> str:
    """The horizon with its interval, or on which side of the sizes it lies."""
    tokens, low, high = (about["horizon"].get(key) for key in ("tokens", "low", "high"))
    if tokens is not None:
        return f"{whole(tokens)} tokens" + ("" if None in (low, high) else f" ({whole(low)} to {whole(high)})")
    known = [top for size in sizes(about["curve"]) if (top := about["curve"][size].get("top")) is not None]
    return "unknown" if not known else "beyond the largest size" if known[-1] >= 0.5 else "before the smallest size"


def headline(tables: Tables) -> list[str]:
    """The answer in numbers: of one run its heads, layers and forecast; of two their heads."""
    found, sentences = runs(tables), []
    for task in _tasks(found):
        many = [f"{count(run.losing(task))} of {count(run.known(task))}" for run in found]
        shares = [percent(100.0 * run.losing(task) / max(1, run.known(task))) for run in found]
        if len(found) > 1:
            both = " → ".join(f"{one} ({part})" for one, part in zip(many, shares, strict=True))
            sentences.append(f"Heads that lose focus on {task}: {both}, from {found[0].name} to {found[1].name}.")
            continue
        parts = [f"{many[0]} heads ({shares[0]}) lose focus on {task}."]
        first = [layer for layer, row in found[0].layers(task).items() if (row["slope"] or 0.0) > 0.0][:3]
        parts += [f"Layers {joined(first)} first."] if first else []
        if (error := found[0].error(task)) is not None:
            limit = count(found[0].setting["fit_up_to"][task])
            where = f"from {limit} to {count(error[0])} {found[0].unit(task)}"
            parts.append(f"Forecast {where}: off by {nats(error[1]['entropy']['median'])} nats (median head).")
        sentences.append(" ".join(parts))
    return sentences


def _notes(found: Sequence[ProbeRun]) -> list[str]:
    """Of two runs: how many slopes differ, and whether both were measured alike."""
    notes = []
    for task in _tasks(found):
        if _same_heads(found, task):
            pairs = [(one, found[1].heads(task)[name]) for name, one in found[0].heads(task).items()]
            ends = [[head.get(end) for head in pair for end in ("slope_low", "slope_high")] for pair in pairs]
            known = [four for four in ends if None not in four]
            lower, higher = sum(four[3] < four[0] for four in known), sum(four[2] > four[1] for four in known)
            notes.append(
                f"{capital(task)}: slope lower in B in {count(lower)}, higher in {count(higher)} of "
                f"{count(len(known))} heads; in the others the 95% intervals overlap."
            )
        ways = [run.measured_on(task) for run in found]
        if len(set(ways)) > 1:
            notes.append(f"{capital(task)}: measured differently, A on {ways[0]}, B on {ways[1]}.")
    return notes


def _facts(run: ProbeRun, task: str) -> list[Metric]:
    """What a run found: heads that lose focus, the first layer, the median horizon, and the error of the forecast."""
    horizons, error = run.horizons(task), run.error(task)
    layer, row = next(iter(run.layers(task).items()), (NOTHING, {"slope": None}))
    middle = f"{whole(median(horizons.values()))} tokens" if horizons else NOTHING
    off = NOTHING if error is None else f"{nats(error[1]['entropy']['median'])} nats"
    tested = "" if error is None else f"of entropy, at {count(error[0])} {run.unit(task)}"
    return [
        Metric(count(run.losing(task)), "heads lose focus", f"of {count(run.known(task))}"),
        Metric(f"layer {layer}", "largest mean slope", f"{signed(row['slope'])}; 1: as fast as ln n"),
        Metric(middle, "median measured horizon", f"top weight below ½ from there on; {len(horizons)} heads"),
        Metric(off, "median error of the forecast", tested),
    ]


def _metrics(found: Sequence[ProbeRun], task: str) -> list[Metric]:
    groups = zip(*(_facts(run, task) for run in found), strict=True)
    return [Metric(" → ".join(one.value for one in group), group[0].label, group[-1].detail) for group in groups]


def _titled(title: str, run: ProbeRun) -> str:
    return f"{title}: {run.label}" if run.letter else title


def _runs_table(found: Sequence[ProbeRun], task: str) -> Table:
    """One row per run: heads of each kind, and what it found."""
    kinds = in_order(str(about["kind"]) for run in found for about in run.heads(task).values())
    rows = []
    for run in found:
        known = [str(about["kind"]) for about in run.heads(task).values()]
        facts = [Cell(one.value, one.detail if place < 2 else "") for place, one in enumerate(_facts(run, task))]
        rows.append([Cell(run.label), facts[0], *(Cell(count(known.count(kind))) for kind in kinds), *facts[1:]])
    titles = [f"{letter_of(kind)} {kind}" for kind in kinds]
    return Table(
        f"Heads on {task}",
        "; ".join(dict.fromkeys(run.measured_on(task) for run in found)) + ". Median horizon and error: over heads.",
        cells("model", "lose focus", *titles, "largest mean slope", "horizon", "forecast error"),
        rows,
    )


def _heads_table(run: ProbeRun, task: str) -> Table | None:
    heads = run.heads(task)
    known = [name for name, one in heads.items() if one["slope"] is not None and one["kind"] in LOSES_FOCUS]
    rows = []
    for name in sorted(known, key=lambda name: -heads[name]["slope"])[:_SHOWN_HEADS]:
        about = heads[name]
        ends = [about["curve"][size] for size in (*sizes(about["curve"])[:1], *sizes(about["curve"])[-1:])]
        effective = " → ".join(_keys(one.get("effective")) for one in ends)
        top = " → ".join(weight(one.get("top")) for one in ends)
        rows.append(cells(name, str(about["kind"]), _slope(about), effective, top, _horizon(about)))
    return None if not rows else Table(
        _titled("Heads that lose focus most", run),
        f"{len(rows)} of {count(len(known))}, the largest slopes first, with 95% intervals. From the smallest to the "
        "largest size: effective number of keys (e^entropy) and top weight.",
        cells("layer.head", "kind", "slope", "effective keys", "top weight (%)", "horizon"),
        rows,
    )  # fmt: skip


def _layers_table(run: ProbeRun, task: str) -> Table | None:
    table, chain = run.layers(task), run.table("chain", task)
    kinds, rows = in_order(kind for row in table.values() for kind in row["kinds"]), []
    for layer, row in table.items():
        heads = [Cell(count(row["kinds"].get(kind, 0)), faint=not row["kinds"].get(kind)) for kind in kinds]
        rows.append([*cells(layer, signed(row["slope"])), *heads, *cells(weight(row["top"]), weight(row["sink"]))])
    between = "" if not chain or chain["low"] is None else f" ({signed(chain['low'])} to {signed(chain['high'])})"
    following = f" Correlation with the next layer's slope: {signed(chain['next'])}{between}." if chain else ""
    return None if not rows else Table(
        _titled("Layers, the first to disperse on top", run),
        "Ranked by the mean slope of their heads; layers count from 0. Weights: means over heads at the largest size."
        + following,
        cells("layer", "mean slope", *(f"{letter_of(kind)} {kind}" for kind in kinds), "top weight (%)",
              "first token (%)"),
        rows,
    )  # fmt: skip


def _errors_table(run: ProbeRun, task: str) -> Table | None:
    """Errors of the forecast by size, and of every method at the largest."""
    table, error, unit = run.table("forecast", task), run.error(task), run.unit(task)
    if error is None:
        return None
    rows = []
    for size in sizes(table["tested"]):
        one = table["tested"][size]
        entropy, top = one["entropy"], one["top"]
        errors = nats(entropy["median"]), nats(entropy["p90"]), signed(entropy["bias"])
        rows.append(cells(count(size), *errors, weight(top["median"]), weight(top["p90"]), points(100.0 * top["bias"])))
    methods = [
        f"{_method(name)} {_nats(((about['tested'].get(error[0]) or {}).get('entropy') or {}).get('median'))}"
        for name, about in (table.get("methods") or {}).items()
    ]
    others = f" Median error of every method at {count(error[0])} {unit}: {', '.join(methods)}." if methods else ""
    spread = "90% of heads", "bias"
    return Table(
        _titled("Error of the forecast", run),
        f"{capital(_method(str(table['method'])))}, fitted on {', '.join(map(count, table.get('fitted') or []))}. "
        f"Absolute errors over heads; bias is positive where the forecast is too high.{others}",
        cells(f"size ({unit})", "entropy, median (nats)", *spread, "top weight, median (%)", *spread),
        rows,
    )


def _figures(found: Sequence[ProbeRun], task: str) -> Iterator[Figure]:
    letters = ", ".join(f"{letter} {kind}" for kind, letter in _LETTERS.items() if kind != "unknown")
    pair = " Last map: slope of B − A, ≠ where the kind changes." if _same_heads(found, task) else ""
    names = _curve_heads(found, task)
    some = " Curves: the heads that change most." if len(names) < len(found[0].heads(task)) else ""
    yield Figure(
        f"heads-{task}",
        f"Slope of entropy of every head on {task}",
        f"Colour: slope against ln n; 1 (red): as uniform attention, 0: constant, below 0 (blue): sharper. Letter: "
        f"kind ({letters}). Click a head for its curves.{pair}{some}",
        "Map of all heads with their kind and slope.",
        partial(_map_chart, found, task),
    )
    fit = joined(sorted({f"{count(run.setting['fit_up_to'][task])} {run.unit(task)}" for run in found}))
    yield Figure(
        f"curves-{task}",
        "One head by number of keys",
        f"Means over prompts. Dotted: ln n and 1/n; dashed: forecast from sizes up to {fit}. Diamond: the horizon, "
        "where the top weight falls below ½ for good.",
        "Entropy and top weight of a head against the number of keys.",
        partial(_curves_chart, found, task, names),
    )
    if tested := [(run, error[0]) for run in found if (error := run.error(task))]:
        yield Figure(
            f"forecast-{task}",
            f"Forecast and measurement at {joined([f'{count(size)} {run.unit(task)}' for run, size in tested])}",
            f"One point per head; dotted: exact. Fitted up to {fit}.",
            "Measured against forecast entropy and top weight, a point for each head.",
            partial(_forecast_chart, tested, task),
        )


def _both(about: Mapping[str, Any], size: str, key: str) -> list[float | None]:
    """Forecast and measurement."""
    return [((about.get(kind) or {}).get(size) or {}).get(key) for kind in ("forecast", "curve")]


_TIPS = {
    "head": "layer.head", "kind": "kind", "slope": "slope of entropy against ln n", "horizon": "horizon",
    "n": "keys at the largest size", "entropy": "entropy (nats)", "effective": "effective keys",
    "top": "top weight (%)", "sink": "weight of the first token (%)", "local": "weight of the last 16 tokens (%)",
    "spread": "spread of the logits", "off": "forecast is off by (nats)",
}  # fmt: skip


def _map_row(run: ProbeRun, task: str, name: str) -> dict[str, Any]:
    about, (layer, head) = run.heads(task)[name], _place(name)
    known = [size for size in sizes(about["curve"]) if about["curve"][size].get("count") is not None]
    last = about["curve"][known[-1]] if known else {}
    forecast, measured = _both(about, (run.error(task) or ("",))[0], "entropy")
    return {
        "head": name, "x": head, "y": layer, "value": about["slope"], "letter": letter_of(str(about["kind"])),
        "kind": str(about["kind"]), "slope": _slope(about), "horizon": _horizon(about), "n": _keys(last.get("count")),
        "entropy": _nats(last.get("entropy")), "effective": _keys(last.get("effective")),
        **{part: weight(last.get(part)) for part in ("top", "sink", "local")}, "spread": _nats(last.get("spread")),
        "off": signed(None if forecast is None or measured is None else forecast - measured),
    }  # fmt: skip


def _map_chart(found: Sequence[ProbeRun], task: str) -> Any:
    maps = [(run.label if run.letter else "", [_map_row(run, task, name) for name in run.heads(task)]) for run in found]
    if _same_heads(found, task):
        maps.append(("B − A", []))
        for one, other in zip(*(rows for _, rows in maps[:2]), strict=True):
            apart = None if None in (one["value"], other["value"]) else other["value"] - one["value"]
            changed = "≠" if one["kind"] != other["kind"] else ""
            row = one | {"value": apart, "letter": changed, "slope": f"B − A: {signed(apart)}"}
            maps[-1][1].append(row | {"kind": f"{one['kind']} → {other['kind']}"})
    panels = []
    for title, rows in maps:
        look: dict[str, Any] = {"domain": (-1, 1), "tips": charts.tooltip(**_TIPS), "diverging": True}
        look["letters"] = len(rows) <= 1500
        panels.append(charts.heat_panel(title, rows, "head", "layer", "slope of entropy against ln n", **look))
    minimum = 330 if len(panels) == 1 else 250
    return charts.figure(*panels, columns=len(panels), minimum=minimum, around=54, head=_chosen(found, task))


def _chosen(found: Sequence[ProbeRun], task: str) -> str:
    """The head shown first: the dispersing head with the largest slope, if possible one that all runs have."""
    heads = found[0].heads(task)

    def rank(name: str) -> tuple[bool, bool, float]:
        slope = heads[name]["slope"]
        shared = all(name in run.heads(task) for run in found)
        return shared, heads[name]["kind"] == LOSES_FOCUS[0], -math.inf if slope is None else slope

    return str(max(heads, key=rank))


def _curve_heads(found: Sequence[ProbeRun], task: str) -> list[str]:
    """The heads whose curves are on the page: all, or of a large model those that change most."""
    heads = found[0].heads(task)
    most = max(1, _MAX_POINTS // max(1, sum(len(run.setting["sizes"][task]) for run in found)))
    ranked = sorted(heads, key=lambda name: -abs(heads[name]["slope"] or 0.0))
    return sorted(ranked[:most], key=_place)


def _curve_rows(run: ProbeRun, task: str, name: str) -> Iterator[dict[str, Any]]:
    about = run.heads(task).get(name) or {"curve": {}}
    forecast, fitted = about.get("forecast") or {}, str(run.setting["fit_up_to"][task])
    for size in sizes(about["curve"]):
        cell = about["curve"][size]
        if cell.get("count") is not None:
            # The forecast begins at the last size it was fitted on.
            predicted = cell if size == fitted and forecast else forecast.get(size) or {}
            row = {"head": name, "variant": run.label, "x": cell["count"]}
            row |= {key: cell.get(key) for key in ("entropy", "top")}
            yield row | {f"{key}_f": predicted.get(key) for key in ("entropy", "top")}


def _curves_chart(found: Sequence[ProbeRun], task: str, names: Sequence[str]) -> Any:
    alt = charts.altair()
    rows = [row for run in found for name in names for row in _curve_rows(run, task, name)]
    styles = {run.label: _STYLES[run.letter] for run in found}
    known = [row["x"] for row in rows] or [1.0, 2.0]
    low, high = max(1.0, min(known)), max(max(known), 2.0)
    ticks = [2**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)] or [round(high)]
    x = charts.size_axis(ticks, "keys n", [low, high])
    values = charts.data(rows)
    grid = [low * (high / low) ** (step / 24) for step in range(25)]
    horizons = [
        {"head": name, "variant": run.label, "x": tokens, "y": 0.5, "horizon": _horizon(run.heads(task)[name])}
        for run in found for name, tokens in run.horizons(task).items() if name in names
    ]  # fmt: skip
    ours = f"datum.head === {charts.HEAD}"
    panels = []
    for field, title, domain, bound in (
        ("entropy", "entropy (nats)", (-0.2, 1.05 * math.log(high)), math.log),
        ("top", "top weight", (0.0, 1.03), lambda n: 1.0 / n),
    ):
        scale = alt.Scale(domain=list(domain), nice=False)
        y, predicted, height = (alt.Y(f"{name}:Q", title=title, scale=scale) for name in (field, f"{field}_f", "y"))
        tips = charts.tooltip(variant="run", x="keys|,.0f", **{field: f"{title}|.3f", f"{field}_f": "forecast|.3f"})
        plot = charts.Plot(x, y, styles, tips)
        base = plot.base(values).transform_filter(ours)
        dashed = base.mark_line(strokeWidth=1.6, strokeDash=[5, 3]).encode(y=predicted)
        limit = alt.Chart(charts.data([{"x": n, "y": bound(n)} for n in grid])).encode(x=x, y=height)
        layers = [
            limit.mark_line(strokeDash=[2, 3], color=charts.SOFT, strokeWidth=1.2),
            base.mark_line(strokeWidth=2).transform_filter(f"isValid(datum.{field})"),
            dashed.transform_filter(f"isValid(datum.{field}_f)"),
            plot.marked(base),
        ]
        if field == "top":
            layers += charts.rule("y", 0.5)
            if horizons:
                mark = plot.base(charts.data(horizons)).transform_filter(ours)
                mark = mark.mark_point(shape="diamond", size=130, strokeWidth=2)
                layers.append(mark.encode(y=height, tooltip=charts.tooltip(variant="run", horizon="horizon")))
        panels.append(charts.panel(title.partition(" (")[0].capitalize(), *layers))
    head = _chosen(found, task)
    return charts.figure(*panels, names=list(styles), head=head if head in names else names[0], heads=names)


def _forecast_chart(tested: Sequence[tuple[ProbeRun, str]], task: str) -> Any:
    alt = charts.altair()
    styles = {run.label: _STYLES[run.letter] for run, _ in tested}
    panels = []
    for field, title in (("entropy", "entropy (nats)"), ("top", "top weight")):
        rows = []
        for run, size in tested:
            for head, about in run.heads(task).items():
                forecast, measured = _both(about, size, field)
                if forecast is not None and measured is not None:
                    rows.append({"variant": run.label, "x": forecast, "y": measured, "head": head})
        most = max((value for row in rows for value in (row["x"], row["y"])), default=1.0)
        domain = (-0.03 * most, 1.05 * most)
        tips = charts.tooltip(head="layer.head", x="forecast|.3f", y="measured|.3f")
        x, y = charts.axis("x", f"forecast {title}", domain), charts.axis("y", "measured", domain)
        diagonal = alt.Chart(charts.data([{"x": one, "y": one} for one in domain]))
        exact = diagonal.mark_line(strokeDash=[2, 3], color=charts.SOFT).encode(x=x, y=y)
        dots = charts.Plot(x, y, styles, tips).points(rows, size=18.0)
        panels.append(charts.panel(title.partition(" (")[0].capitalize(), exact, dots))
    return charts.figure(*panels, names=list(styles))
