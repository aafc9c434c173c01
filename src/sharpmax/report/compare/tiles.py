"""The few numbers of a comparison that a reader in a hurry should take away."""

from __future__ import annotations

from sharpmax.report.compare.facts import (
    SOFTMAX,
    cell,
    gap,
    largest,
    leader,
    level_with,
    loss_of,
    methods,
    place_of,
    sizes_of,
)
from sharpmax.report.compare.models import deep, end_of, end_words, exponent_text, exponents, models_of
from sharpmax.report.tables import Tables
from sharpmax.report.tile import Tile
from sharpmax.report.words import count, percent, plural, points, share

__all__ = ["capacity_tiles", "league_tiles"]

_EXPONENTS = 2
"""Exponents that have a tile of their own: with more, tiles would not fill their rows."""


def league_tiles(tables: Tables) -> list[Tile]:
    """The leader at the largest size, softmax there, what softmax loses to dispersion, and the leader to ranking."""
    first, last = leader(tables), largest(tables)
    where = f"at {count(last)} {tables['setting']['unit']}"
    best = percent(cell(tables, "accuracy", first, last)["mean"])
    others = len(level_with(tables))
    doubt = f"; not shown to be ahead of {plural(others, 'other')}" if others else ""
    found = [Tile(best, f"{first}, the most right {where}", f"rank {place_of(tables, first)} of the league{doubt}")]
    if SOFTMAX in methods(tables) and first != SOFTMAX:
        ahead = gap(tables, first, SOFTMAX, last)
        reach = (
            "one seed" if ahead.low is None or ahead.high is None else f"{points(ahead.low)} to {points(ahead.high)}"
        )
        plain = percent(cell(tables, "accuracy", SOFTMAX, last)["mean"])
        found.append(Tile(f"{points(ahead.mean)} points", f"{first} against softmax ({plain})", reach))
    for name in dict.fromkeys([SOFTMAX if SOFTMAX in methods(tables) else methods(tables)[-1], first]):
        loss = loss_of(tables, name, last)
        if loss is not None:
            kinds = sorted(zip((max(0.0, value) for value in loss), ("dispersion", "wrong ranking"), strict=True))
            (less, other), (most, kind) = kinds
            found.append(
                Tile(f"{share(most)} points", f"{name} loses to {kind}", f"and {share(less)} to {other}, {where}")
            )
    return found


def capacity_tiles(tables: Tables, method: str) -> list[Tile]:
    """The range of sizes at which accuracy halves, the exponents of the law, and how good the forecast of layers is."""
    models, law = models_of(tables, method), tables["laws"][method]["accuracy"]
    inside = [model for model in models if isinstance(end_of(model, "accuracy"), float)]
    found = []
    if inside:
        ends = sorted(inside, key=lambda model: float(end_of(model, "accuracy") or 0.0))
        value = " to ".join(dict.fromkeys(end_words(tables, model, "accuracy") for model in (ends[0], ends[-1])))
        found.append(
            Tile(
                value,
                f"{tables['setting']['unit']} at which accuracy halves",
                f"{len(inside)} of {plural(len(models), 'model')}",
            )
        )
    else:
        found.append(
            Tile(plural(len(models), "model"), "whose accuracy does not halve at a size tested", _tested(tables))
        )
    steepest = sorted(exponents(law).items(), key=lambda pair: -abs(pair[1]["mean"]))
    for name, one in steepest[:_EXPONENTS]:
        reach = "one seed: no interval"
        if one["low"] is not None:
            reach = f"{exponent_text(one['low'])} to {exponent_text(one['high'])}"
            reach += "; not shown to matter" if one["low"] <= 0.0 <= one["high"] else ""
        found.append(Tile(f"{name}^{exponent_text(one['mean'])}", f"how that size goes with {name}", reach))
    if known := deep(tables, method):
        same = sum(one["first_measured"] == one["first_forecast"] for one in known.values())
        found.append(
            Tile(f"{same} of {len(known)}", "deep models disperse first in the layer forecast", "from sizes up to 64")
        )
    return found


def _tested(tables: Tables) -> str:
    known = sizes_of(tables)
    return f"{count(known[0])} to {count(known[-1])}"
