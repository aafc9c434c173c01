"""The figure of failure detection: how well wrong answers are told from right ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.report.axes import size_axis
from sharpmax.report.looks import SOFT
from sharpmax.report.plot import Axis, Mark, Panel, Plot, Series
from sharpmax.report.reproduce.facts import trust
from sharpmax.report.reproduce.looks import in_order, signal
from sharpmax.report.reproduce.plots.axes import note
from sharpmax.report.reproduce.tables import part
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.words import count

__all__ = ["detection"]

_LOWEST = 0.45
_HARDLY = 0.6


def detection(tables: Tables, recipe: str) -> Plot:
    """AUROC of each signal with its interval, chance, and the value over all sizes at the right."""
    table = part(tables, "detection", recipe)
    names = in_order(table)
    known = sizes(*table.values())
    pooled_at = 4.0 * int(known[-1])
    series = []
    for place, name in enumerate(names):
        # Neighbouring intervals would lie on top of one another.
        aside = 2.0 ** (0.14 * (place - (len(names) - 1) / 2))
        found = [n for n in sizes(table[name]) if table[name][n]["auroc"] is not None]
        series.append(_series(name, table[name], found, [int(n) * aside for n in found], "solid"))
        if "pooled" in table[name] and table[name]["pooled"]["auroc"] is not None:
            series.append(_series(name, table[name], ["pooled"], [pooled_at * aside], None))
    lows = [value for item in series for value in item.low or () if value is not None]
    floor = min([_LOWEST, *(low - 0.05 for low in lows)])
    told = {
        name: table[name]["pooled"]
        for name in names
        if "pooled" in table[name] and table[name]["pooled"]["auroc"] is not None
    }
    values = ", ".join(f"{signal(name).label} {cell['auroc']:.2f}" for name, cell in told.items())
    missing = [n for n in known if all(cells.get(n, {}).get("auroc") is None for cells in table.values())]
    return Plot(
        _title(table, told),
        note(tables, recipe, "answers of plain softmax", "bars: 95% bootstrap intervals"),
        "AUROC: how often a wrong answer looks more doubtful than a right one; 0.5 is chance, 1 is certainty. "
        + (f"At the right, over all sizes: {values}." if values else "")
        + (f" No value at {', '.join(map(count, missing))} items: no wrong answers to find." if missing else ""),
        f"AUROC against the number of items for {len(names)} signals. Over all sizes: {values or 'no value'}.",
        [
            Panel(
                size_axis(known, (pooled_at, "all sizes")),
                Axis("AUROC (0.5 = chance)", (max(0.0, floor), 1.01)),
                series,
                [Mark("y", 0.5, "chance", SOFT)],
                together=False,
            )
        ],
    )


def _title(table: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    found = trust(table.get("confidence", {}))
    if found and found.falls:
        small, large = count(found.small), count(found.large)
        how = "hardly" if found.last < _HARDLY else "less well"
        return f"Confidence tells wrong answers from right ones among {small} items, {how} among {large}"
    if told and all(cell["low"] > 0.5 for cell in told.values()):
        return "Wrong answers can be told from right ones"
    return "How well wrong answers are told from right ones"


def _series(name: str, cells: Mapping[str, Any], found: Sequence[str], x: Sequence[float], stroke: Any) -> Series:
    style = signal(name)
    return Series(
        style.label,
        style,
        x,
        [cells[n]["auroc"] for n in found],
        [_words(style.label, n, cells[n]) for n in found],
        [cells[n]["low"] for n in found],
        [cells[n]["high"] for n in found],
        stroke=stroke,
    )


def _words(label: str, n: str, cell: Mapping[str, Any]) -> str:
    where = "all sizes" if n == "pooled" else f"{count(n)} items"
    interval = f"{cell['low']:.3f} to {cell['high']:.3f}"
    answers = f"{count(cell['wrong'])} wrong, {count(cell['right'])} right"
    return f"{label}, {where}: {cell['auroc']:.3f} ({interval}; {answers})"
