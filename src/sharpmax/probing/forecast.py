"""Predict entropy and top weight of every head at sizes that were not read.

Several methods make a forecast. The method is chosen by its error at the largest size that may be known, forecast from
those below it: none of the sizes that forecasts are tested at is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sharpmax.probing.measurement import Numbers, known_mean, slope

REPLICATION = "crowding"
"""Key replication (`sharpmax.probing.replication`), by its name in saved results."""

_MIXED = "crowding and line, 3 to 1"
_USUAL = "line"
"""The method where there is nothing to choose by."""

_FLOOR = 1e-4
_NAMES = ("entropy", "top")

Curves = Mapping[str, Numbers]
"""Statistics of every head at every size, `[sizes, layers, heads]`."""

Changes = Mapping[tuple[int, int], Mapping[str, Numbers]]
"""By (size that was read, size it stands for): what key replication changes in entropy and top weight."""

_Method = Callable[[Numbers, Numbers, Numbers], Numbers]


def _level(x: Numbers, y: Numbers, to: Numbers) -> Numbers:
    found: Numbers = y[-1]
    return found


def _line(towards: Callable[[Numbers], Numbers], share: float) -> _Method:
    """A straight line against ln n whose slope is moved part of the way towards another."""

    def method(x: Numbers, y: Numbers, to: Numbers) -> Numbers:
        own = slope(x, y)
        found: Numbers = y.mean(0) + ((1.0 - share) * own + share * towards(own)) * (to - x.mean(0))
        return found

    return method


METHODS: Mapping[str, _Method] = {
    "the largest size again": _level,
    "line": _line(lambda own: own, 0.0),
    "line, slope half way to the layer's": _line(lambda own: known_mean(own, -1), 0.5),
    "line, slope half way to the model's": _line(known_mean, 0.5),
}
"""Methods that need the curve alone: from ln n and values at known sizes, the value at another ln n."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """The predictions of the chosen method, and how every method did where that could be checked."""

    method: str
    fitted: tuple[int, ...]
    values: Mapping[int, Mapping[str, Numbers]]  # by size: entropy and top weight, `[layers, heads]`
    decided: Mapping[str, float] = field(default_factory=dict)
    """By method, the median error in nats at the largest known size, forecast from those below it."""

    others: Mapping[str, Mapping[int, Mapping[str, Numbers]]] = field(default_factory=dict)
    """The predictions of every method, the chosen one included."""


def predict(curves: Curves, sizes: Sequence[int], fit_up_to: int, changes: Changes | None = None) -> Forecast:
    """Forecast the sizes above `fit_up_to` from the others, by the method that does best among the others.

    Above `fit_up_to` only the number of keys is read from the curves, which does not depend on the model.
    """
    known = [place for place, size in enumerate(sizes) if size <= fit_up_to]
    later = [place for place, size in enumerate(sizes) if size > fit_up_to]
    trial = _predictions(curves, sizes, known[:-1], known[-1], changes or {}) if len(known) > 1 else {}
    decided = {name: _median(one["entropy"] - curves["entropy"][known[-1]]) for name, one in trial.items()}
    found: dict[str, dict[int, Mapping[str, Numbers]]] = {}
    for to in later:
        for name, one in _predictions(curves, sizes, known, to, changes or {}).items():
            found.setdefault(name, {})[sizes[to]] = one
    # A method that does not reach every size cannot be chosen.
    able = {name for name, one in found.items() if len(one) == len(later)}
    choices = {name: value for name, value in decided.items() if name in able and np.isfinite(value)}
    method = min(choices, key=lambda name: choices[name]) if choices else _USUAL
    return Forecast(method, tuple(sizes[place] for place in known), found.get(method, {}), decided, found)


def error(forecast: Mapping[str, Numbers], measured: Mapping[str, Numbers]) -> dict[str, Any]:
    """Median, 90th percentile and bias of the error over heads."""
    found: dict[str, Any] = {}
    for name in _NAMES:
        apart = (forecast[name] - measured[name])[np.isfinite(forecast[name]) & np.isfinite(measured[name])]
        found["heads"] = len(apart)
        found[name] = dict.fromkeys(("median", "p90", "bias"))
        if len(apart):
            median, p90 = np.quantile(np.abs(apart), [0.5, 0.9])
            found[name] = {"median": float(median), "p90": float(p90), "bias": float(apart.mean())}
    return found


def _predictions(
    curves: Curves, sizes: Sequence[int], known: Sequence[int], to: int, changes: Changes
) -> dict[str, dict[str, Numbers]]:
    """The prediction of every method for a size, from the sizes at the places `known`."""
    counts = curves["count"]
    x, target = np.log(counts[known]), np.log(counts[to])
    found = {}
    for name, method in METHODS.items():
        if len(known) > 1 or method is _level:
            # Weights lie between 0 and 1: their curves are straight on the logit scale.
            top = 1.0 / (1.0 + np.exp(-method(x, _logit(curves["top"][known]), target)))
            found[name] = {"entropy": method(x, curves["entropy"][known], target), "top": top}
    change = changes.get((sizes[known[-1]], sizes[to]))
    if change is not None:
        replicated = found[REPLICATION] = {name: curves[name][known[-1]] + change[name] for name in _NAMES}
        if _USUAL in found:
            found[_MIXED] = {name: 0.75 * replicated[name] + 0.25 * found[_USUAL][name] for name in _NAMES}
    return {
        name: {"entropy": np.clip(one["entropy"], 0.0, target), "top": np.clip(one["top"], 1.0 / counts[to], 1.0)}
        for name, one in found.items()
    }


def _logit(weight: Numbers) -> Numbers:
    inside = np.clip(weight, _FLOOR, 1.0 - _FLOOR)
    found: Numbers = np.log(inside / (1.0 - inside))
    return found


def _median(apart: Numbers) -> float:
    known = np.abs(apart[np.isfinite(apart)])
    return float(np.median(known)) if known.size else float("nan")
