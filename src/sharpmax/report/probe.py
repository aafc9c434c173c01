"""The page of `sharpmax probe`: which heads lose focus as inputs grow; one run, or two side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from sharpmax.report.words import (
    Pairs,
    capital,
    count,
    joined,
    nats,
    origin_of_run,
    percent,
    plural,
    points,
    span,
    whole,
)

LOSES_FOCUS = ("dispersing", "uniform")
"""The kinds of heads whose weights spread as inputs grow."""

_LETTERS = {"dispersing": "D", "uniform": "U", "sharp": "S", "local": "L", "sink": "K", "unknown": "?"}
_SHOWN_HEADS = 20
_MAX_POINTS = 12_000
"""Points of curves that a page holds; of larger models it has the heads that change most."""

_COLOURS = {
    "": charts.Style(charts.BLUE),
    "A": charts.Style(charts.BLUE),
    "B": charts.Style(charts.VERMILLION, "square"),
}

Head = Mapping[str, Any]


def matches(tables: Tables) -> bool:
    """Whether these are tables of `sharpmax probe`, or two runs of it."""
    return RUNS in tables or bool(named(tables, "heads"))


def report(tables: Tables) -> Report:
    """The page's contents."""
    found = runs(tables)
    parts = []
    for task in tasks(found):
        check_name(task, "task")
        shown = [_kinds_table(found, task), *present(*(_heads_table(run, task) for run in found))]
        each = (make(run, task) for run in found for make in (_layers_table, _errors_table, _methods_table))
        details = present(*each, _chain_table(found, task))
        figures = list(_figures(found, task))
        parts.append(Part(f"task-{task}", f"Task {task}", metrics(found, task), figures, shown, details))
    origins = [
        (run.label, origin_of_run(saved["command"], saved["provenance"], saved["tables"]))
        for run, saved in zip(found, tables.get(RUNS, ()), strict=False)
    ]
    return Report("probe", headline(tables), parts, notes(found), _method(found), _definitions(found), origins)


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
    def which(self) -> str:
        """Which of two runs, at the end of a phrase."""
        return f" in {self.letter}" if self.letter else ""

    @property
    def setting(self) -> Any:
        """How the model was probed."""
        return self.tables["setting"]

    def heads(self, task: str) -> Any:
        """Every head by its name, layer.head."""
        return self.tables[f"heads/{task}"]

    def sampled(self, task: str) -> str:
        """The largest size that the forecast is fitted on."""
        return f"{count(self.setting['fit_up_to'][task])} {self.unit(task)}"

    def table(self, kind: str, task: str) -> Mapping[str, Any]:
        """The table `layers`, `forecast` or `chain` of a task; empty where the run has none."""
        return self.tables.get(f"{kind}/{task}") or {}

    def unit(self, task: str) -> str:
        """The unit of sizes."""
        return str(self.setting["unit"][task])

    def kinds(self, task: str) -> Counter[str]:
        """How many heads there are of each kind."""
        return Counter(str(about["kind"]) for about in self.heads(task).values())

    def known(self, task: str) -> int:
        """How many heads have numbers."""
        return len(self.heads(task)) - self.kinds(task)["unknown"]

    def share(self, task: str) -> str:
        """The share of heads that lose focus."""
        return percent(100.0 * self.losing(task) / max(1, self.known(task)))

    def losing(self, task: str) -> int:
        """How many heads lose focus."""
        return sum(self.kinds(task)[kind] for kind in LOSES_FOCUS)

    def horizons(self, task: str) -> dict[str, float]:
        """The measured horizons of all heads that have one."""
        found = {name: about["horizon"]["tokens"] for name, about in self.heads(task).items()}
        return {name: tokens for name, tokens in found.items() if tokens is not None}

    def ranked(self, task: str) -> list[str]:
        """The layers in the order in which they disperse."""
        ranks = {layer: row["rank"] for layer, row in self.table("layers", task).items() if row["rank"] is not None}
        return sorted(ranks, key=ranks.__getitem__)

    def first(self, task: str) -> list[str]:
        """The layers with a positive mean slope, in that order."""
        return [layer for layer in self.ranked(task) if (self.table("layers", task)[layer]["slope"] or 0.0) > 0.0]

    def error(self, task: str) -> tuple[str, Mapping[str, Any]] | None:
        """The largest size at which the forecast was tested, and its errors there."""
        tested = self.table("forecast", task).get("tested") or {}
        known = sizes(tested)
        return (known[-1], tested[known[-1]]) if known else None


