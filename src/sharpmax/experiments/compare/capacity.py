"""How far a model's size carries it: where accuracy halves and attention disperses, against width, heads and depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sharpmax.experiments.compare.leaderboard import setting_table, with_interval
from sharpmax.experiments.compare.methods import ModelSpec
from sharpmax.experiments.compare.plan import Found, Plan, found
from sharpmax.experiments.engines.store import Store
from sharpmax.probing.forecast import error, predict
from sharpmax.probing.measurement import REPEATS, crossing, interval, slope

FACTORS = ("width", "heads", "depth")
FORECAST_UP_TO = 64

_LEVEL = 0.5
_MEASURES = {
    "accuracy": "accuracy falls to half of what it is at the smallest size",
    "top": "top weight falls under one half",
}

Curves = Mapping[ModelSpec, np.ndarray]
"""By model: a measure [sizes, seeds]."""


def capacity_tables(plan: Plan, store: Store) -> dict[str, Any]:
    """For every method: the two sizes of each model, a law through them, and which layer disperses first."""
    tables: dict[str, Any] = {"capacity": {}, "laws": {}, "layers": {}, "setting": setting_table(plan)}
    x = np.log(np.array(plan.sizes, dtype=float))
    for method in plan.methods:
        known = {model: found(plan, store, model, method) for model in plan.models}
        curves = {
            name: {model: np.stack([one.measures[name][size] for size in plan.sizes]) for model, one in known.items()}
            for name in _MEASURES
        }
        tables["capacity"][method.name] = [_cell(model, one, x, curves, plan) for model, one in known.items()]
        tables["laws"][method.name] = {
            name: {"what": what, **fitted_law(x, curves[name], _end(name))} for name, what in _MEASURES.items()
        }
        tables["layers"][method.name] = {
            model.label: layer_slopes(plan.sizes, *_layers(one, plan.sizes))
            for model, one in known.items()
            if model.depth > 1
        }
    return tables


def _end(name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """ln of the size at which curves [sizes, …] of a measure end; ±inf beyond the sizes there are."""

    def end(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return crossing(x, y / np.maximum(y[:1], 1e-12) if name == "accuracy" else y, _LEVEL)

    return end


def _cell(model: ModelSpec, one: Found, x: np.ndarray, curves: Mapping[str, Curves], plan: Plan) -> dict[str, Any]:
    ends = {name: float(_end(name)(x, np.nanmean(curves[name][model], axis=1))) for name in _MEASURES}
    return {
        "model": model.label,
        **{name: getattr(model, name) for name in FACTORS},
        "parameters": one.training["parameters"],
        "seconds": one.training["seconds"],
        "diverged": one.training["diverged"],
        "half_accuracy_size": _size(ends["accuracy"]),
        "half_top_weight_size": _size(ends["top"]),
        "accuracy": {str(n): with_interval(100.0 * one.measures["accuracy"][n]) for n in plan.sizes},
        "top_weight": {str(n): with_interval(100.0 * one.measures["top"][n]) for n in plan.sizes},
        "entropy": {str(n): with_interval(one.measures["entropy"][n]) for n in plan.sizes},
    }


def _size(end: float) -> float | str | None:
    if np.isnan(end):
        return None
    if np.isinf(end):
        return "beyond" if end > 0 else "never above"
    return float(np.exp(end))


def fitted_law(
    x: np.ndarray, curves: Curves, end: Callable[[np.ndarray, np.ndarray], np.ndarray], seed: int = 0
) -> dict[str, Any]:
    """size = c · width^a · heads^b · depth^d through models whose size lies among those tested.

    Intervals are of seeds drawn again, the same ones for every model. Models that end beyond the largest size are left
    out and counted: where there are many, exponents come out too small.
    """
    models = list(curves)
    whole = np.stack([curves[model] for model in models], axis=1)  # [sizes, models, seeds]
    ends = end(x, np.nanmean(whole, axis=2))
    used = [model for model, one in zip(models, ends, strict=True) if np.isfinite(one)]
    varying = [name for name in FACTORS if len({getattr(model, name) for model in used}) > 1]
    factors = np.log([[float(getattr(model, name)) for name in varying] for model in models]).reshape(len(models), -1)
    best = _least_squares(factors, ends)
    counts = {"models": len(models), "used": len(used), "beyond": int(np.sum(ends == np.inf))}
    if best is None:
        return {**counts, "exponents": None, "constant": None, "r2": None}
    rng = np.random.default_rng(seed)
    seeds = whole.shape[2]
    draws = []
    for _ in range(REPEATS if seeds > 1 else 0):
        drawn = whole[:, :, rng.integers(seeds, size=seeds)]
        again = _least_squares(factors, end(x, np.nanmean(drawn, axis=2)))
        if again is not None:
            draws.append(again[0])
    low, high = interval(draws, best[0])
    exponents = {
        name: {"mean": float(best[0][place]), "low": _number(low[place]), "high": _number(high[place])}
        for place, name in enumerate(varying, start=1)
    }
    return {**counts, "exponents": exponents, "constant": float(np.exp(best[0][0])), "r2": best[1]}


def _least_squares(factors: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, float | None] | None:
    """Coefficients of ends = c + factors·a over finite ends, and the share explained; None where too few are."""
    use = np.isfinite(ends)
    design = np.column_stack((np.ones(int(use.sum())), factors[use]))
    if len(design) < design.shape[1] or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    found, *_ = np.linalg.lstsq(design, ends[use], rcond=None)
    around = float(((ends[use] - ends[use].mean()) ** 2).sum())
    left = float(((ends[use] - design @ found) ** 2).sum())
    return found, 1.0 - left / around if around > 1e-12 else None


def _layers(one: Found, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and top weight of every layer and head, [sizes, layers, heads], means over seeds."""
    entropy, top = (
        np.stack([np.nanmean(one.measures[f"layers_{name}"][size], axis=0) for size in sizes])
        for name in ("entropy", "top")
    )
    return entropy, top


def layer_slopes(sizes: Sequence[int], entropy: np.ndarray, top: np.ndarray) -> dict[str, Any] | None:
    """Entropy gained per nat of ln n beyond `FORECAST_UP_TO`, measured and forecast from the sizes up to it.

    `entropy` and `top` are [sizes, layers, heads]; None where the sizes do not reach on both sides of it.
    """
    known = [place for place, size in enumerate(sizes) if size <= FORECAST_UP_TO]
    later = [place for place, size in enumerate(sizes) if size > FORECAST_UP_TO]
    if len(known) < 2 or len(later) < 2 or not np.isfinite(entropy).all():
        return None
    counts = np.broadcast_to(np.array(sizes, dtype=float)[:, None, None], entropy.shape)
    predicted = predict({"count": counts, "entropy": entropy, "top": top}, sizes, FORECAST_UP_TO)
    forecast_entropy = np.stack([predicted.values[sizes[place]]["entropy"] for place in later])
    x = np.log(np.array([sizes[place] for place in later], dtype=float))
    measured, forecast = (slope(x[:, None], one.mean(-1)) for one in (entropy[later], forecast_entropy))
    last = sizes[-1]
    return {
        "measured": [float(value) for value in measured],
        "forecast": [float(value) for value in forecast],
        "first_measured": int(np.argmax(measured)),
        "first_forecast": int(np.argmax(forecast)),
        "method": predicted.method,
        "error_at_largest": error(predicted.values[last], {"entropy": entropy[-1], "top": top[-1]}),
        "entropy": {str(size): [float(v) for v in entropy[place].mean(-1)] for place, size in enumerate(sizes)},
    }


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
