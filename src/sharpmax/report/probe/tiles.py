"""The few numbers of a probed model that a reader in a hurry should take away."""

from __future__ import annotations

from statistics import median

from sharpmax.report.grid import NOTHING
from sharpmax.report.probe.facts import Run, forecast_error, runs
from sharpmax.report.probe.kinds import in_order
from sharpmax.report.probe.maps import same_shape
from sharpmax.report.probe.numbers import said, signed
from sharpmax.report.tables import Tables
from sharpmax.report.tile import Tile
from sharpmax.report.words import count, joined, nats, whole

__all__ = ["tiles"]

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