def runs(tables: Tables) -> list[ProbeRun]:
    """The run of these tables, or both."""
    if RUNS not in tables:
        return [ProbeRun("", _name(tables["setting"]), tables)]
    settings = [run["tables"]["setting"] for run in tables[RUNS]]
    names = [_name(setting) for setting in settings]
    if len(set(names)) < len(names):  # the models do not tell them apart, their folders do
        names = [f"{name} ({run['name']})" for name, run in zip(names, tables[RUNS], strict=True)]
    elif len({setting["model"] for setting in settings}) == 1:
        names = [name + ("" if one.get("policy") else " baseline") for name, one in zip(names, settings, strict=True)]
    return [ProbeRun(letter, name, run["tables"]) for letter, name, run in zip("AB", names, tables[RUNS], strict=True)]


def _name(setting: Mapping[str, Any]) -> str:
    policy = setting.get("policy")
    return f"{setting['model']} with {policy}" if policy else str(setting["model"])


def tasks(found: Sequence[ProbeRun]) -> list[str]:
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


def _kind_name(kind: str) -> str:
    return f"{letter_of(kind)} {kind}"


def in_order(kinds: Iterable[str]) -> list[str]:
    """Kinds from the least focused, each once; unknown ones last.

    >>> in_order(["sink", "wide", "dispersing", "sink"])
    ['dispersing', 'sink', 'wide']
    """
    known = set(kinds)
    return [kind for kind in _LETTERS if kind in known] + sorted(known - _LETTERS.keys())


def _same_heads(found: Sequence[ProbeRun], task: str) -> bool:
    return len({tuple(sorted(run.heads(task))) for run in found}) == 1


def chosen(found: Sequence[ProbeRun], task: str) -> str:
    """The head shown first: the dispersing head with the largest slope, if possible one that all runs have."""
    heads = found[0].heads(task)

    def rank(name: str) -> tuple[bool, bool, float]:
        slope = heads[name]["slope"]
        shared = all(name in run.heads(task) for run in found)
        return shared, heads[name]["kind"] == LOSES_FOCUS[0], -math.inf if slope is None else slope

    return str(max(heads, key=rank))


def in_words(value: float | None, words: Callable[[float], str]) -> str:
    """A number in words, or the sign for none."""
    return NOTHING if value is None else words(value)


def signed(value: float | None) -> str:
    """A slope or a bias.

    >>> signed(0.744), signed(None)
    ('+0.74', '–')
    """
    return in_words(value, lambda one: points(one, 2))


def weight(value: float | None) -> str:
    """A weight between 0 and 1, in percent without its sign.

    >>> weight(0.25), weight(0.00001), weight(0.0)
    ('25.0', '< 0.1', '0.0')
    """
    return in_words(value, lambda one: "< 0.1" if 0.0 < one < 0.001 else f"{100.0 * one:.1f}")


def keys(value: float | None) -> str:
    """A number of keys that need not be whole.

    >>> keys(3.14), keys(1234.5)
    ('3.1', '1,234')
    """
    return in_words(value, lambda one: f"{one:.1f}" if one < 100.0 else count(one))


def slope_words(about: Head) -> str:
    """The slope with its interval."""
    between = _between(about.get("slope_low"), about.get("slope_high"))
    return signed(about["slope"]) + (f" ({between})" if between else "")


