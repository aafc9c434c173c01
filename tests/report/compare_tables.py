"""Made-up results of `sharpmax compare`: outcomes by rule, put into tables as real ones are, always the same."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any

import numpy as np

from sharpmax.experiments.compare.methods import SHIPPED_METHODS, Method, ModelSpec
from sharpmax.experiments.compare.run import Plan
from sharpmax.experiments.compare.tables import capacity_tables, compare_tables

COMMAND = "sharpmax compare --seeds 5 --steps 20000 --out compare"
CAPACITY_COMMAND = "sharpmax compare --capacity --model encoder --seeds 3 --out capacity"
SIZES = tuple(2**power for power in range(4, 15))
METHODS = tuple(SHIPPED_METHODS)

_RULES = {
    "softmax": (0.42, 0.10), "adaptive": (0.30, 0.10), "ssmax": (0.12, 0.11), "sparsemax": (0.10, 0.14),
    "entmax15": (0.16, 0.12), "sigmoid": (0.55, 0.13), "softmax-plus-one": (0.41, 0.10), "linear": (1.10, 0.30),
    "stick-breaking": (0.35, 0.20), "hard": (0.0, 0.24), "top-k": (0.04, 0.12), "local": (0.20, 1.30),
    "step": (0.45, 0.11), "hard-threshold": (0.44, 0.11), "sharp": (0.0, 0.095),
}  # fmt: skip
"""How fast a method disperses, and how fast it comes to rank wrongly."""


def make_tables(
    methods: tuple[str, ...] = METHODS, seeds: int = 5, sizes: tuple[int, ...] = SIZES, task: str = "max"
) -> dict[str, Any]:
    """Tables of a league."""
    return copy.deepcopy(_league(methods, seeds, sizes, task))


def make_capacity(
    methods: tuple[str, ...] = ("softmax",),
    seeds: int = 3,
    shapes: tuple[tuple[int, ...], ...] = ((32, 64, 128), (1, 2, 4), (1, 2, 4)),
    *,
    reach: float = 1.0,
) -> dict[str, Any]:
    """Tables of capacity; models carry `reach` times as far."""
    return copy.deepcopy(_capacity(methods, seeds, shapes, reach))


@cache
def _league(methods: tuple[str, ...], seeds: int, sizes: tuple[int, ...], task: str) -> dict[str, Any]:
    spec = ModelSpec() if task == "max" else ModelSpec("encoder", 128, 4, 1, causal=task != "sort")
    plan = _plan(methods, (spec,), seeds, sizes, task)
    return compare_tables(plan, _Store(plan, 1.0))  # type: ignore[arg-type]


@cache
def _capacity(
    methods: tuple[str, ...], seeds: int, shapes: tuple[tuple[int, ...], ...], reach: float
) -> dict[str, Any]:
    widths, heads, depths = shapes
    models = tuple(ModelSpec("encoder", w, h, d) for w in widths for h in heads for d in depths)
    plan = _plan(methods, models, seeds, SIZES, "max")
    return capacity_tables(plan, _Store(plan, reach))  # type: ignore[arg-type]


def _plan(
    methods: tuple[str, ...], models: tuple[ModelSpec, ...], seeds: int, sizes: tuple[int, ...], task: str
) -> Plan:
    return Plan(
        methods=tuple(SHIPPED_METHODS.get(name, Method(name, "softmax")) for name in methods),
        models=models, task=task, seeds=tuple(range(seeds)), steps=20_000, batch=128, sizes=sizes, samples=128,
        device="cuda", stack=seeds,
    )  # fmt: skip


class _Store:
    """Outcomes that follow a rule: accuracy is lost to dispersion and to wrong ranking, more of both as sizes grow."""

    def __init__(self, plan: Plan, reach: float) -> None:
        self._reach, self._seeds, self._ties = reach, list(plan.seeds), plan.task in ("max", "sort")
        self._cells: dict[str, tuple[ModelSpec, str, int | None]] = {}
        for model in plan.models:
            for method in plan.methods:
                self._cells[plan.training_key(model, method, plan.seeds)] = (model, method.name, None)
                for size in plan.sizes:
                    self._cells[plan.test_key(model, method, plan.seeds, size)] = (model, method.name, size)

    def record(self, key: str) -> dict[str, Any]:
        model, name, size = self._cells[key]
        place = METHODS.index(name) if name in METHODS else len(METHODS)
        rng = np.random.default_rng([place, model.width, model.heads, model.depth, size or 0])
        return self._trained(name, rng) if size is None else self._tested(model, name, size, rng)

    def _trained(self, name: str, rng: np.random.Generator) -> dict[str, Any]:
        loss: list[Any] = (0.05 + 0.02 * rng.random(len(self._seeds))).tolist()
        if name == "linear" and len(loss) > 1:
            loss[1] = None
        diverged = [value is None for value in loss]
        return {
            "seeds": self._seeds, "loss": loss, "diverged": diverged, "curve": [[20_000, loss]], "parameters": 67_978,
            "seconds": round(40.0 + 30.0 * rng.random(), 2), "memory": int(4e8 + 3e8 * rng.random()),
        }  # fmt: skip

    def _tested(self, model: ModelSpec, name: str, size: int, rng: np.random.Generator) -> dict[str, Any]:
        spreading, ranking = _RULES.get(name, _RULES["softmax"])
        carry = self._reach * (model.width / 128.0) ** 0.6 * model.depth**0.25
        x = max(0.0, math.log(size / 16.0) - math.log(carry)) if model.kind == "encoder" else math.log(size / 16.0)
        shift = 0.06 * rng.standard_normal(len(self._seeds))
        hard = np.clip(0.995 * np.exp(-ranking * np.exp(shift) * x * x / 8.0), 0.1, 1.0)
        top = np.clip(0.99 / (1.0 + np.exp(2.2 * spreading * np.exp(shift) * x) - 1.0), 0.002, 1.0)
        right = hard * np.clip(top / (top + 0.05), 0.0, 1.0) if spreading else hard
        entropy = np.clip(-np.log(top) * 0.9, 0.0, None)
        if name == "linear":
            right[1:2] = 0.0
        near = np.clip(1.0 - 1.7 * (1.0 - hard), 0.0, 1.0)
        each = [
            [[float(e * (0.5 + (layer + 1) / model.depth))] * model.heads for layer in range(model.depth)]
            for e in entropy
        ]
        tops = [[[float(t)] * model.heads for _ in range(model.depth)] for t in top]
        return {
            "accuracy": right.tolist(), "ranking": (0.99 * hard).tolist(), "hard": hard.tolist(),
            "close": near.tolist() if self._ties else [None] * len(near), "whole": right.tolist(),
            "entropy": entropy.tolist(), "top": top.tolist(), "layers_entropy": each, "layers_top": tops,
        }  # fmt: skip
