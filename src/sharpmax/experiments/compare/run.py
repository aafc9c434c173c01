"""A comparison as tasks (train the seeds of a method, test them at one size), and its tables."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.compare.methods import SHIPPED_METHODS, Method, ModelSpec, recipe_for
from sharpmax.experiments.engine import Job
from sharpmax.experiments.run_folder import Outcome, RunStore
from sharpmax.experiments.stacked_training import StackedTraining
from sharpmax.experiments.statistics import LEVEL, SeedMean, paired_p, seed_mean
from sharpmax.lazy import require
from sharpmax.models.stacked import Encoders, Reading, SingleHeads
from sharpmax.probing.measurement import REPEATS, crossing, finite_or_none, interval
from sharpmax.results import json_values
from sharpmax.tasks.sized import NOTHING, Batch, SizedTask, seeded, sized_task


@dataclass(frozen=True)
class ComparisonPlan:
    """Every method in every model. Each seed is trained once and tested at every size."""

    methods: tuple[Method, ...]
    models: tuple[ModelSpec, ...]
    task: str
    seeds: tuple[int, ...]
    steps: int
    batch: int
    sizes: tuple[int, ...]
    samples: int
    device: str
    files: tuple[str, ...] = ()  # texts of the user's Python files

    def identity(self) -> dict[str, Any]:
        """What must be the same to resume a run. Methods, models and sizes may be added."""
        task = sized_task(self.task)
        same = {name: getattr(self, name) for name in ("steps", "batch", "samples", "device")}
        return {"task": f"{task.name} {task.version}", **same}

    def tasks(self) -> list[Job]:
        """All tasks: trainings, then tests, the longest first, so that no long task remains at the end."""
        trainings, tests = [], []
        for model, method in product(self.models, self.methods):
            key = self.key(model, method)
            common = {name: getattr(self, name) for name in ("seeds", "task", "device")}
            common |= {"model": model, "method": method}
            own = {"steps": self.steps, "batch": self.batch}
            trainings.append(Job(key, f"{__name__}:train", common | own, label=f"train {method.name}"))
            for size in self.sizes:
                own, label = {"size": size, "samples": self.samples}, f"test {method.name} at {size:,}"
                test = self.key(model, method, size)
                tests.append(Job(test, f"{__name__}:evaluate", common | own, after=key, label=label))
        return trainings + sorted(tests, key=lambda job: -job.arguments["size"])

    def key(self, model: ModelSpec, method: Method, size: int | None = None) -> str:
        """The key of a training, or of its test at a size. It depends on the recipe, options and file of the method."""
        recipe = recipe_for(model, method, sized_task(self.task), self.steps, self.batch)
        own = [] if SHIPPED_METHODS.get(method.name) == method else list(self.files)
        text = json.dumps([{**asdict(method), "summary": ""}, repr(recipe), own], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        what = "train" if size is None else f"test {size}"
        return f"{self.task}/{model.label}/{method.name} {digest}/seeds {self.seeds[0]}-{self.seeds[-1]}/{what}"


@contextmanager
def _peak_bytes(device: torch.device) -> Iterator[list[int | None]]:
    """A list with one entry: after the block, the bytes it added to GPU memory at its peak; None on other devices."""
    found: list[int | None] = [None]
    if device.type != "cuda":
        yield found
        return
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # or they would count for the first block only
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    yield found
    peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    found[0] = peak - held - (left - torch.cuda.memory_allocated(device))


_TEST = 2  # the random stream of test examples
_PAGE = 2**16
_FEATURES = {"cpu": 2**22, "cuda": 2**28}  # numbers in the features of a layer


def train(
    *, method: Method, task: str, model: ModelSpec, seeds: Sequence[int], steps: int, batch: int, device: str
) -> Outcome:
    """Train all seeds of a method at once. The blob holds their weights."""
    problem, on = sized_task(task), torch.device(device)
    recipe, options = recipe_for(model, method, problem, steps, batch), method.examples(problem)

    def data(seed: int, block: int, count: int) -> list[Tensor]:
        return problem.draw((count, recipe.batch), recipe.sizes, seeded(on, seed, block), **options).parts

    with _quiet(), _peak_bytes(on) as peak:
        initial = partial(model.build, method, problem, seeds)
        training = StackedTraining(initial, _losses, data, recipe, seeds, steps, on)
        began = time.monotonic()
        while training.step < steps:
            loss = training.next_block()
        last = _finite(loss)  # synchronises with the GPU
        seconds = time.monotonic() - began
    weights = training.heads()
    record = {
        "seeds": list(seeds),
        "loss": last,
        "diverged": [seed for seed, value in zip(seeds, last, strict=True) if value is None],
        "parameters": sum(tensor.numel() for tensor in weights.values()) // len(seeds),
        "seconds": round(seconds, 2),
        "memory": peak[0],
    }
    safetensors = require("safetensors.torch", "reproduce", "sharpmax compare")
    return Outcome(record, safetensors.save(weights))


def evaluate(
    *,
    method: Method,
    task: str,
    model: ModelSpec,
    seeds: Sequence[int],
    size: int,
    samples: int,
    device: str,
    blob: bytes,
) -> Outcome:
    """Test each trained seed on `samples` examples of one size."""
    problem, on = sized_task(task), torch.device(device)
    safetensors = require("safetensors.torch", "reproduce", "sharpmax compare")
    trained = model.build(method, problem, seeds, test=True)
    missing, left = trained.load_state_dict(safetensors.load(blob), strict=False)
    if other := [name for name in (*missing, *left) if "normalisers." not in name]:  # the normaliser may differ at test
        raise ValueError(f"weights do not fit the model: {other[0]}")
    trained = trained.to(on).requires_grad_(False).eval()
    with torch.inference_mode(), _quiet():
        pages = [
            _measured(trained.read(examples.inputs, examples.visible, examples.answer.shape[-1]), examples)
            for examples in _pages(problem, model, seeds, size, samples, on)
        ]
        whole = {name: torch.cat([page[name] for page in pages], dim=1).cpu().double() for name in pages[0]}
    record: dict[str, Any] = {"seeds": list(seeds), "size": size, "samples": samples}
    for name in ("accuracy", "ranking", "hard"):
        record[name] = _finite(whole[name].sum(1) / whole["counted"].sum(1))
    record["close"] = _finite((whole["ranked"] * whole["close"]).sum(1) / whole["close"].sum(1))
    for name in ("whole", "entropy", "top"):
        record[name] = _finite(whole[name].mean(1))
    return Outcome(record)


def _losses(model: SingleHeads | Encoders, data: Sequence[Tensor]) -> Tensor:
    inputs, visible, answer = data
    scores = model.answer(inputs, visible, answer.shape[-1])
    losses = F.cross_entropy(scores.flatten(0, -2), answer.flatten(), reduction="none", ignore_index=NOTHING)
    # Positions without a question have loss 0.
    return losses.view(len(answer), -1).sum(-1) / (answer != NOTHING).view(len(answer), -1).sum(-1)


def _measured(reading: Reading, examples: Batch) -> dict[str, Tensor]:
    """Measures of each example, [S, B, ...]."""
    asked = examples.answer != NOTHING

    def right(scores: Tensor) -> Tensor:
        # Scores that are not finite are no answer.
        return (scores.argmax(-1) == examples.answer) & scores.isfinite().all(-1) & asked

    ranked = (reading.first == examples.source) & asked
    correct = right(reading.scores)
    found = {
        "counted": asked.sum(-1),
        "accuracy": correct.sum(-1),
        "ranking": ranked.sum(-1),
        "hard": right(reading.argmax_scores).sum(-1),
        "close": examples.close,
        "ranked": (ranked | ~asked).all(-1),
        "whole": (correct | ~asked).all(-1),
    }
    for name in ("entropy", "top"):  # of the last layer
        rows = getattr(reading, name) * asked[:, :, None]
        found[name] = (rows.sum(-1) / asked.sum(-1)[:, :, None]).mean(-1)
    return found


def _pages(
    task: SizedTask, model: ModelSpec, seeds: Sequence[int], size: int, samples: int, device: torch.device
) -> Iterator[Batch]:
    """Examples of all seeds, [S, B, ...]. Those of a seed do not depend on other seeds."""
    generators = [seeded(device, seed, size, _TEST) for seed in seeds]
    page = max(1, _PAGE // size)
    for start in range(0, samples, page):
        count = min(page, samples - start)
        drawn = [task.draw((count,), size, generator) for generator in generators]
        names = ("inputs", "visible", "answer", "source", "close")
        whole = [torch.stack([getattr(one, name) for one in drawn]) for name in names]
        positions = whole[1].shape[-1]
        at_once = max(1, _FEATURES.get(device.type, _FEATURES["cpu"]) // (len(seeds) * positions * model.width))
        for first in range(0, count, at_once):
            yield Batch(*(part[:, first : first + at_once] for part in whole))


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore rows outside the fitted range of a policy; they are part of the results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        yield


def _finite(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


@dataclass(frozen=True)
class Rank:
    """A place on the leaderboard, the leader of its group, and the p-value against that leader."""

    rank: int
    leader: str
    p: float | None


def ranks(scores: Mapping[str, np.ndarray]) -> dict[str, Rank]:
    """Rank every method by its mean score ([seeds] each), best first.

    A method shares the rank of its group's leader unless it is significantly behind it in a paired test. The first one
    that is leads the next group, and its rank counts all methods before it. With a single seed only equal scores share
    a rank.
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
    # A single seed, or the same difference in every seed: any difference counts.
    return bool(abs(float((best - other).mean())) > 1e-9)


