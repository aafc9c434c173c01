"""A comparison as tasks for an engine, and the results assembled from its store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpmax.experiments.compare.methods import LEAGUE, Method, ModelSpec, recipe_for
from sharpmax.experiments.engines.store import Store
from sharpmax.experiments.engines.task import Task
from sharpmax.tasks.sized_registry import sized_task

_CELLS = "sharpmax.experiments.compare.cells"


@dataclass(frozen=True)
class Plan:
    """What is compared on what: every method in every model, each seed trained once and tested at every size."""

    methods: tuple[Method, ...]
    models: tuple[ModelSpec, ...]
    task: str
    seeds: tuple[int, ...]
    steps: int
    batch: int
    sizes: tuple[int, ...]
    samples: int
    device: str
    stack: int
    files: tuple[str, ...] = ()
    """Texts of a user's own Python files."""

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on with what an earlier one has done.

        Methods, models, seeds and sizes need not be: a league can be added to.
        """
        task = sized_task(self.task)
        return {
            "task": f"{task.name} {task.version}",
            "steps": self.steps,
            "batch": self.batch,
            "samples": self.samples,
            "device": self.device,
        }

    def stacks(self) -> list[tuple[int, ...]]:
        """Seeds that are trained in one program."""
        return [self.seeds[start : start + self.stack] for start in range(0, len(self.seeds), self.stack)]

    def tasks(self) -> list[Task]:
        """All there is to do, trainings first."""
        cells = [(model, method, seeds) for model in self.models for method in self.methods for seeds in self.stacks()]
        trainings = [self._training(*cell) for cell in cells]
        # The longest first, so that none is left for the end.
        return trainings + [self._exam(*cell, size) for size in reversed(self.sizes) for cell in cells]

    def training_key(self, model: ModelSpec, method: Method, seeds: Sequence[int]) -> str:
        """The key of a training."""
        return f"{self._cell(model, method, seeds)}/train"

    def exam_key(self, model: ModelSpec, method: Method, seeds: Sequence[int], size: int) -> str:
        """The key of a test."""
        return f"{self._cell(model, method, seeds)}/test {size}"

    def _cell(self, model: ModelSpec, method: Method, seeds: Sequence[int]) -> str:
        mark = self._mark(model, method)
        return f"{self.task}/{model.label}/{method.name} {mark}/seeds {seeds[0]}-{seeds[-1]}"

    def _mark(self, model: ModelSpec, method: Method) -> str:
        """Tells a method from another of its name: one whose recipe, options or file was changed meanwhile."""
        recipe = recipe_for(model, method, sized_task(self.task), self.steps, self.batch)
        own = [] if LEAGUE.get(method.name) == method else list(self.files)
        said = json.dumps([{**method.plain(), "summary": ""}, repr(recipe), own], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:8]

    def _training(self, model: ModelSpec, method: Method, seeds: Sequence[int]) -> Task:
        own = {"steps": self.steps, "batch": self.batch}
        key = self.training_key(model, method, seeds)
        return Task(key, f"{_CELLS}:train", self._common(model, method, seeds) | own, label=f"train {method.name}")

    def _exam(self, model: ModelSpec, method: Method, seeds: Sequence[int], size: int) -> Task:
        return Task(
            self.exam_key(model, method, seeds, size),
            f"{_CELLS}:examine",
            self._common(model, method, seeds) | {"size": size, "samples": self.samples},
            after=self.training_key(model, method, seeds),
            label=f"test {method.name} at {size:,}",
        )

    def _common(self, model: ModelSpec, method: Method, seeds: Sequence[int]) -> dict[str, Any]:
        return {
            "method": method.plain(),
            "task": self.task,
            "model": model.plain(),
            "seeds": list(seeds),
            "device": self.device,
        }


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
