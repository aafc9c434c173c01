"""The report section of `sharpmax probe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

from sharpmax.report.plot import Board, Plot
from sharpmax.report.section import NOTHING, Cell, Figure, Grid, Part, Story, Tile
from sharpmax.report.sections.probe_charts import (
    LOSES_FOCUS,
    Run,
    board,
    chosen,
    curves,
    forecast_error,
    forecasts,
    frame,
    heads_data,
    horizon_words,
    in_order,
    is_pair,
    keys,
    layers,
    letter_of,
    measured_on,
    runs,
    said,
    same_shape,
    signed,
    slope_words,
    tasks,
    weight,
)
from sharpmax.report.tables import RUNS, Tables, check_name, readable, sizes
from sharpmax.report.words import Pairs, capital, count, joined, nats, origin_of_run, percent, plural, points, whole

_SHOWN = 20


def grids(tables: Tables, task: str) -> list[Grid]:
    """Every table of a task that the runs have anything for."""
    with readable(f"the task {task}", tables):
        found = [grid for run in runs(tables) for grid in _of_run(run, task)]
        return [_kinds(runs(tables), task), *(grid for grid in found if grid), *_chain(runs(tables), task)]


def _of_run(run: Run, task: str) -> list[Grid | None]:
    return [_layers(run, task), _heads(run, task), _errors(run, task), _methods(run, task)]


def _titled(title: str, run: Run) -> str:
    return f"{title}: {run.label}" if run.letter else title


def _kinds(found: list[Run], task: str) -> Grid:
    counts = [run.kinds(task) for run in found]
    slopes = [_slopes_of_kinds(run, task) for run in found]
    return Grid(
        "Kinds of heads",
        "A rule for each kind stands under “How it was done”. With the median slope of the heads of a kind.",
        [
            Cell("kind"),
            *(Cell(f"heads{_in(run)}") for run in found),
            *(Cell(f"median slope{_in(run)}") for run in found),
        ],
        [
            [
                Cell(f"{letter_of(kind)} {kind}"),
                *(Cell(count(known[kind])) for known in counts),
                *(Cell(signed(known.get(kind))) for known in slopes),
            ]
            for kind in in_order(kind for known in counts for kind in known)
        ],
    )


def _slopes_of_kinds(run: Run, task: str) -> dict[str, float]:
    known: dict[str, list[float]] = {}
    for about in run.heads(task).values():
        if about["slope"] is not None:
            known.setdefault(str(about["kind"]), []).append(about["slope"])
    return {kind: median(slopes) for kind, slopes in known.items()}


def _layers(run: Run, task: str) -> Grid | None:
    table = run.layers(task)
    if not table:
        return None
    kinds = in_order(kind for cells in table.values() for kind in cells["kinds"])
    order = run.ranked(task)
    return Grid(
        _titled("Layers, those that disperse first on top", run),
        "Ranked by the mean slope of their heads; layers count from 0. Weights are means over heads at the largest "
        "size.",
        [
            *map(Cell, ("layer", "rank", "mean slope")),
            *(Cell(f"{letter_of(kind)} {kind}") for kind in kinds),
            Cell("top weight (%)"),
            Cell("first token (%)"),
        ],
        [
            [
                Cell(layer),
                Cell(count(table[layer]["rank"]) if layer in order else NOTHING),
                Cell(signed(table[layer]["slope"])),
                *(_few(table[layer]["kinds"].get(kind, 0)) for kind in kinds),
                Cell(weight(table[layer]["top"])),
                Cell(weight(table[layer]["sink"])),
            ]
            for layer in [*order, *(layer for layer in table if layer not in order)]
        ],
    )


def _heads(run: Run, task: str) -> Grid | None:
    heads = run.heads(task).items()
    known = {name: about for name, about in heads if about["slope"] is not None and about["kind"] in LOSES_FOCUS}
    shown = sorted(known, key=lambda name: -known[name]["slope"])[:_SHOWN]
    if not shown:
        return None
    some = f"The {_SHOWN} of {count(len(known))}" if len(known) > _SHOWN else "All of them"
    return Grid(
        _titled("Heads that lose focus most", run),
        f"{some}, the largest slopes on top, with 95% intervals. From the smallest to the largest size: how many keys "
        "effectively share the weight (e to the power of the entropy), and the top weight. The horizon is measured.",
        [Cell(text) for text in ("layer.head", "kind", "slope", "keys that share", "top weight (%)", "horizon")],
        [_head(name, known[name]) for name in shown],
    )


def _head(name: str, about: Mapping[str, Any]) -> list[Cell]:
    ends = [about["curve"][size] for size in (*sizes(about["curve"])[:1], *sizes(about["curve"])[-1:])]

    def change(statistic: str, words: Any) -> str:
        values = [cell.get(statistic) for cell in ends]
        return " → ".join(words(value) for value in values)

    return [
        Cell(name),
        Cell(str(about["kind"])),
        Cell(slope_words(about)),
        Cell(change("effective", keys)),
        Cell(change("top", weight)),
        Cell(horizon_words(about)),
    ]


def _errors(run: Run, task: str) -> Grid | None:
    table = run.forecast(task)
    if not table.get("tested"):
        return None
    fitted = [count(size) for size in table.get("fitted") or []]
    unit = run.unit(task)
    return Grid(
        _titled("Error of the forecast", run),
        f"{capital(str(table['method']))}; fitted on {', '.join(fitted)} {unit}, then measured. Absolute errors over "
        "heads, and the bias: positive where too much was foretold.",
        [
            Cell(f"size ({unit})"),
            Cell("entropy, median (nats)"),
            Cell("90% of heads"),
            Cell("bias"),
            Cell("top weight, median (%)"),
            Cell("90% of heads"),
            Cell("bias"),
            Cell("heads"),
        ],
        [[Cell(count(size)), *_error_cells(table["tested"][size])] for size in sizes(table["tested"])],
    )


def _methods(run: Run, task: str) -> Grid | None:
    table, errors = run.forecast(task).get("methods") or {}, forecast_error(run, task)
    if not table or errors is None:
        return None
    size, chosen = errors[0], run.forecast(task)["method"]
    return Grid(
        _titled("Ways to forecast", run),
        "Median errors of entropy in nats. The one in bold does best at the largest size that the forecast may know, "
        f"foretold from those below it, and is used; how all of them do at {count(size)} {run.unit(task)} has no say.",
        [Cell("way"), Cell("largest known size"), Cell(f"{count(size)} {run.unit(task)}")],
        [
            [
                Cell(name, "used" if name == chosen else "", strong=name == chosen),
                Cell(said(about.get("decided_by"), nats), strong=name == chosen),
                Cell(said(((about["tested"].get(size) or {}).get("entropy") or {}).get("median"), nats)),
            ]
            for name, about in table.items()
        ],
    )


def _error_cells(cells: Mapping[str, Any]) -> list[Cell]:
    entropy, top = cells["entropy"], cells["top"]
    return [
        Cell(said(entropy["median"], nats), strong=True),
        Cell(said(entropy["p90"], nats)),
        Cell(signed(entropy["bias"])),
        Cell(weight(top["median"]), strong=True),
        Cell(weight(top["p90"])),
        Cell(said(top["bias"], lambda bias: points(100.0 * bias))),
        Cell(count(cells["heads"])),
    ]


def _chain(found: list[Run], task: str) -> list[Grid]:
    known = [run for run in found if run.chain(task)]
    if not known:
        return []
    return [
        Grid(
            "From one layer to the next",
            "Correlation of the mean slope of a layer with that of the layer after it: +1 where dispersion goes on, "
            "0 where one layer says nothing about the next.",
            [Cell("run" if found[0].letter else "model"), Cell("correlation"), Cell("pairs of layers")],
            [[Cell(run.label), _related(run.chain(task)), Cell(count(run.chain(task)["pairs"]))] for run in known],
        )
    ]


def _related(chain: Mapping[str, Any]) -> Cell:
    low, high = chain.get("low"), chain.get("high")
    return Cell(signed(chain["next"]), "" if low is None or high is None else f"{signed(low)} to {signed(high)}")


def _in(run: Run) -> str:
    return f", {run.letter}" if run.letter else ""


def _few(heads: int) -> Cell:
    return Cell(count(heads), faint=heads == 0)


_ALIKE = 0.01
"""Shares of heads that lie closer than this are called the same."""


def summary(tables: Tables) -> list[tuple[str, list[str]]]:
    """The verdict of a run; of two runs first what they differ in."""
    with readable("the summary", tables):
        found = runs(tables)
        verdicts = [(run.label if run.letter else "Verdict", _verdict(run)) for run in found]
        if len(found) == 1:
            return verdicts
        before, after = found
        differ = [_difference(before, after, task) for task in tasks(tables)]
        return [("The difference", differ), *verdicts]


def _verdict(run: Run) -> list[str]:
    return [str(sentence) for sentence in run.tables["verdict"]]


def _difference(before: Run, after: Run, task: str) -> str:
    shares = [run.losing(task) / max(1, run.known(task)) for run in (before, after)]
    apart = shares[1] - shares[0]
    alike = abs(apart) < _ALIKE
    word = "about the same share" if alike else "a smaller share" if apart < 0 else "a larger share"
    said = [
        f"On {task}, {word} of heads loses focus in B ({after.name}) {'as' if alike else 'than'} in A ({before.name}): "
        f"{_many(after, task)} against {_many(before, task)}."
    ]
    if same_shape([before, after], task):
        said.append(_head_by_head(before, after, task))
    ways = [measured_on(run, task) for run in (before, after)]
    if ways[0] != ways[1]:
        said.append(f"They were not measured alike, so take care: A on {ways[0]}, B on {ways[1]}.")
    return " ".join(said)


def _many(run: Run, task: str) -> str:
    n, total = run.losing(task), run.known(task)
    return f"{count(n)} of {plural(total, 'head')} ({percent(100.0 * n / max(1, total))})"


def _head_by_head(before: Run, after: Run, task: str) -> str:
    lower = higher = compared = 0
    for name, one in before.heads(task).items():
        other = after.heads(task)[name]
        ends = [about.get(end) for about in (one, other) for end in ("slope_low", "slope_high")]
        if None in ends:
            continue
        compared += 1
        lower += ends[3] < ends[0]
        higher += ends[2] > ends[1]
    if not compared:
        return "No slope is known in both."
    return (
        f"Head by head, the slope is lower in B in {count(lower)} and higher in {count(higher)} of {count(compared)}; "
        f"in the other {count(compared - lower - higher)} the 95% intervals overlap."
    )


_FEWEST = 5
"""Heads that medians of two runs are compared on."""


def tiles(tables: Tables, task: str) -> list[Tile]:
    """Up to four numbers: heads that lose focus, the layer that goes first, the horizon, the error of the forecast."""
    found = runs(tables)
    return [tile for make in (_losing, _first, _horizon, _forecast) if (tile := make(found, task))]


def _tile(found: list[Run], values: list[str], unit: str, label: str, detail: str) -> Tile:
    """A number with its unit; two of them leave no room for it, and it goes into the label."""
    if len(found) == 1:
        return Tile(f"{values[0]} {unit}", label, detail)
    # What belongs together is not broken over two lines.
    return Tile(" → ".join(values), f"{label}{f' ({unit})' if unit else ''}, A\u00a0→\u00a0B", detail)


def _losing(found: list[Run], task: str) -> Tile:
    totals = [count(run.known(task)) for run in found]
    values = [count(run.losing(task)) for run in found]
    if len(found) > 1:
        of = totals[0] if len(set(totals)) == 1 else joined(totals)
        return _tile(found, values, "", "heads that lose focus", f"of {of}")
    kinds = found[0].kinds(task)
    return Tile(
        f"{values[0]} of {totals[0]}",
        "heads lose focus as inputs grow",
        joined([f"{count(kinds[kind])} {kind}" for kind in in_order(kinds)]),
    )


def _first(found: list[Run], task: str) -> Tile | None:
    firsts = [run.first(task)[:1] for run in found]
    if not any(firsts):
        return None
    slopes = [
        f"{run.letter} {signed(run.layers(task)[first[0]]['slope']) if first else NOTHING}".strip()
        for run, first in zip(found, firsts, strict=True)
    ]
    detail = f"mean slope {', '.join(slopes)}; 1 is dispersion without end"
    if len(found) == 1:
        return Tile(f"layer {firsts[0][0]}", "disperses first", detail)
    return _tile(found, [first[0] if first else NOTHING for first in firsts], "", "first layer to disperse", detail)


def _horizon(found: list[Run], task: str) -> Tile | None:
    known = [run.horizons(task) for run in found]
    totals = [count(run.known(task)) for run in found]
    many = [f"{run.letter} {count(len(of))} of {n}" for run, of, n in zip(found, known, totals, strict=True)]
    heads = f"in the {joined(many).strip()} heads where that was seen"
    if len(found) > 1 and same_shape(found, task):
        # Runs are compared on the same heads, else one that loses its near horizons would look worse.
        shared = set.intersection(*map(set, known))
        known = [{name: of[name] for name in shared} for of in known]
        heads = f"in the {count(len(shared))} heads where that was seen in both"
    if min(map(len, known)) < (_FEWEST if len(found) > 1 else 1):
        return None
    values = [whole(median(of.values())) for of in known]
    return _tile(
        found, values, "tokens", "median measured horizon", f"the top weight falls under ½ there for good, {heads}"
    )


def _forecast(found: list[Run], task: str) -> Tile | None:
    errors = [(run, about) for run in found if (about := forecast_error(run, task))]
    medians = {run.letter: about["entropy"]["median"] for run, (_, about) in errors}
    if all(error is None for error in medians.values()):
        return None
    ends = {
        f"from up to {count(run.setting['fit_up_to'][task])} to {count(size)} {run.unit(task)}"
        for run, (size, _) in errors
    }
    values = [said(medians.get(run.letter), nats) for run in found]
    return _tile(found, values, "nats", "median error of the forecast", f"of entropy, {joined(sorted(ends))}")


def _tells(tables: Tables) -> bool:
    return is_pair(tables) or any(name.startswith("heads/") for name in tables)


def _figures(tables: Tables) -> list[Figure]:
    return [figure for task in tasks(tables) for figure in _of_task(tables, check_name(task, "task"))]


def _of_task(tables: Tables, task: str) -> list[Figure]:
    makers: dict[str, Callable[[], Plot | Board]] = {
        "heads": partial(board, tables, task),
        "curves": lambda: curves(frame(tables, task), chosen(tables, task)),
        "layers": partial(layers, tables, task),
    }
    if any(forecast_error(run, task) for run in runs(tables)):
        makers["forecast"] = partial(forecasts, tables, task)
    return [Figure(kind, task, f"{kind}-{task}", f"{kind}-{task}", make) for kind, make in makers.items()]


def _parts(tables: Tables) -> list[Part]:
    return [
        Part(
            task,
            f"Task {task}",
            _describe(tables, task),
            tiles(tables, task),
            grids(tables, task),
            {"heads": heads_data(tables, task), "runs": [run.label for run in runs(tables)]},
        )
        for task in tasks(tables)
    ]


def _describe(tables: Tables, task: str) -> str:
    said = {run.letter: measured_on(run, task) for run in runs(tables)}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{letter} {words}" for letter, words in said.items())


def _method(tables: Tables) -> dict[str, Any]:
    found = runs(tables)
    rules = {kind: rule for run in found for kind, rule in (run.setting.get("kind_rule") or {}).items()}
    methods = {str(run.forecast(task)["method"]) for run in found for task in tasks(tables) if run.forecast(task)}
    return {
        "compared": len(found) > 1,
        "rules": [(f"{letter_of(kind)} {kind}", capital(str(rule))) for kind, rule in rules.items()],
        "names": [run.name for run in found],
        "models": [(run.label, _model(run.setting)) for run in found],
        "forecast": joined(sorted(methods)),
    }


def _model(setting: Any) -> str:
    parts = [
        f"{setting['family']} family",
        f"{plural(setting['layers'], 'layer')} of {plural(setting['heads'], 'head')}",
        f"context of {count(setting['context'])} tokens" if setting.get("context") else "",
        f"policy {setting['policy']}" if setting.get("policy") else "no policy",
        f"{setting['dtype']} on {setting['device']}",
        f"rows: {setting['rows']}",
    ]
    return ", ".join(part for part in parts if part)


def _origins(tables: Tables) -> list[tuple[str, Pairs]]:
    if not is_pair(tables):
        return []
    return [
        (run.label, origin_of_run(saved["command"], saved["provenance"], saved["tables"]))
        for run, saved in zip(runs(tables), tables[RUNS], strict=True)
    ]


STORY = Story("probe", _tells, _figures, _parts, summary, _method, _origins, compares=True)