@dataclass(frozen=True)
class MethodResult:
    """One method in one model: the record of its training, and measures [sizes, seeds], NaN where there is none."""

    training: Mapping[str, Any]
    measures: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, plan: ComparisonPlan, store: RunStore, model: ModelSpec, method: Method) -> MethodResult:
        """The result of a method, once its tasks are done."""
        tested = [store.records[plan.key(model, method, size)] for size in plan.sizes]
        names = ("accuracy", "ranking", "hard", "close", "whole", "entropy", "top")
        measures = {name: np.array([one[name] for one in tested], float) for name in names}
        return cls(store.records[plan.key(model, method)], measures)

    def by_size(self, plan: ComparisonPlan, measure: str) -> dict[int, SeedMean]:
        """A measure by size; shares in percent."""
        factor = 1.0 if measure == "entropy" else 100.0
        return {size: seed_mean(factor * row) for size, row in zip(plan.sizes, self.measures[measure], strict=True)}


def compare_tables(plan: ComparisonPlan, store: RunStore) -> dict[str, Any]:
    """The leaderboard of all methods in the first model of the plan, and their measures; accuracies in percent."""
    setting = setting_table(plan)
    known = {method.name: MethodResult.of(plan, store, plan.models[0], method) for method in plan.methods}
    shown = {name: name for name in ("accuracy", "ranking", "hard", "close", "whole", "entropy")}
    tables: dict[str, Any] = {
        table: {name: one.by_size(plan, measure) for name, one in known.items()}
        for table, measure in (shown | {"top_weight": "top"}).items()
    }
    accuracy = {name: 100.0 * one.measures["accuracy"] for name, one in known.items()}
    tables["per_seed"] = {
        name: dict(zip(plan.sizes, values.round(4).tolist(), strict=True)) for name, values in accuracy.items()
    }
    scored = [plan.sizes.index(size) for size in setting["scored_sizes"]]
    scores = {name: values[scored].mean(axis=0) for name, values in accuracy.items()}
    tables["leaderboard"] = {
        name: {**asdict(place), "score": seed_mean(scores[name])} for name, place in ranks(scores).items()
    }
    tables["training"] = {name: one.training for name, one in known.items()}
    tables["methods"] = {method.name: asdict(method) for method in plan.methods}
    return json_values(tables | {"setting": setting})