def _between(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{signed(low)} to {signed(high)}"


def horizon_words(about: Head) -> str:
    """The horizon with its interval, or on which side of the sizes it lies."""
    horizon = about["horizon"]
    if horizon["tokens"] is not None:
        low, high = horizon.get("low"), horizon.get("high")
        between = "" if low is None or high is None else f" ({whole(low)} to {whole(high)})"
        return f"{whole(horizon['tokens'])} tokens{between}"
    known = [top for size in sizes(about["curve"]) if (top := about["curve"][size].get("top")) is not None]
    return "unknown" if not known else "beyond the largest size" if known[-1] >= 0.5 else "before the smallest size"


def measured_on(run: ProbeRun, task: str) -> str:
    """How many prompts of which sizes were measured."""
    prompts = sorted(run.setting["prompts_of_size"][task].values())
    return f"{span(prompts)} prompts per size, {span(run.setting['sizes'][task])} {run.unit(task)}"


def headline(tables: Tables) -> list[str]:
    """The answer in numbers: of one run its heads, layers, horizon and forecast; of two their difference."""
    found = runs(tables)
    if len(found) > 1:
        return [" ".join(_difference(found[0], found[1], task)) for task in tasks(found)]
    run = found[0]
    sentences = []
    for task in tasks(found):
        heads = f"{count(run.losing(task))} of {plural(run.known(task), 'head')} ({run.share(task)})"
        parts = [f"{heads} lose focus on {task}."]
        if first := run.first(task)[:3]:
            parts.append(f"{'Layers' if len(first) > 1 else 'Layer'} {joined(first)} first.")
        if (error := run.error(task)) is not None:
            limit, off = count(run.setting["fit_up_to"][task]), nats(error[1]["entropy"]["median"])
            parts.append(
                f"Forecast from {limit} to {count(error[0])} {run.unit(task)}: off by {off} nats (median head)."
            )
        sentences.append(" ".join(parts))
    return sentences


def _difference(before: ProbeRun, after: ProbeRun, task: str) -> Iterator[str]:
    many = [
        f"{count(run.losing(task))} of {count(run.known(task))} ({run.share(task)}) in {run.letter} ({run.name})"
        for run in (before, after)
    ]
    yield f"On {task}, heads that lose focus: {many[0]}, {many[1]}."
    if _same_heads([before, after], task):
        pairs = [(one, after.heads(task)[name]) for name, one in before.heads(task).items()]
        ends = [tuple(head.get(end) for head in pair for end in ("slope_low", "slope_high")) for pair in pairs]
        known = [four for four in ends if None not in four]
        lower, higher = sum(four[3] < four[0] for four in known), sum(four[2] > four[1] for four in known)
        yield (
            f"Slope lower in B in {count(lower)}, higher in {count(higher)} of {count(len(known))} heads; in the "
            "others the 95% intervals overlap."
        )
    ways = [measured_on(run, task) for run in (before, after)]
    if ways[0] != ways[1]:
        yield f"Measured differently: A on {ways[0]}, B on {ways[1]}."


def notes(found: Sequence[ProbeRun]) -> list[str]:
    """The verdict that the run itself printed, with numbers that tables do not have."""
    return [(f"{run.letter}: " if run.letter else "") + str(one) for run in found for one in run.tables["verdict"]]


def _arrow(values: Sequence[str], unit: str = "") -> str:
    return " → ".join(values) + (f" {unit}" if unit else "")


def metrics(found: Sequence[ProbeRun], task: str) -> list[Metric]:
    """Heads that lose focus, the first layer, the median horizon, and the error of the forecast."""
    pair = len(found) > 1
    which = " (A → B)" if pair else ""
    of, detail = "", f"of {joined([count(run.known(task)) for run in found])}"
    if not pair:
        kinds, of = found[0].kinds(task), f" {detail}"
        detail = joined([f"{kinds[kind]:,} {kind}" for kind in in_order(kinds)])
    metrics = [Metric(_arrow([count(run.losing(task)) for run in found]) + of, f"heads lose focus{which}", detail)]
    firsts = [next(iter(run.first(task)), None) for run in found]
    if any(firsts):
        slopes = [
            signed(run.table("layers", task)[first]["slope"] if first else None)
            for run, first in zip(found, firsts, strict=True)
        ]
        layers = f"layer {_arrow([first or NOTHING for first in firsts])}"
        metrics.append(Metric(layers, f"disperses first{which}", f"mean slope {_arrow(slopes)}; 1: ln n"))
    known = [run.horizons(task) for run in found]
    if pair and _same_heads(found, task):
        # Compared on the same heads; else a run that loses its near horizons would look worse.
        shared = set.intersection(*map(set, known))
        known = [{name: one[name] for name in shared} for one in known]
    if min(map(len, known)) >= (5 if pair else 1):
        values = _arrow([whole(median(one.values())) for one in known], "tokens")
        many = " and ".join(dict.fromkeys(count(len(one)) for one in known))
        detail = f"top weight below ½ from there on; {many} heads"
        metrics.append(Metric(values, f"median measured horizon{which}", detail))
    errors = [run.error(task) for run in found]
    if any(errors):
        values = _arrow([in_words(error[1]["entropy"]["median"] if error else None, nats) for error in errors], "nats")
        tested = {f"at {count(one[0])} {run.unit(task)}" for run, one in zip(found, errors, strict=True) if one}
        metrics.append(Metric(values, f"median error of the forecast{which}", f"of entropy, {joined(sorted(tested))}"))
    return metrics


def _titled(title: str, run: ProbeRun) -> str:
    return f"{title}: {run.label}" if run.letter else title


def _kinds_table(found: Sequence[ProbeRun], task: str) -> Table:
    counts = [run.kinds(task) for run in found]
    medians = []
    for run in found:
        slopes: dict[str, list[float]] = {}
        for about in run.heads(task).values():
            if about["slope"] is not None:
                slopes.setdefault(str(about["kind"]), []).append(about["slope"])
        medians.append({kind: median(values) for kind, values in slopes.items()})
    letters = [f", {run.letter}" if run.letter else "" for run in found]
    return Table(
        "Kinds of heads",
        f"{'; '.join(dict.fromkeys(measured_on(run, task) for run in found))}. Slope: of entropy against ln n.",
        cells("kind", *(f"heads{letter}" for letter in letters), *(f"median slope{letter}" for letter in letters)),
        [
            cells(_kind_name(kind), *(count(one[kind]) for one in counts), *(signed(one.get(kind)) for one in medians))
            for kind in in_order(kind for known in counts for kind in known)
        ],
    )


def _heads_table(run: ProbeRun, task: str) -> Table | None:
    known = {
        name: about
        for name, about in run.heads(task).items()
        if about["slope"] is not None and about["kind"] in LOSES_FOCUS
    }
    shown = sorted(known, key=lambda name: -known[name]["slope"])[:_SHOWN_HEADS]
    if not shown:
        return None
    rows = []
    for name in shown:
        about = known[name]
        ends = [about["curve"][size] for size in (*sizes(about["curve"])[:1], *sizes(about["curve"])[-1:])]
        effective = _arrow([keys(one.get("effective")) for one in ends])
        top = _arrow([weight(one.get("top")) for one in ends])
        rows.append(cells(name, str(about["kind"]), slope_words(about), effective, top, horizon_words(about)))
    some = "All, the largest slopes first"
    if len(known) > _SHOWN_HEADS:
        some = f"{_SHOWN_HEADS} of {count(len(known))}, the largest slopes"
    return Table(
        _titled("Heads that lose focus most", run),
        f"{some}, with 95% intervals. From the smallest to the largest size: effective number of keys (e^entropy) "
        "and top weight.",
        cells("layer.head", "kind", "slope", "effective keys", "top weight (%)", "horizon"),
        rows,
    )


def _layers_table(run: ProbeRun, task: str) -> Table | None:
    table = run.table("layers", task)
    if not table:
        return None
    kinds, order = in_order(kind for row in table.values() for kind in row["kinds"]), run.ranked(task)
    rows = []
    for layer in [*order, *(layer for layer in table if layer not in order)]:
        row, rank = table[layer], count(table[layer]["rank"]) if layer in order else NOTHING
        heads = [Cell(count(row["kinds"].get(kind, 0)), faint=not row["kinds"].get(kind)) for kind in kinds]
        weights = cells(weight(row["top"]), weight(row["sink"]))
        rows.append([*cells(layer, rank, signed(row["slope"])), *heads, *weights])
    return Table(
        _titled("Layers, the first to disperse on top", run),
        "Ranked by the mean slope of their heads; layers count from 0. Weights: means over heads at the largest size.",
        cells("layer", "rank", "mean slope", *map(_kind_name, kinds), "top weight (%)", "first token (%)"),
        rows,
    )


def _errors_table(run: ProbeRun, task: str) -> Table | None:
    table = run.table("forecast", task)
    if not table.get("tested"):
        return None
    unit, rows = run.unit(task), []
    for size in sizes(table["tested"]):
        one = table["tested"][size]
        entropy, top = one["entropy"], one["top"]
        errors = nats(entropy["median"]), nats(entropy["p90"]), signed(entropy["bias"])
        weights = weight(top["median"]), weight(top["p90"]), points(100.0 * top["bias"])
        rows.append(cells(count(size), *errors, *weights, count(one["heads"])))
    spread = "90% of heads", "bias"
    return Table(
        _titled("Error of the forecast", run),
        f"{capital(str(table['method']))}; fitted on {', '.join(map(count, table.get('fitted') or []))} {unit}, "
        "then measured. Absolute errors over heads; bias is positive where the forecast is too high.",
        cells(f"size ({unit})", "entropy, median (nats)", *spread, "top weight, median (%)", *spread, "heads"),
        rows,
    )


def _methods_table(run: ProbeRun, task: str) -> Table | None:
    table, error = run.table("forecast", task).get("methods") or {}, run.error(task)
    if not table or error is None:
        return None
    size, used = error[0], run.table("forecast", task)["method"]
    rows = []
    for name, about in table.items():
        tested = ((about["tested"].get(size) or {}).get("entropy") or {}).get("median")
        first = Cell(name, "used" if name == used else "", strong=name == used)
        rows.append([first, *cells(in_words(about.get("decided_by"), nats), in_words(tested, nats))])
    return Table(
        _titled("Forecast methods", run),
        "Median errors of entropy in nats. The method with the smallest error at the largest fitted size, forecast "
        f"from those below it, is used; the errors at {count(size)} {run.unit(task)} do not enter the choice.",
        cells("method", "largest fitted size", f"{count(size)} {run.unit(task)}"),
        rows,
    )


def _chain_table(found: Sequence[ProbeRun], task: str) -> Table | None:
    known = [(run, chain) for run in found if (chain := run.table("chain", task))]
    if not known:
        return None
    return Table(
        "From one layer to the next",
        "Correlation of a layer's mean slope with that of the next layer, with its 95% interval.",
        cells("run" if found[0].letter else "model", "correlation", "pairs of layers"),
        [
            [Cell(run.label), Cell(signed(one["next"]), _between(one["low"], one["high"])), Cell(count(one["pairs"]))]
            for run, one in known
        ],
    )


def _figures(found: Sequence[ProbeRun], task: str) -> Iterator[Figure]:
    who = "; ".join(run.label for run in found)
    losing = joined([f"{count(run.losing(task))} of {count(run.known(task))}{run.which}" for run in found])
    letters = ", ".join(map(_kind_name, in_order(kind for run in found for kind in run.kinds(task))))
    pair = " Last map: slope of B − A, ≠ where the kind changes." if len(found) > 1 and _same_heads(found, task) else ""
    some = len(_curve_heads(found, task)) < len({name for run in found for name in run.heads(task)})
    yield Figure(
        f"heads-{task}",
        f"Heads that lose focus on {task}: {losing}",
        f"{who}. One cell per head. Letter: kind ({letters}). Colour: slope of entropy against ln n; 1 (red): "
        f"as uniform attention, 0: constant, below 0 (blue): sharper. Click a head for its curves.{pair}"
        + (" Curves: the heads that change most." if some else ""),
        f"Map of all heads with their kind and slope: {losing} lose focus.",
        partial(_map_chart, found, task),
    )
    fit = joined(sorted({run.sampled(task) for run in found}))
    rows = "last token of each prompt; " if all(run.setting["rows"] == "last" for run in found) else ""
    yield Figure(
        f"curves-{task}",
        "One head by number of keys",
        f"{who}. Means over prompts; {rows}dotted: the bounds ln n and 1/n; dashed: forecast from sizes up to "
        f"{fit}. Horizon: where the top weight falls below ½ for good.",
        f"Entropy and top weight of a head against the number of keys; first shown: {chosen(found, task)}.",
        partial(_curves_chart, found, task),
    )
    firsts = joined([f"layer {run.first(task)[0]}{run.which}" for run in found if run.first(task)])
    yield Figure(
        f"layers-{task}",
        f"First to disperse: {firsts}" if firsts else "No layer disperses on average",
        f"{who}. One point per head; line: mean of the layer. Slope 1: as uniform attention, 0: none.",
        "Slopes of entropy against ln n by layer.",
        partial(_layers_chart, found, task),
    )
    tested = [(run, error) for run in found if (error := run.error(task)) is not None]
    if tested:
        errors = joined([f"{nats(error[1]['entropy']['median'])} nats{run.which}" for run, error in tested])
        where = "; ".join(
            f"{run.label}, fitted up to {count(run.setting['fit_up_to'][task])}, measured at {count(error[0])} "
            f"{run.unit(task)}"
            for run, error in tested
        )
        yield Figure(
            f"forecast-{task}",
            f"Forecast of entropy: median error {errors}",
            f"{where}. One point per head; dotted: exact.",
            "Measured against forecast entropy and top weight, a point for each head.",
            partial(_forecast_chart, tested, task),
        )


def _forecast_and_measured(about: Head, size: str, field: str) -> list[float | None]:
    return [((about.get(kind) or {}).get(size) or {}).get(field) for kind in ("forecast", "curve")]


def _map_row(run: ProbeRun, task: str, name: str) -> dict[str, Any]:
    about, (layer, head) = run.heads(task)[name], _place(name)
    row = {"head": name, "x": head, "y": layer, "value": about["slope"], "letter": letter_of(str(about["kind"]))}
    row |= {"kind": str(about["kind"]), "slope": slope_words(about), "horizon": horizon_words(about)}
    # What is known at the largest size.
    known = [size for size in sizes(about["curve"]) if about["curve"][size].get("count") is not None]
    last = about["curve"][known[-1]] if known else {}
    row["n"] = in_words(last.get("count"), count)
    row["entropy"] = in_words(last.get("entropy"), nats)
    row["effective"] = keys(last.get("effective"))
    row |= {part: weight(last.get(part)) for part in ("top", "sink", "local")}
    row["spread"] = in_words(last.get("spread"), nats)
    if (error := run.error(task)) is not None:
        forecast, measured = _forecast_and_measured(about, error[0], "entropy")
        row["off"] = signed(None if forecast is None or measured is None else forecast - measured)
    return row


def _map_chart(found: Sequence[ProbeRun], task: str) -> Any:
    maps = [(_variant(run, ""), [_map_row(run, task, name) for name in run.heads(task)]) for run in found]
    tips = charts.tooltip(
        head="layer.head", kind="kind", slope="slope of entropy against ln n", horizon="horizon",
        n="keys at the largest size", entropy="entropy (nats)",
        effective="effective keys", top="top weight (%)", sink="weight of the first token (%)",
        local="weight of the last 16 tokens (%)",
        spread="spread of the logits",
        **({"off": "forecast is off by (nats)"} if any(run.error(task) for run in found) else {}),
    )  # fmt: skip
    if len(found) > 1 and _same_heads(found, task):
        maps.append(("B − A", [_difference_row(found, task, name) for name in found[0].heads(task)]))
    panels = []
    for place, (title, rows) in enumerate(maps):
        known = tips if place < len(found) else charts.tooltip(head="layer.head", change="slope, B − A", kind="kind")
        look: dict[str, Any] = {"domain": (-1, 1), "tips": known, "diverging": True, "letters": len(rows) <= 1500}
        panels.append(charts.heat_panel(title, rows, "head", "layer", "slope of entropy against ln n", **look))
    minimum = 330 if len(panels) == 1 else 250
    return charts.figure(*panels, columns=len(panels), minimum=minimum, around=54, head=chosen(found, task))


def _difference_row(found: Sequence[ProbeRun], task: str, name: str) -> dict[str, Any]:
    one, other = (run.heads(task)[name] for run in found)
    apart = None if None in (one["slope"], other["slope"]) else other["slope"] - one["slope"]
    changed = one["kind"] != other["kind"]
    layer, head = _place(name)
    kind = f"{one['kind']} → {other['kind']}" if changed else str(one["kind"])
    row = {"head": name, "x": head, "y": layer, "value": apart, "letter": "≠" if changed else ""}
    return row | {"kind": kind, "change": signed(apart)}


def _curve_heads(found: Sequence[ProbeRun], task: str) -> list[str]:
    """The heads whose curves are on the page: all, or of a large model those that change most."""
    names = list(dict.fromkeys(name for run in found for name in run.heads(task)))
    most = max(1, _MAX_POINTS // max(1, sum(len(run.setting["sizes"][task]) for run in found)))
    if len(names) <= most:
        return names
    heads = found[0].heads(task)
    ranked = sorted(names, key=lambda name: -abs((heads.get(name) or {}).get("slope") or 0.0))
    return sorted(ranked[:most], key=_place)


def _curve_rows(run: ProbeRun, task: str, name: str) -> list[dict[str, Any]]:
    about = run.heads(task).get(name)
    if about is None:
        return []
    forecast, fitted = about.get("forecast") or {}, str(run.setting["fit_up_to"][task])
    rows = []
    for size in sizes(about["curve"]):
        cell = about["curve"][size]
        if cell.get("count") is not None:
            # The forecast begins at the last size it was fitted on.
            predicted = cell if size == fitted and forecast else forecast.get(size) or {}
            row = {"head": name, "variant": _variant(run, "measured"), "x": cell["count"]}
            row |= {"entropy": cell.get("entropy"), "top": cell.get("top")}
            rows.append(row | {"entropy_f": predicted.get("entropy"), "top_f": predicted.get("top")})
    return rows


def _variant(run: ProbeRun, alone: str) -> str:
    """The name of a run in a legend, which is `alone` without another run."""
    return run.label if run.letter else alone


def _curves_chart(found: Sequence[ProbeRun], task: str) -> Any:
    alt = charts.altair()
    names = _curve_heads(found, task)
    rows = [row for run in found for name in names for row in _curve_rows(run, task, name)]
    styles = {_variant(run, "measured"): _COLOURS[run.letter] for run in found}
    known = [row["x"] for row in rows] or [1.0, 2.0]
    low, high = max(1.0, min(known)), max(max(known), 2.0)
    ticks = [2**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)] or [round(high)]
    x = alt.X(
        "x:Q", title="keys n", scale=alt.Scale(type="log", base=2, domain=[low / 1.15, high * 1.15], nice=False),
        axis=alt.Axis(values=ticks, format=",d", labelOverlap="greedy", labelSeparation=5, grid=False),
    )  # fmt: skip
    values = charts.data(rows)
    bounds = [low * (high / low) ** (step / 24) for step in range(25)]
    horizons = []
    for run in found:
        for name, tokens in run.horizons(task).items():
            if name in names:
                row = {"head": name, "variant": _variant(run, "measured"), "x": tokens, "y": 0.5}
                horizons.append(row | {"horizon": horizon_words(run.heads(task)[name])})
    ours = f"datum.head === {charts.HEAD}"
    panels = []
    for field, title, domain, bound in (
        ("entropy", "entropy (nats)", (-0.2, 1.05 * math.log(high)), math.log),
        ("top", "top weight", (0.0, 1.03), lambda n: 1.0 / n),
    ):
        scale = alt.Scale(domain=list(domain), nice=False)
        y, y_f = (alt.Y(f"{name}:Q", title=title, scale=scale) for name in (field, f"{field}_f"))
        tips = charts.tooltip(variant="run", x="keys|,.0f", **{field: f"{title}|.3f", f"{field}_f": "forecast|.3f"})
        plot = charts.Plot(x, y, styles, tips)
        base = plot.base(values).transform_filter(ours)
        line = base.mark_line(strokeWidth=2).transform_filter(f"isValid(datum.{field})")
        dashed = base.mark_line(strokeWidth=1.6, strokeDash=[5, 3])
        forecast = dashed.encode(y=y_f).transform_filter(f"isValid(datum.{field}_f)")
        limit = alt.Chart(charts.data([{"x": n, "y": bound(n)} for n in bounds]))
        dotted = limit.mark_line(strokeDash=[2, 3], color=charts.SOFT, strokeWidth=1.2)
        height = alt.Y("y:Q", scale=scale, title=title)
        layers = [dotted.encode(x=x, y=height), line, forecast, plot.marked(base)]
        if field == "top":
            layers += charts.rule("y", 0.5)
            if horizons:
                tips = charts.tooltip(variant="run", horizon="horizon")
                mark = plot.base(charts.data(horizons)).transform_filter(ours)
                mark = mark.mark_point(shape="diamond", size=130, strokeWidth=2)
                layers.append(mark.encode(y=height, tooltip=tips))
        panels.append(charts.panel(title.partition(" (")[0].capitalize(), *layers))
    head = chosen(found, task)
    return charts.figure(*panels, names=list(styles), head=head if head in names else names[0], heads=names)


def _layers_chart(found: Sequence[ProbeRun], task: str) -> Any:
    heads, means = [], []
    for run in found:
        name = _variant(run, "mean of the layer")
        for head, about in run.heads(task).items():
            if about["slope"] is not None:
                row = {"variant": name, "x": _place(head)[0], "y": about["slope"], "head": head}
                heads.append(row | {"kind": str(about["kind"]), "slope": slope_words(about)})
        means += [
            {"variant": name, "x": int(layer), "y": row["slope"]}
            for layer, row in run.table("layers", task).items()
            if row["slope"] is not None
        ]
    styles = {_variant(run, "mean of the layer"): _COLOURS[run.letter] for run in found}
    last = max((row["x"] for row in heads), default=0)
    x = charts.axis("x", "layer", (-0.6, last + 0.6), values=list(range(last + 1)), format="d", grid=False)
    y, tips = (
        charts.axis("y", "slope of entropy against ln n"),
        charts.tooltip(head="layer.head", kind="kind", slope="slope"),
    )
    layers = [*charts.rule("y", 0.0), *charts.rule("y", 1.0)]
    layers.append(charts.Plot(x, y, styles, tips).points(heads, filled=False, size=16.0))
    if means:
        mean = charts.Plot(x, y, styles, charts.tooltip(variant="run", x="layer", y="mean slope|+.2f"))
        layers += [*mean.lines(means), mean.points(means)]
    return charts.figure(charts.panel("", *layers, height=300), columns=1, names=list(styles))


def _forecast_chart(tested: Sequence[tuple[ProbeRun, Any]], task: str) -> Any:
    alt = charts.altair()
    styles = {_variant(run, "head"): _COLOURS[run.letter] for run, _ in tested}
    panels = []
    for field, title in (("entropy", "entropy (nats)"), ("top", "top weight")):
        rows = []
        for run, (size, _) in tested:
            for head, about in run.heads(task).items():
                forecast, measured = _forecast_and_measured(about, size, field)
                if forecast is not None and measured is not None:
                    rows.append({"variant": _variant(run, "head"), "x": forecast, "y": measured, "head": head})
        most = max((value for row in rows for value in (row["x"], row["y"])), default=1.0)
        domain = (-0.03 * most, 1.05 * most)
        tips = charts.tooltip(head="layer.head", x="forecast|.3f", y="measured|.3f")
        x, y = charts.axis("x", f"forecast {title}", domain), charts.axis("y", "measured", domain)
        plot = charts.Plot(x, y, styles, tips)
        diagonal = alt.Chart(charts.data([{"x": one, "y": one} for one in domain]))
        exact = diagonal.mark_line(strokeDash=[2, 3], color=charts.SOFT).encode(x=x, y=y)
        panels.append(charts.panel(title.partition(" (")[0].capitalize(), exact, plot.points(rows, size=18.0)))
    return charts.figure(*panels, names=list(styles))


def _method(found: Sequence[ProbeRun]) -> list[str]:
    tables = [run.table("forecast", task) for run in found for task in tasks(found)]
    methods = sorted({str(table["method"]) for table in tables if table})
    forecast = ""
    if methods:
        forecast = (
            f" The forecast ({joined(methods)}) uses the small sizes only; its error is measured at sizes it never saw."
        )
    return [
        "The attention weights of every head are measured while prompts grow, without storing an attention matrix: "
        "entropy H in nats, top weight, weight of the first token and of the last 16, and the spread of the "
        "logits. e^H is the effective number of keys.",
        "Slope: of H against ln n, where n is the number of keys a head sees; 1 is dispersion as fast as uniform "
        "attention, 0 none. Intervals are 95% intervals. Measured horizon: the n at which the top weight falls "
        f"below ½ for good.{forecast}",
    ]


def _definitions(found: Sequence[ProbeRun]) -> list[tuple[str, Pairs]]:
    rules = {kind: rule for run in found for kind, rule in (run.setting.get("kind_rule") or {}).items()}
    models = []
    for run in found:
        setting = run.setting
        words = [
            f"{setting['family']} family",
            f"{plural(setting['layers'], 'layer')} of {plural(setting['heads'], 'head')}",
            f"context of {count(setting['context'])} tokens" if setting.get("context") else "",
            f"policy {setting['policy']}" if setting.get("policy") else "no policy",
            f"{setting['dtype']} on {setting['device']}",
            f"rows: {setting['rows']}",
        ]
        models.append((run.label, ", ".join(filter(None, words))))
    return [
        ("Kinds of heads", [(_kind_name(kind), capital(str(rule))) for kind, rule in rules.items()]),
        ("Models", models),
    ]
