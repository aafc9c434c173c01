"""From finished tasks to the tables of `sharpmax compare`: leaderboard and capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from sharpmax.experiments.compare.methods import ModelSpec, recipe_for
from sharpmax.experiments.compare.run import ComparisonPlan, MethodResult, result_of
from sharpmax.experiments.run_folder import RunStore
from sharpmax.experiments.statistics import LEVEL, paired_p, seed_mean
from sharpmax.probing.forecast import error, predict
from sharpmax.probing.measurement import REPEATS, crossing, interval, slope
from sharpmax.results import json_values
from sharpmax.tasks.max_retrieval import sized_task


@dataclass(frozen=True)
class Rank:
    """A place on the leaderboard, the leader of its group, and the p-value against that leader."""

    rank: int
    leader: str
    p: float | None


def ranks(scores: Mapping[str, np.ndarray]) -> dict[str, Rank]:
    """Rank of every method by its mean score, [seeds] each; best first.

    A method shares the rank of its group's leader if their paired difference is not significant; the first that is
    significantly behind leads the next group, and its rank counts all those before it. With a single seed only equal
    scores share a rank.
    """
    order = sorted(scores, key=lambda name: -float(scores[name].mean()))
    found: dict[str, Rank] = {}
    leader = order[0]
    for place, name in enumerate(order, start=1):
        p = paired_p(scores[leader], scores[name])
        if place > 1 and _apart(scores[leader], scores[name], p):
            leader, p = name, None
        rank = place if name == leader else found[leader].rank
        found[name] = Rank(rank, leader, p)
    return found


def _apart(best: np.ndarray, other: np.ndarray, p: float | None) -> bool:
    if p is not None:
        return p < LEVEL
    # The same difference in every seed: nothing varies, so any difference is one.
    return bool(abs(float((best - other).mean())) > 1e-9)


_PERCENT = ("accuracy", "ranking", "hard", "close", "whole")


def scored_sizes(plan: ComparisonPlan) -> list[int]:
    """The sizes that methods are ranked by: those beyond training, or all if there are none."""
    beyond = [size for size in plan.sizes if size > sized_task(plan.task).trained[1]]
    return beyond or list(plan.sizes)


def compare_tables(plan: ComparisonPlan, store: RunStore) -> dict[str, Any]:
    """The leaderboard of all methods in the first model of the plan, and its measures; accuracies in percent."""
    model = plan.models[0]
    known = {method.name: result_of(plan, store, model, method) for method in plan.methods}
    tables: dict[str, Any] = {
        measure: {name: _by_size(one.measures[measure], 100.0) for name, one in known.items()} for measure in _PERCENT
    }
    tables["top_weight"] = {name: _by_size(one.measures["top"], 100.0) for name, one in known.items()}
    tables["entropy"] = {name: _by_size(one.measures["entropy"], 1.0) for name, one in known.items()}
    tables["per_seed"] = {
        name: {str(size): [round(100.0 * v, 4) for v in values] for size, values in one.measures["accuracy"].items()}
        for name, one in known.items()
    }
    scores = {
        name: np.mean([100.0 * one.measures["accuracy"][size] for size in scored_sizes(plan)], axis=0)
        for name, one in known.items()
    }
    tables["league"] = {
        name: {**asdict(place), "score": seed_mean(scores[name])} for name, place in ranks(scores).items()
    }
    tables["training"] = {}
    for name, one in known.items():
        loss = one.training["loss"]
        interval_of_loss = seed_mean(np.array(loss, dtype=float))  # None becomes NaN, which does not count
        tables["training"][name] = {**one.training, "loss": interval_of_loss, "loss_per_seed": loss}
    tables["methods"] = {method.name: asdict(method) for method in plan.methods}
    tables["setting"] = setting_table(plan)
    return json_values(tables)


def setting_table(plan: ComparisonPlan) -> dict[str, Any]:
    """The settings of the run."""
    model, task = plan.models[0], sized_task(plan.task)
    recipe = recipe_for(model, plan.methods[0], task, plan.steps, plan.batch)
    return {
        "task": task.name,
        "task_summary": task.summary,
        "unit": task.unit,
        "model": model.label,
        "sizes": list(plan.sizes),
        "scored_sizes": scored_sizes(plan),
        "train_sizes": list(task.trained),
        "seeds": list(plan.seeds),
        "steps": plan.steps,
        "batch": plan.batch,
        "samples": plan.samples,
        "learning_rate": recipe.learning_rate,
        "warmup": recipe.warmup,
        "device": plan.device,
        "level": LEVEL,
    }


def _by_size(values: Mapping[int, np.ndarray], factor: float) -> dict[str, Any]:
    return {str(size): seed_mean(factor * one) for size, one in values.items()}


FACTORS = ("width", "heads", "depth")
FORECAST_UP_TO = 64

_LEVEL = 0.5
_MEASURES = {
    "accuracy": "accuracy falls to half of what it is at the smallest size",
    "top": "top weight falls under one half",
}

Curves = Mapping[ModelSpec, np.ndarray]
"""By model: a measure [sizes, seeds]."""


def capacity_tables(plan: ComparisonPlan, store: RunStore) -> dict[str, Any]:
    """For every method: the two sizes of each model, a power law through them, and the layer that disperses first."""
    tables: dict[str, Any] = {"capacity": {}, "laws": {}, "layers": {}, "setting": setting_table(plan)}
    x = np.log(np.array(plan.sizes, dtype=float))
    for method in plan.methods:
        known = {model: result_of(plan, store, model, method) for model in plan.models}
        curves = {
            name: {model: np.stack([one.measures[name][size] for size in plan.sizes]) for model, one in known.items()}
            for name in _MEASURES
        }
        tables["capacity"][method.name] = [_cell(model, one, x, curves) for model, one in known.items()]
        tables["laws"][method.name] = {
            name: {"what": what, **fit_power_law(x, curves[name], partial(_end, name))}
            for name, what in _MEASURES.items()
        }
        tables["layers"][method.name] = {
            model.label: layer_slopes(plan.sizes, _by_layer(one, "entropy"), _by_layer(one, "top"))
            for model, one in known.items()
            if model.depth > 1
        }
    return json_values(tables)


def _end(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """ln of the size at which curves [sizes, …] of a measure end; ±inf beyond the sizes there are."""
    return crossing(x, y / np.maximum(y[:1], 1e-12) if name == "accuracy" else y, _LEVEL)


def _cell(model: ModelSpec, one: MethodResult, x: np.ndarray, curves: Mapping[str, Curves]) -> dict[str, Any]:
    ends = {name: float(_end(name, x, np.nanmean(curves[name][model], axis=1))) for name in _MEASURES}
    return {
        "model": model.label,
        **{name: getattr(model, name) for name in FACTORS},
        **{name: one.training[name] for name in ("parameters", "seconds", "diverged")},
        "half_accuracy_size": _size(ends["accuracy"]),
        "half_top_weight_size": _size(ends["top"]),
        "accuracy": _by_size(one.measures["accuracy"], 100.0),
        "top_weight": _by_size(one.measures["top"], 100.0),
        "entropy": _by_size(one.measures["entropy"], 1.0),
    }


def _size(end: float) -> float | str | None:
    if np.isnan(end):
        return None
    if np.isinf(end):
        return "beyond" if end > 0 else "never above"
    return float(np.exp(end))


def fit_power_law(
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


def _by_layer(one: MethodResult, name: str) -> np.ndarray:
    """A measure of every layer and head, [sizes, layers, heads], means over seeds."""
    return np.stack([np.nanmean(of_size, axis=0) for of_size in one.measures[f"layers_{name}"].values()])


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
    later_entropy = np.stack([predicted.values[sizes[place]]["entropy"] for place in later])
    x = np.log(np.array([sizes[place] for place in later], dtype=float))
    measured, forecast = (slope(x[:, None], one.mean(-1)) for one in (entropy[later], later_entropy))
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