def setting_table(plan: ComparisonPlan) -> dict[str, Any]:
    """The settings of the run. Methods are ranked by the sizes beyond training, or by all if there are none."""
    model, task = plan.models[0], sized_task(plan.task)
    recipe = recipe_for(model, plan.methods[0], task, plan.steps, plan.batch)
    return {
        "task": task.name,
        "task_summary": task.summary,
        "unit": task.unit,
        "model": model.label,
        **{name: getattr(plan, name) for name in ("sizes", "seeds", "steps", "batch", "samples", "device")},
        "scored_sizes": [size for size in plan.sizes if size > task.trained[1]] or plan.sizes,
        "train_sizes": task.trained,
        "learning_rate": recipe.learning_rate,
        "warmup": recipe.warmup,
        "level": LEVEL,
    }


FACTORS = ("width", "heads", "depth")

_LIMITS = {
    "accuracy": "accuracy falls to half of what it is at the smallest size",
    "top": "top weight falls under one half",
}


def capacity_tables(plan: ComparisonPlan, store: RunStore) -> dict[str, Any]:
    """For every method: the sizes at which each model fails, and power laws through them."""
    tables: dict[str, Any] = {"capacity": {}, "rules": {}, "setting": setting_table(plan)}
    x = np.log(np.array(plan.sizes, dtype=float))
    for method in plan.methods:
        known = {model: MethodResult.of(plan, store, model, method) for model in plan.models}
        tables["capacity"][method.name] = [_cell(plan, model, one, x) for model, one in known.items()]
        tables["rules"][method.name] = {
            name: {"what": what, **fit_power_law(x, {model: one.measures[name] for model, one in known.items()}, name)}
            for name, what in _LIMITS.items()
        }
    return json_values(tables)


