"""Ranks over methods tested on the same seeds and examples, and the tables of results.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sharpmax.experiments.compare.methods import recipe_for
from sharpmax.experiments.compare.plan import Found, Plan, found
from sharpmax.experiments.engines.store import Store
from sharpmax.experiments.statistics import paired_p
from sharpmax.lazy import require
from sharpmax.tasks.sized_registry import sized_task

LEVEL = 0.05
"""A difference is one if chance alone gives as large a one less often."""


def with_interval(per_seed: np.ndarray) -> dict[str, Any]:
    """Mean over seeds with Student's 95% interval, None for one seed; seeds without a number do not count.

    >>> with_interval(np.array([1.0, 3.0]))["mean"]
    2.0
    """
    known = per_seed[np.isfinite(per_seed)]
    count = len(known)
    if not count:
        return {"mean": None, "sem": None, "low": None, "high": None, "n": 0}
    mean = float(known.mean())
    if count == 1:
        return {"mean": mean, "sem": None, "low": None, "high": None, "n": 1}
    stats = require("scipy.stats", "reproduce", "sharpmax compare")
    sem = float(known.std(ddof=1) / np.sqrt(count))
    reach = float(stats.t.ppf(1.0 - LEVEL / 2.0, count - 1)) * sem
    return {"mean": mean, "sem": sem, "low": mean - reach, "high": mean + reach, "n": count}


def ranks(scores: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Rank of every method by its mean score, [seeds] each; best first.

    A method shares the rank of the one that leads its group if their paired difference is not significant; the first
    that is significantly behind leads the next group, and its rank counts all those before it. A single seed knows no
    significance: then only equal scores share a rank.
    """
    order = sorted(scores, key=lambda name: -float(scores[name].mean()))
    found: dict[str, dict[str, Any]] = {}
    leader = order[0]
    for place, name in enumerate(order, start=1):
        p = paired_p(scores[leader], scores[name])
        if place > 1 and _apart(scores[leader], scores[name], p):
            leader, p = name, None
        rank = place if name == leader else found[leader]["rank"]
        found[name] = {"rank": rank, "leader": leader, "p": p}
    return found


def _apart(best: np.ndarray, other: np.ndarray, p: float | None) -> bool:
    if p is not None:
        return p < LEVEL
    # The same difference in every seed: nothing varies, so any difference is one.
    return bool(abs(float((best - other).mean())) > 1e-9)


_PERCENT = {
    "accuracy": "accuracy",
    "ranking": "ranking",
    "hard": "hard",
    "close": "close",
    "whole": "whole",
    "top": "top_weight",
}


def scored_sizes(plan: Plan) -> list[int]:
    """The sizes that the league goes by: those beyond training, or all if there are none."""
    beyond = [size for size in plan.sizes if size > sized_task(plan.task).trained[1]]
    return beyond or list(plan.sizes)


def compare_tables(plan: Plan, store: Store) -> dict[str, Any]:
    """The league of all methods in the first model of the plan, and what it is made of; accuracies in percent."""
    model = plan.models[0]
    known = {method.name: found(plan, store, model, method) for method in plan.methods}
    tables: dict[str, Any] = {
        table: {name: _by_size(one.measures[measure], 100.0) for name, one in known.items()}
        for measure, table in _PERCENT.items()
    }
    tables["entropy"] = {name: _by_size(one.measures["entropy"], 1.0) for name, one in known.items()}
    tables["per_seed"] = {
        name: {str(size): [round(100.0 * v, 4) for v in values] for size, values in one.measures["accuracy"].items()}
        for name, one in known.items()
    }
    tables["league"] = _league(plan, known)
    tables["training"] = {name: _training(one) for name, one in known.items()}
    tables["methods"] = {method.name: method.plain() for method in plan.methods}
    tables["setting"] = setting_table(plan)
    return tables


def setting_table(plan: Plan) -> dict[str, Any]:
    """What was done, for a reader of the tables."""
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


def _league(plan: Plan, known: Mapping[str, Found]) -> dict[str, Any]:
    sizes = scored_sizes(plan)
    scores = {
        name: np.stack([100.0 * one.measures["accuracy"][size] for size in sizes]).mean(0)
        for name, one in known.items()
    }
    return {name: {**place, "score": with_interval(scores[name])} for name, place in ranks(scores).items()}


def _training(one: Found) -> dict[str, Any]:
    loss = np.array([np.nan if value is None else value for value in one.training["loss"]], dtype=float)
    return {**one.training, "loss": with_interval(loss), "loss_per_seed": one.training["loss"]}


def _by_size(values: Mapping[int, np.ndarray], factor: float) -> dict[str, Any]:
    return {str(size): with_interval(factor * one) for size, one in values.items()}
