"""The few numbers of an evaluation that a reader in a hurry should take away."""

from __future__ import annotations

from sharpmax.report.evaluate.facts import (
    accuracy,
    base,
    columns,
    gain,
    home,
    policies,
    tasks,
)
from sharpmax.report.tables import Tables, sizes
from sharpmax.report.texts import text_name
from sharpmax.report.tile import Tile
from sharpmax.report.words import count, percent, points, probability

__all__ = ["tiles"]


def tiles(tables: Tables) -> list[Tile]:
    """Up to four numbers: what is lost as inputs grow, and what the best policy gains and costs."""
    arm = max(policies(tables), key=lambda one: _mean_gain(tables, one), default=None)
    found = [_lost(tables, tasks(tables)[0] if arm is None else home(tables, arm))]
    if arm is not None:
        found += [_gain(tables, arm), _rise(tables, arm), _time(tables, arm)]
    return [tile for tile in found if tile]


def _mean_gain(tables: Tables, arm: str) -> float:
    return sum(gain(tables, task, arm).mean for task in tasks(tables))


def _lost(tables: Tables, task: str) -> Tile | None:
    cells = accuracy(tables, task, base(tables))
    small, large = sizes(cells)[0], sizes(cells)[-1]
    if small == large:
        return None
    ends = f"{percent(cells[small]['mean'])} → {percent(cells[large]['mean'])}"
    return Tile(ends, f"right answers as it comes, {task}", f"from size {count(small)} to size {count(large)}")


def _gain(tables: Tables, arm: str) -> Tile:
    task = home(tables, arm)
    found = gain(tables, task, arm)
    n = found.best
    before, after = (accuracy(tables, task, one)[n]["mean"] for one in (base(tables), arm))
    sure = probability(tables[f"paired/{task}"][arm][n]["p"])
    detail = f"at size {count(n)}: {percent(before)} → {percent(after)} ({sure})"
    return Tile(f"{points(found.points[n])} points", f"largest gain of {arm}, {task}", detail)


def _rise(tables: Tables, arm: str) -> Tile | None:
    known = columns(tables)
    if not known:
        return None
    rises = {column: tables["perplexity"][arm][column]["rise"] for column in known}
    worst = max(known, key=rises.__getitem__)
    return Tile(f"{points(rises[worst], 2)}%", f"largest rise of perplexity, {arm}", f"on {text_name(worst)}")


def _time(tables: Tables, arm: str) -> Tile | None:
    cells = tables.get("cost", {}).get(arm)
    if not cells:
        return None
    context = count(tables["setting"]["context"])
    detail = f"{cells['decode_ratio']:.2f}× to say one more; 1 is the model as it comes"
    return Tile(f"{cells['prefill_ratio']:.2f}×", f"time to read {context} tokens, {arm}", detail)