def _mean_of_known(values: np.ndarray, axis: int) -> np.ndarray:
    """`np.nanmean` without its warning where all values are NaN; their mean is NaN."""
    with np.errstate(invalid="ignore"):
        means: np.ndarray = np.nansum(values, axis=axis) / np.isfinite(values).sum(axis=axis)
    return means


def _end(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """ln of the size at which curves [sizes, …] of a measure fall to their limit; ±inf outside the tested sizes."""
    return crossing(x, y / np.maximum(y[:1], 1e-12) if name == "accuracy" else y, 0.5)


def _cell(plan: ComparisonPlan, model: ModelSpec, one: MethodResult, x: np.ndarray) -> dict[str, Any]:
    def size(measure: str) -> float | str | None:
        """The size at which the mean curve falls to its limit, or on which side of the tested sizes it is."""
        end = float(_end(measure, x, _mean_of_known(one.measures[measure], 1)))
        if np.isinf(end):
            return "beyond" if end > 0 else "never above"
        return None if np.isnan(end) else float(np.exp(end))

    return {
        "model": model.label,
        **{name: getattr(model, name) for name in FACTORS},
        **{name: one.training[name] for name in ("parameters", "seconds", "diverged")},
        "half_accuracy_size": size("accuracy"),
        "half_top_weight_size": size("top"),
        "accuracy": one.by_size(plan, "accuracy"),
        "top_weight": one.by_size(plan, "top"),
        "entropy": one.by_size(plan, "entropy"),
    }


def fit_power_law(x: np.ndarray, curves: Mapping[ModelSpec, np.ndarray], measure: str, seed: int = 0) -> dict[str, Any]:
    """Fit size = c · width^a · heads^b · depth^d to models that reach their limit within the tested sizes.

    `curves` holds a measure [sizes, seeds] by model, `x` the logarithms of the sizes. Intervals come from resampled
    seeds, the same for every model. Models that reach their limit beyond the largest size are left out and counted; if
    there are many, exponents are underestimated.
    """
    models = list(curves)
    whole = np.stack([curves[model] for model in models], axis=1)  # [sizes, models, seeds]
    ends = _end(measure, x, _mean_of_known(whole, 2))
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
        again = _least_squares(factors, _end(measure, x, _mean_of_known(drawn, 2)))
        if again is not None:
            draws.append(again[0])
    low, high = interval(draws, best[0])
    exponents = {
        name: {"mean": float(best[0][place]), "low": finite_or_none(low[place]), "high": finite_or_none(high[place])}
        for place, name in enumerate(varying, start=1)
    }
    return {**counts, "exponents": exponents, "constant": float(np.exp(best[0][0])), "r2": best[1]}


def _least_squares(factors: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, float | None] | None:
    """Coefficients of ends = c + factors·a over finite ends, and R²; None if there are too few."""
    use = np.isfinite(ends)
    design = np.column_stack((np.ones(int(use.sum())), factors[use]))
    if len(design) < design.shape[1] or np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    found, *_ = np.linalg.lstsq(design, ends[use], rcond=None)
    around = float(((ends[use] - ends[use].mean()) ** 2).sum())
    left = float(((ends[use] - design @ found) ** 2).sum())
    return found, 1.0 - left / around if around > 1e-12 else None
