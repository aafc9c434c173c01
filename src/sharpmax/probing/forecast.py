"""Predict entropy and top weight of every head at sizes that were not read.

Several methods make a forecast. Which of them is used is decided on the largest size that may be known, forecast from
those below it: none of the sizes that forecasts are tested at has a say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sharpmax.probing.measurement import Numbers, known_mean, slope

CROWDING = "crowding"
"""Items of the largest known size stand for those of a larger one (`sharpmax.probing.replication`)."""

_MIXED = "crowding and line, 3 to 1"
_USUAL = "line"
"""The method where there is nothing to decide on."""

_FLOOR = 1e-4

Curves = Mapping[str, Numbers]
"""Statistics of every head at every size, `[sizes, layers, heads]`."""

_Method = Callable[[Numbers, Numbers, Numbers], Numbers]


def _level(x: Numbers, y: Numbers, to: Numbers) -> Numbers:
    found: Numbers = y[-1]
    return found


def _line(towards: Callable[[Numbers], Numbers], share: float) -> _Method:
    """A straight line against ln n whose slope goes part of the way towards another."""

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
"""What needs nothing but the curve: from ln n and values at known sizes, the value at another ln n."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """What is foretold of sizes, by which method, and how the methods did where that could be checked."""

    method: str
    fitted: tuple[int, ...]
    values: Mapping[int, Mapping[str, Numbers]]
    """By size: entropy and top weight, `[layers, heads]`."""

    decided: Mapping[str, float] = field(default_factory=dict)
    """By method, the median error in nats at the largest known size, forecast from those below it."""

    others: Mapping[str, Mapping[int, Mapping[str, Numbers]]] = field(default_factory=dict)
    """What each method foretells, the chosen one among them."""


def foretell(
    curves: Curves,
    sizes: Sequence[int],
    fit_up_to: int,
    crowded: Mapping[tuple[int, int], Mapping[str, Numbers]] | None = None,
) -> Forecast:
    """Forecast the sizes above `fit_up_to` from the others, by the method that does best among the others.

    `crowded` holds by (size that was read, size it stands for) what crowding changes in entropy and top weight. Of the
    curves, what is above `fit_up_to` is not looked at but for the number of keys, which no model has to tell.
    """
    known = [place for place, size in enumerate(sizes) if size <= fit_up_to]
    later = [place for place, size in enumerate(sizes) if size > fit_up_to]
    changes = crowded or {}
    trial = _all(curves, sizes, known[:-1], known[-1], changes) if len(known) > 1 else {}
    decided = {name: _median(one["entropy"] - curves["entropy"][known[-1]]) for name, one in trial.items()}
    found: dict[str, dict[int, Mapping[str, Numbers]]] = {}
    for to in later:
        for name, one in _all(curves, sizes, known, to, changes).items():
            found.setdefault(name, {})[sizes[to]] = one
    # A method that cannot reach every size is none to choose.
    able = {name for name, one in found.items() if len(one) == len(later)}
    choices = {name: value for name, value in decided.items() if name in able and np.isfinite(value)}
    method = min(choices, key=lambda name: choices[name]) if choices else _USUAL
    return Forecast(method, tuple(sizes[place] for place in known), found.get(method, {}), decided, found)


def error(forecast: Mapping[str, Numbers], measured: Mapping[str, Numbers]) -> dict[str, Any]:
    """How far a forecast is from what was measured, over heads: median and 90th percentile of the error, and bias."""
    found: dict[str, Any] = {}
    for name in ("entropy", "top"):
        apart = (forecast[name] - measured[name])[np.isfinite(forecast[name]) & np.isfinite(measured[name])]
        found["heads"] = len(apart)
        wide = np.abs(apart)
        found[name] = (
            {"median": float(np.median(wide)), "p90": float(np.quantile(wide, 0.9)), "bias": float(apart.mean())}
            if len(apart)
            else dict.fromkeys(("median", "p90", "bias"))
        )
    return found


def _all(
    curves: Curves,
    sizes: Sequence[int],
    known: Sequence[int],
    to: int,
    changes: Mapping[tuple[int, int], Mapping[str, Numbers]],
) -> dict[str, dict[str, Numbers]]:
    """What every method says of a size, from the sizes at the places `known`."""
    counts = curves["count"]
    x, target = np.log(counts[known]), np.log(counts[to])
    found = {}
    for name, method in METHODS.items():
        if len(known) > 1 or method is _level:
            entropy = method(x, curves["entropy"][known], target)
            # Weights are between 0 and 1, and so are their curves on this scale.
            top = 1.0 / (1.0 + np.exp(-method(x, _logit(curves["top"][known]), target)))
            found[name] = {"entropy": entropy, "top": top}
    change = changes.get((sizes[known[-1]], sizes[to]))
    if change is not None:
        found[CROWDING] = {name: curves[name][known[-1]] + change[name] for name in ("entropy", "top")}
        if _USUAL in found:
            both = found[CROWDING], found[_USUAL]
            found[_MIXED] = {name: 0.75 * both[0][name] + 0.25 * both[1][name] for name in ("entropy", "top")}
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
