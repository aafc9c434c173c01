"""A finished comparison as the tables of results.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sharpmax.experiments.compare.found import Found, found
from sharpmax.experiments.compare.league import LEVEL, ranks, with_interval
from sharpmax.experiments.compare.plan import Plan
from sharpmax.experiments.compare.setting import recipe_for
from sharpmax.experiments.engines import Store
from sharpmax.tasks.sized_registry import sized_task

__all__ = ["compare_tables", "scored_sizes", "setting_table"]

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
