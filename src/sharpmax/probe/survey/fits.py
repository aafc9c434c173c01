"""Curves through what was measured: means over passages, slopes with their intervals, and where a curve crosses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from sharpmax.probe.survey.measuring import Numbers, Readings

__all__ = ["REPEATS", "crossing", "curve", "interval", "known_mean", "repeats", "slope"]

REPEATS = 200
"""How often passages are drawn again for an interval."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "entropy": (0.0, np.inf), "top": (0.0, 1.0), "sink": (0.0, 1.0), "local": (0.0, 1.0), "spread": (0.0, np.inf),
}  # fmt: skip


def curve(readings: Readings, name: str, nested: bool, share: Numbers | None = None) -> Numbers:
    """A statistic of every head at every size, `[sizes, layers, heads]`, from a `share` of each passage (None: equal).

    Fewer passages are read of larger sizes. Where passages are nested, a size adds to the one before what it changes
    in the passages that both have; a mean of its own would mostly tell which passages these are.
    """
    found: list[Numbers] = []
    before: Numbers | None = None
    for size in readings:
        values = readings[size][name]
        if before is None or not nested:
            found.append(_mean(values, share))
        else:
            both = min(len(before), len(values))
            found.append(found[-1] + _mean(values[:both] - before[:both], share))
        before = values
    low, high = _RANGES.get(name, (-np.inf, np.inf))
    return np.clip(np.stack(found), low, high)


def _mean(values: Numbers, share: Numbers | None) -> Numbers:
    weight = np.ones(len(values)) if share is None else share[: len(values)]
    if weight.sum() == 0.0:  # none of these passages was drawn, and the others are not there
        weight = np.ones(len(values))
    mean: Numbers = np.tensordot(weight / weight.sum(), values, axes=1)
    return mean


def known_mean(values: Numbers, axis: int | None = None) -> Numbers:
    """The mean of those numbers that are known, its axes kept; NaN where none is."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis, keepdims=True)
    with np.errstate(invalid="ignore"):
        found: Numbers = total / known.sum(axis, keepdims=True)
    return found


def repeats(readings: Readings, seed: int) -> Iterator[Numbers]:
    """How often each passage is drawn when as many are drawn again, `REPEATS` times; none of a single passage."""
    passages = max(len(one["count"]) for one in readings.values())
    if passages < 2:
        return
    rng = np.random.default_rng(seed)
    for _ in range(REPEATS):
        yield np.bincount(rng.integers(passages, size=passages), minlength=passages).astype(float)


def slope(x: Numbers, y: Numbers) -> Numbers:
    """The slope of the straight line through `y` against `x`, both `[sizes, …]`; NaN where x does not change.

    >>> slope(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.5, 2.0]))
    array(0.5)
    """
    apart = x - x.mean(0)
    square = (apart**2).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Numbers = np.asarray((apart * y).sum(0) / np.where(square > 1e-12, square, np.nan))
    return found


def interval(draws: list[Numbers], like: Numbers) -> tuple[Numbers, Numbers]:
    """Where 95% of what was drawn lies; NaN without any draw."""
    if not draws:
        return np.full_like(like, np.nan), np.full_like(like, np.nan)
    # Infinite draws are beyond what was measured: between two of them there is no number to be found.
    low, high = np.quantile(np.stack(draws), [0.025, 0.975], axis=0, method="inverted_cdf")
    return low, high


def crossing(x: Numbers, y: Numbers, level: float) -> Numbers:
    """From which x on y `[sizes, …]` stays under a level, between sizes on a straight line.

    −inf where it is under the level at every size, inf where it is not under it at the last, NaN where y is.

    >>> crossing(np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.75, 0.25]), 0.5)
    array(1.5)
    """
    wide = np.broadcast_to(x.reshape(x.shape + (1,) * (y.ndim - x.ndim)), y.shape)
    found = np.full(y.shape[1:], -np.inf)
    for left in range(len(y) - 1):
        falls = (y[left] >= level) & (y[left + 1] < level)
        drop = np.where(falls, y[left] - y[left + 1], 1.0)
        at = wide[left] + (y[left] - level) / drop * (wide[left + 1] - wide[left])
        found = np.where(falls, at, found)
    found = np.where(y[-1] >= level, np.inf, found)
    return np.where(np.isnan(y).any(0), np.nan, found)
