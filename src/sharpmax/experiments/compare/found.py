"""What a store holds of a plan, put together again over the stacks of its seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpmax.experiments.compare.methods import Method
from sharpmax.experiments.compare.plan import Plan
from sharpmax.experiments.compare.setting import ModelSpec
from sharpmax.experiments.engines import Store

__all__ = ["Found", "found"]

_MEASURES = ("accuracy", "ranking", "hard", "close", "whole", "entropy", "top", "layers_entropy", "layers_top")


@dataclass(frozen=True)
class Found:
    """One method in one model, all seeds in their order."""

    training: Mapping[str, Any]
    """Loss, divergence and curve by seed; seconds, memory and parameters."""

    measures: Mapping[str, Mapping[int, np.ndarray]]
    """By name and size: [seeds, ...], NaN where there is no number."""


def found(plan: Plan, store: Store, model: ModelSpec, method: Method) -> Found:
    """What is known of a method in a model once everything is done."""
    stacks = plan.stacks()
    trained = [store.record(plan.training_key(model, method, seeds)) for seeds in stacks]
    curve = [
        [step, [loss for one in trained for loss in one["curve"][place][1]]]
        for place, (step, _) in enumerate(trained[0]["curve"])
    ]
    memory = [one["memory"] for one in trained]
    training = {
        "loss": [value for one in trained for value in one["loss"]],
        "diverged": [seed for one in trained for seed, bad in zip(one["seeds"], one["diverged"], strict=True) if bad],
        "curve": curve,
        "parameters": trained[0]["parameters"],
        "seconds": round(sum(one["seconds"] for one in trained), 2),
        "memory": None if None in memory else max(memory),
    }
    measures: dict[str, dict[int, np.ndarray]] = {name: {} for name in _MEASURES}
    for size in plan.sizes:
        tested = [store.record(plan.exam_key(model, method, seeds, size)) for seeds in stacks]
        for name in _MEASURES:
            values = [value for one in tested for value in one[name]]
            measures[name][size] = np.array(values, dtype=float)
    return Found(training, measures)
