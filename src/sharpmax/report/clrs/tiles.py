"""The few numbers of an examination that a reader in a hurry should take away."""

from __future__ import annotations

from sharpmax.report.clrs.facts import (
    LEARNT,
    TOUCHSTONE,
    base,
    gains,
    group_names,
    groups,
    lead,
    learnt,
    shown,
)
from sharpmax.report.tables import Tables
from sharpmax.report.tile import Tile
from sharpmax.report.words import percent, plural, points, probability

__all__ = ["tiles"]


def tiles(tables: Tables) -> list[Tile]:
    """Up to four numbers: right answers of the base and the leading arm, their difference, and the touchstone."""
    arm = lead(tables)
    found = [_mean(tables, group, arm) for group in groups(tables)]
    if arm is not None:
        found.append(_gain(tables, arm))
    return [*found, *_touchstone(tables)]


def _mean(tables: Tables, group: str, arm: str | None) -> Tile:
    cells = [tables["means"][one][group] for one in (base(tables), arm) if one is not None]
    who = base(tables) if arm is None else f"{base(tables)} → {arm}"
    over = plural(cells[0]["algorithms"], "algorithm")
    value = " → ".join(percent(cell["mean"]) for cell in cells)
    return Tile(value, f"right answers at {group_names(tables)[group]}", f"{who}, mean over {over}")


def _gain(tables: Tables, arm: str) -> Tile:
    group = groups(tables)[-1]
    gain = gains(tables, arm)[group]
    between = f"{points(gain['low'])} to {points(gain['high'])}, {probability(gain['p'])}"
    verdict = "" if shown(gain) else "; not shown to differ"
    return Tile(
        f"{points(gain['mean'])} points",
        f"{arm} against {base(tables)}, {group_names(tables)[group]}",
        between + verdict,
    )


def _touchstone(tables: Tables) -> list[Tile]:
    found = learnt(tables)
    if found is None:
        return []
    arm, low = min(found.items(), key=lambda pair: pair[1])
    verdict = "learnt by every arm" if low >= LEARNT else f"not learnt by {arm}"
    return [Tile(percent(low), f"“{TOUCHSTONE}” of the weakest arm", f"{verdict}; {LEARNT:.0f}% are asked for")]
