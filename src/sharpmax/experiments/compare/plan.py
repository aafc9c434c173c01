"""A comparison as tasks for an engine: each training, and each test that follows it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sharpmax.experiments.compare.methods import Method
from sharpmax.experiments.compare.setting import ModelSpec, recipe_for
from sharpmax.experiments.engines import Task
from sharpmax.tasks.sized_registry import sized_task

__all__ = ["Plan"]

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
        """What must be the same for a run to go on with what an earlier one has done."""
        task = sized_task(self.task)
        return {
            "methods": [method.plain() for method in self.methods],
            "models": [model.plain() for model in self.models],
            "task": f"{task.name} {task.version}",
            "seeds": list(self.seeds),
            "steps": self.steps,
            "batch": self.batch,
            "sizes": list(self.sizes),
            "samples": self.samples,
            "device": self.device,
            "stack": self.stack,
            "files": [hashlib.sha256(text.encode()).hexdigest() for text in self.files],
            "recipes": [
                repr(recipe_for(model, method, task, self.steps, self.batch))
                for model in self.models
                for method in self.methods
            ],
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
        return f"{self.task}/{model.label}/{method.name}/seeds {seeds[0]}-{seeds[-1]}"

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
