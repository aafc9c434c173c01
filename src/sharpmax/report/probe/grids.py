"""The tables of `sharpmax probe`: kinds, layers, heads, the error of the forecast, and how layers go together."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from sharpmax.report.grid import NOTHING, Cell, Grid
from sharpmax.report.probe.facts import LOSES_FOCUS, Run, forecast_error, runs
from sharpmax.report.probe.kinds import in_order, letter_of
from sharpmax.report.probe.numbers import keys, said, signed, weight
from sharpmax.report.probe.told import horizon_words, slope_words
from sharpmax.report.tables import Tables, readable, sizes
from sharpmax.report.words import capital, count, nats, points

__all__ = ["grids"]

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
