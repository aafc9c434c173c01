"""The tables of a league: who stands where, and what each method loses to what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.compare.facts import (
    cell,
    largest,
    leader,
    loss_of,
    measured,
    methods,
    place_of,
    shown_sizes,
)
from sharpmax.report.grid import NOTHING, Cell, Grid
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import count, nats, plural, share

__all__ = ["causes_grid", "league_grid", "near_ties_grid"]


def league_grid(tables: Tables) -> Grid:
    """Rank, score and accuracies of every method, and what its training took."""
    with readable("the league", tables):
        setting, last = tables["setting"], largest(tables)
        scored = setting["scored_sizes"]
        span = f"{count(scored[0])} to {count(scored[-1])}" if len(scored) > 1 else count(scored[0])
        return Grid(
            f"Accuracy (%) of {setting['model']} on {setting['task']}",
            f"By the mean accuracy at {span} {setting['unit']}; methods that a paired test over seeds cannot tell from "
            f"the first of their group share its rank (=). {_intervals(tables)} If hard: what attention to the item "
            "with the largest weight alone would get right; ranked first: how often that is the right item.",
            [
                Cell("method"), Cell("rank"), Cell("mean", f"at {span}"),
                *(Cell(count(n), setting["unit"]) for n in shown_sizes(tables)),
                Cell("if hard", f"at {count(last)}"), Cell("ranked first", f"at {count(last)}"),
                Cell("training", "seconds"), Cell("memory", "MB"),
            ],
            [_place(tables, method) for method in methods(tables)],
        )  # fmt: skip


def causes_grid(tables: Tables) -> Grid:
    """What each method loses at the largest size, and to what."""
    with readable("the losses", tables):
        last = largest(tables)
        near = measured(tables, "close")
        return Grid(
            f"Dispersion or wrong ranking, at {count(last)} {tables['setting']['unit']}",
            "Points of accuracy that are missing from 100: to dispersion, where hard attention to the same scores "
            "would be right (below 0 where it would be right less often), and to wrong ranking, where it would not. "
            "The largest weight and the entropy are means over the rows of the last layer.",
            [
                Cell("method"), Cell("accuracy", "%"), Cell("if hard", "%"), Cell("lost to dispersion", "points"),
                Cell("lost to wrong ranking", "points"), Cell("ranked first", "%"),
                *([Cell("ranked first in near-ties", "%")] if near else []),
                Cell("largest weight", "%"), Cell("entropy", "nat"),
            ],
            [_cause(tables, method, last, near=near) for method in methods(tables)],
        )  # fmt: skip


def near_ties_grid(tables: Tables) -> Grid | None:
    """How often the right item is ranked first where another is nearly as good, size by size."""
    if not measured(tables, "close"):
        return None
    with readable("the near-ties", tables):
        chosen = shown_sizes(tables)
        return Grid(
            "Near-ties: right item ranked first (%)",
            "Only the half of the examples whose best two items are least apart. A method that ranks these wrongly "
            f"cannot be helped by sharpening. {_intervals(tables)}",
            [Cell("method"), *(Cell(count(n), tables["setting"]["unit"]) for n in chosen)],
            [[Cell(method), *(_mean(cell(tables, "close", method, n)) for n in chosen)] for method in methods(tables)],
        )


def _place(tables: Tables, method: str) -> list[Cell]:
    training, last = tables["training"][method], largest(tables)
    first = method == leader(tables)
    gone = training["diverged"]
    memory = training["memory"]
    return [
        Cell(method, f"diverged: {len(gone)} of {plural(len(tables['setting']['seeds']), 'seed')}" if gone else ""),
        Cell(place_of(tables, method), strong=place_of(tables, method).rstrip("=") == "1"),
        _mean(tables["league"][method]["score"]),
        *(_mean(cell(tables, "accuracy", method, n), strong=first and n == last) for n in shown_sizes(tables)),
        _mean(cell(tables, "hard", method, last)),
        _mean(cell(tables, "ranking", method, last)),
        Cell(f"{training['seconds']:,.1f}"),
        Cell(NOTHING, faint=True) if memory is None else Cell(f"{memory / 1e6:,.0f}"),
    ]


def _cause(tables: Tables, method: str, size: str, *, near: bool) -> list[Cell]:
    loss = loss_of(tables, method, size)
    nothing = Cell(NOTHING, faint=True)
    spread, wrong = (nothing, nothing) if loss is None else (_lost(value, max(loss)) for value in loss)
    return [
        Cell(method), _short(cell(tables, "accuracy", method, size)), _short(cell(tables, "hard", method, size)),
        spread, wrong, _short(cell(tables, "ranking", method, size)),
        *([_short(cell(tables, "close", method, size))] if near else []),
        _short(cell(tables, "top_weight", method, size)), _nats(cell(tables, "entropy", method, size)),
    ]  # fmt: skip


def _lost(value: float, most: float) -> Cell:
    return Cell(f"{value:.1f}".replace("-0.0", "0.0").replace("-", "−"), strong=value == most and value >= 1.0)


def _intervals(tables: Tables) -> str:
    seeds = len(tables["setting"]["seeds"])
    if seeds == 1:
        return "One seed: no intervals, and ranks are by the mean alone."
    return f"Below means Student's 95% intervals over {plural(seeds, 'seed')}."


def _mean(one: Mapping[str, Any], *, strong: bool = False) -> Cell:
    if one["mean"] is None:
        return Cell(NOTHING, faint=True)
    if one["low"] is None:
        return Cell(share(one["mean"]), strong=strong)
    return Cell(share(one["mean"]), f"{share(max(0.0, one['low']))}–{share(min(100.0, one['high']))}", strong=strong)


def _short(one: Mapping[str, Any]) -> Cell:
    return Cell(NOTHING, faint=True) if one["mean"] is None else Cell(share(one["mean"]))


def _nats(one: Mapping[str, Any]) -> Cell:
    return Cell(NOTHING, faint=True) if one["mean"] is None else Cell(nats(one["mean"]))
