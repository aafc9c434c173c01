"""Names beside the ends of curves, moved apart as little as it takes to read them."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["apart"]


def apart(ends: Mapping[str, float], low: float, high: float, *, most: int, room: float = 0.058) -> dict[str, float]:
    """Where each name goes: in the order of the ends, at least `room` of the axis between two.

    >>> apart({"a": 50.0, "b": 50.0, "c": 0.0}, 0.0, 100.0, most=3, room=0.1)
    {'c': 0.0, 'b': 45.0, 'a': 55.0}
    """
    step = min(room, 1.0 / max(1, most - 1)) * (high - low)
    # Groups of names that touch stand around the mean of their ends; those that come to touch become one.
    groups: list[list[str]] = []
    for name in sorted(ends, key=lambda name: (ends[name], -list(ends).index(name))):
        groups.append([name])
        while len(groups) > 1 and _start(groups[-1], ends, step, low, high) < _start(
            groups[-2], ends, step, low, high
        ) + step * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return {
        name: _start(group, ends, step, low, high) + step * place
        for group in groups
        for place, name in enumerate(group)
    }


def _start(group: list[str], ends: Mapping[str, float], step: float, low: float, high: float) -> float:
    """Where the lowest name of a group goes."""
    reach = step * (len(group) - 1)
    middle = sum(ends[name] for name in group) / len(group)
    return min(max(middle - reach / 2.0, low), high - reach)
