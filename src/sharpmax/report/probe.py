"""The page of `sharpmax probe`: which heads lose focus as inputs grow; one run, or two side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.report import charts
from sharpmax.report.tables import NOTHING, RUNS, Figure, Metric, Part, Report, Table, Tables, named, sizes, table_of
from sharpmax.report.words import capital, count, joined, origin_of_run, percent, points, share, span
from sharpmax.theory.bounds import whole

LOSES_FOCUS = ("dispersing", "uniform")
"""The kinds of heads whose weights disperse as inputs grow."""

_LETTERS = {"dispersing": "D", "uniform": "U", "sharp": "S", "local": "L", "sink": "K", "unknown": "?"}
_SHOWN_HEADS = 20
_MAX_POINTS = 12_000
"""Largest number of points of curves on a page; larger models show the heads that change most."""


@dataclass(frozen=True)
class ProbeRun:
    """One task of a probed model."""

    label: str
    tables: Tables
    task: str

    @property
    def heads(self) -> Any:
        """Findings of every head, by layer.head."""
        return self.tables[f"heads/{self.task}"]

    def setting(self, name: str) -> Any:
        """A setting of the task."""
        return self.tables["setting"][name][self.task]

    def measured_on(self) -> str:
        """The number of prompts and the sizes."""
        prompts = sorted(self.setting("prompts_of_size").values())
        return f"{span(prompts)} prompts per size, {span(self.setting('sizes'))} {self.setting('unit')}"


def report(tables: Tables) -> Report:
    """The contents of a page of one run, or of two."""
    saved = tables.get(RUNS) or [{"tables": tables}]
    first, *rest = (named(one["tables"], "heads") for one in saved)
    shared = [task for task in first if all(task in other for other in rest)]
    if not shared:
        given = " and ".join(", ".join(known) for known in (first, *rest))
        raise FileFormatError(f"results: no task is in both of them ({given}); allowed: two runs that share a task")
    labels: list[str] = []
    kinds: dict[str, Any] = {}
    for letter, one in zip("AB", saved, strict=False):
        setting = one["tables"]["setting"]
        name = str(setting["model"]) + (f" with {setting['policy']}" if setting.get("policy") else "")
        labels.append(f"{letter}: {name} ({one['name']})" if rest else name)
        kinds |= setting.get("kind_rule") or {}
    parts, notes = [], []
    for task in shared:
        runs = [ProbeRun(label, one["tables"], task) for label, one in zip(labels, saved, strict=True)]
        grids = [_kinds_table(runs), *(_heads_table(run) for run in runs)]
        parts.append(Part(f"task-{task}", f"Task {task}", _metrics(runs), list(_figures(runs)), grids))
        ways = [run.measured_on() for run in runs]
        if len(set(ways)) > 1:
            notes.append(f"{capital(task)}: measured differently, A on {ways[0]}, B on {ways[1]}.")
    origins = [
        (label, origin_of_run(one["command"], one["provenance"], one["tables"]))
        for label, one in zip(labels, saved, strict=True) if rest
    ]  # fmt: skip
    rules = [(f"{_LETTERS[kind]} {kind}", capital(str(rule))) for kind, rule in kinds.items()]
    return Report("probe", parts, notes, [("Kinds of heads", rules)], origins)


def _slope(about: Mapping[str, Any]) -> str:
    values = (about.get(name) for name in ("slope", "slope_low", "slope_high"))
    slope, low, high = (NOTHING if value is None else points(value, 2) for value in values)
    return slope if low == NOTHING else f"{slope} ({low} to {high})"


def _horizon(about: Mapping[str, Any]) -> str:
    """The horizon with its interval, or whether it lies before or beyond the sizes."""
    tokens, low, high = (about["horizon"].get(key) for key in ("tokens", "low", "high"))
    if tokens is not None:
        return f"{whole(tokens):,} tokens" + ("" if None in (low, high) else f" ({whole(low):,} to {whole(high):,})")
    known = [top for size in sizes(about["curve"]) if (top := about["curve"][size].get("top")) is not None]
    return "unknown" if not known else "beyond the largest size" if known[-1] >= 0.5 else "before the smallest size"


def _facts(run: ProbeRun) -> Iterator[Metric]:
    """Heads that lose focus, the first layers, the error of the forecast, the median horizon."""
    kinds, unit = [about["kind"] for about in run.heads.values()], run.setting("unit")
    losing, known = sum(kind in LOSES_FOCUS for kind in kinds), sum(kind != "unknown" for kind in kinds)
    many = f"{count(losing)} of {count(known)} ({percent(100.0 * losing / max(1, known))})"
    yield Metric(many, f"heads that lose focus on {run.task}", run.measured_on())
    layers = sorted(run.tables[f"layers/{run.task}"].items(), key=lambda one: one[1]["rank"] or math.inf)
    yield Metric(joined([layer for layer, _ in layers[:3]]), "layers that disperse first", "largest slopes of entropy")
    if tested := (run.tables.get(f"forecast/{run.task}") or {}).get("tested"):
        size, fitted = sizes(tested)[-1], f"median head; forecast from {count(run.setting('fit_up_to'))} {unit}"
        off = f"{tested[size]['entropy']['median']:.2f} nats"
        yield Metric(off, f"error of the forecast at {count(size)} {unit}", fitted)
    horizons = [about["horizon"]["tokens"] for about in run.heads.values() if about["horizon"]["tokens"] is not None]
    middle, reached = f"{whole(median(horizons)):,} tokens" if horizons else NOTHING, f"of {len(horizons)} heads"
    yield Metric(middle, "median measured horizon", f"{reached}; top weight below ½ from there on")


def _metrics(runs: Sequence[ProbeRun]) -> list[Metric]:
    """The metrics of a run, or those that two runs share."""
    first, *rest = ({one.label: one for one in _facts(run)} for run in runs)
    groups = [[one, *(other[label] for other in rest)] for label, one in first.items() if all(label in r for r in rest)]
    return [Metric(" → ".join(one.value for one in group), group[0].label, group[-1].detail) for group in groups]


def _kinds_table(runs: Sequence[ProbeRun]) -> Table:
    """How many heads of each kind every run has."""
    known = {run.label: [about["kind"] for about in run.heads.values()] for run in runs}
    order = [kind for kind in _LETTERS if any(kind in kinds for kinds in known.values())]
    rows = [[label, *(count(kinds.count(kind)) for kind in order)] for label, kinds in known.items()]
    note = "Dispersing and uniform heads lose focus."
    return table_of(f"Heads on {runs[0].task}", note, ["model", *(f"{_LETTERS[kind]} {kind}" for kind in order)], rows)


def _heads_table(run: ProbeRun) -> Table:
    known = {name: one for name, one in run.heads.items() if one["slope"] is not None and one["kind"] in LOSES_FOCUS}
    rows = []
    for name, about in sorted(known.items(), key=lambda one: -one[1]["slope"])[:_SHOWN_HEADS]:
        ends = [about["curve"][size] for size in sizes(about["curve"])[:: max(1, len(about["curve"]) - 1)]]
        keys, tops = ([one[key] for one in ends if one.get(key) is not None] for key in ("effective", "top"))
        effective = " → ".join(f"{value:.1f}" if value < 100.0 else count(value) for value in keys)
        top = " → ".join(share(100.0 * value) for value in tops)
        rows.append([name, str(about["kind"]), _slope(about), effective, top, _horizon(about)])
    return table_of(
        f"Heads that lose focus most: {run.label}",
        f"{len(rows)} of {count(len(known))}, the largest slopes first, with 95% intervals. From the smallest to the "
        "largest size: effective number of keys (e^entropy) and top weight.",
        ["layer.head", "kind", "slope", "effective keys", "top weight (%)", "horizon"],
        rows,
    )


def _figures(runs: Sequence[ProbeRun]) -> Iterator[Figure]:
    task, names = runs[0].task, _curve_heads(runs)
    letters = ", ".join(f"{letter} {kind}" for kind, letter in _LETTERS.items() if kind != "unknown")
    some = " Curves: the heads that change most." if len(names) < len(runs[0].heads) else ""
    yield Figure(
        f"heads-{task}",
        f"Slope of entropy of every head on {task}",
        f"Colour: slope against ln n; 1 (red): as uniform attention, 0: constant, below 0 (blue): sharper. Letter: "
        f"kind ({letters}). Click a head for its curves.{some}",
        partial(_map_chart, runs),
    )
    fit = joined(sorted({f"{count(run.setting('fit_up_to'))} {run.setting('unit')}" for run in runs}))
    caption = f"Means over prompts. Dashed: forecast from sizes up to {fit}."
    yield Figure(f"curves-{task}", "One head by number of keys", caption, partial(_curves_chart, runs, names))


def _map_chart(runs: Sequence[ProbeRun]) -> Any:
    words = "slope of entropy against ln n"
    tips = charts.tooltip(head="layer.head", kind="kind", slope=words, horizon="horizon")
    panels = []
    for run in runs:
        rows = []
        for name, about in run.heads.items():
            layer, head = map(int, name.split("."))
            row = {"head": name, "x": head, "y": layer, "value": about["slope"], "letter": _LETTERS[about["kind"]]}
            rows.append(row | {"kind": str(about["kind"]), "slope": _slope(about), "horizon": _horizon(about)})
        title = run.label if len(runs) > 1 else ""
        panels.append(charts.heat_panel(title, rows, "head", "layer", words, domain=(-1, 1), tips=tips, diverging=True))
    return charts.figure(*panels, columns=len(panels), around=54, head=_curve_heads(runs)[0])


def _curve_heads(runs: Sequence[ProbeRun]) -> list[str]:
    """The heads with curves on the page, the largest slope first."""
    heads = [name for name in runs[0].heads if all(name in run.heads for run in runs)]
    most = max(1, _MAX_POINTS // max(1, sum(len(run.setting("sizes")) for run in runs)))
    return sorted(heads, key=lambda name: -(runs[0].heads[name]["slope"] or 0.0))[:most]


def _curve_rows(run: ProbeRun, name: str, field: str) -> Iterator[dict[str, Any]]:
    """A head by number of keys, and its forecast from the last size it was fitted on."""
    about, fitted = run.heads.get(name, {}), str(run.setting("fit_up_to"))
    for size, cell in about.get("curve", {}).items():
        row = {"head": name, "x": cell.get("count")}
        forecast = cell if size == fitted else (about.get("forecast") or {}).get(size) or {}
        for variant, of in ((run.label, cell), (f"{run.label}, forecast", forecast)):
            if None not in (row["x"], of.get(field)):
                yield row | {"variant": variant, "y": of[field]}


def _curves_chart(runs: Sequence[ProbeRun], names: Sequence[str]) -> Any:
    styles: dict[str, charts.Style] = {}
    for run, colour, shape in zip(runs, (charts.BLUE, charts.VERMILLION), ("circle", "square"), strict=False):
        styles[run.label] = charts.Style(colour, shape)
        styles[f"{run.label}, forecast"] = charts.Style(colour, charts.LINE, (5, 3))
    panels = []
    for field, title in (("entropy", "entropy (nats)"), ("top", "top weight")):
        rows = [row for run in runs for name in names for row in _curve_rows(run, name, field)]
        low, high = (end(row["x"] for row in rows) for end in (min, max))
        x = charts.size_axis([2**power for power in range(round(math.log2(low)), 1 + round(math.log2(high)))], "keys n")
        y = charts.axis("y", title, (0.0, 1.03 * (math.log(high) if field == "entropy" else 1.0)))
        panels.append(charts.lines_panel("", rows, x, y, styles))
    in_order = sorted(names, key=lambda name: tuple(map(int, name.split("."))))
    return charts.figure(*panels, names=list(styles), head=names[0], heads=in_order)
