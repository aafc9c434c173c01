"""The few numbers of a recipe that a reader in a hurry should take away."""

from __future__ import annotations

import math

from sharpmax.report.reproduce.facts import change, headline, horizon
from sharpmax.report.reproduce.looks import in_order, look, signal
from sharpmax.report.reproduce.tables import crossing, part, row
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.tile import Tile
from sharpmax.report.words import count, nats, percent, points, probability, whole_from_log10

__all__ = ["tiles"]


def tiles(tables: Tables, recipe: str) -> list[Tile]:
    """Up to four numbers: what plain softmax loses, what the fix gains, how focus is lost, where something ends."""
    found = [
        _change(tables, recipe, "accuracy", "accuracy of plain softmax"),
        _gain(tables, recipe),
        _horizon(tables, recipe) or _change(tables, recipe, "top_weight", "weight of the heaviest item, plain softmax"),
        _end(tables, recipe) or _detection(tables, recipe),
    ]
    return [tile for tile in found if tile]


def _change(tables: Tables, recipe: str, name: str, label: str) -> Tile | None:
    plain = change(row(tables, name, recipe, "softmax"))
    if not plain:
        return None
    ends = f"{percent(plain.first)} → {percent(plain.last)}"
    return Tile(ends, label, f"from {count(plain.small)} to {count(plain.large)} items")


def _horizon(tables: Tables, recipe: str) -> Tile | None:
    bounds = part(tables, "bounds", recipe)
    # Far beyond the sizes of the run the horizon is a bound that tells nobody anything.
    if not bounds or horizon(bounds) > 1.0 + math.log10(int(sizes(bounds["largest_weight"])[-1])):
        return None
    spread = nats(bounds["spread"]["mean"])
    detail = f"beyond it no item can hold half of the weight, with logits within {spread} nats"
    return Tile(f"{whole_from_log10(horizon(bounds))} items", "sharpness horizon", detail)


def _end(tables: Tables, recipe: str) -> Tile | None:
    fit, entropy = part(tables, "fit", recipe), row(tables, "entropy", recipe, "softmax")
    end = fit["paper_acts_on"][1] if fit else None
    if not entropy or end is None or (where := crossing(entropy, end)) is None:
        return None
    detail = f"from there on the mean entropy exceeds {nats(end)} nats and β = 1"
    return Tile(f"≈ {count(where)} items", "end of the paper's polynomial", detail)


def _detection(tables: Tables, recipe: str) -> Tile | None:
    table = part(tables, "detection", recipe) or {}
    known = {name: cells["pooled"] for name, cells in table.items() if cells.get("pooled", {}).get("auroc") is not None}
    if not known:
        return None
    best = max(in_order(known), key=lambda name: known[name]["auroc"])
    detail = f"by {signal(best).subject}; 0.5 is chance, 1 is certainty"
    return Tile(f"AUROC {known[best]['auroc']:.2f}", "telling wrong answers from right ones", detail)


def _gain(tables: Tables, recipe: str) -> Tile | None:
    fix = headline(tables, recipe)
    if not fix:
        return None
    loss = bool(fix.worse) and not fix.better
    n = fix.worst if loss else fix.best
    p = fix.p[n]
    if not fix.tested:
        sure = "a single seed, no test"
    elif p is None:
        sure = "no difference"
    else:
        sure = probability(p) if n in (*fix.better, *fix.worse) else f"not shown to differ from zero, {probability(p)}"
    return Tile(
        f"{points(fix.gains[n])} points",
        f"largest {'loss' if loss else 'gain'} of {look(fix.arm).subject}",
        f"at {count(n)} items ({sure})",
    )
