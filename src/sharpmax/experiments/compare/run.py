"""A comparison as tasks: train the seeds of one method, test them at one size."""

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
from sharpmax.lazy import require
from sharpmax.models.encoder import Encoders
from sharpmax.models.single_head import Reading, SetHeads
from sharpmax.tasks.max_retrieval import seeded, sized_task
from sharpmax.tasks.sized import NOTHING, Batch, SizedTask


@dataclass(frozen=True)
class ComparisonPlan:
    """Every method in every model; each seed is trained once and tested at every size."""

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
    files: tuple[str, ...] = ()  # texts of a user's own Python files

    def identity(self) -> dict[str, Any]:
        """What must be the same to resume a run; methods, models, seeds and sizes may be added."""
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

    def tasks(self) -> list[Job]:
        """All tasks: trainings first, then tests, the longest first, so that none is left for the end."""
        trainings, tests = [], []
        for model, method, seeds in product(self.models, self.methods, self.stacks()):
            key = self.key(model, method, seeds)
            common = {"model": model, "method": method, "seeds": seeds, "task": self.task, "device": self.device}
            own = {"steps": self.steps, "batch": self.batch}
            trainings.append(Job(key, f"{__name__}:train", common | own, label=f"train {method.name}"))
            for size in self.sizes:
                own, label = {"size": size, "samples": self.samples}, f"test {method.name} at {size:,}"
                test = self.key(model, method, seeds, size)
                tests.append(Job(test, f"{__name__}:evaluate", common | own, after=key, label=label))
        return trainings + sorted(tests, key=lambda job: -job.arguments["size"])

    def key(self, model: ModelSpec, method: Method, seeds: Sequence[int], size: int | None = None) -> str:
        """The key of a training, or of its test at a size; it changes with the recipe, options or file of a method."""
        recipe = recipe_for(model, method, sized_task(self.task), self.steps, self.batch)
        own = [] if SHIPPED_METHODS.get(method.name) == method else list(self.files)
        text = json.dumps([{**asdict(method), "summary": ""}, repr(recipe), own], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        what = "train" if size is None else f"test {size}"
        return f"{self.task}/{model.label}/{method.name} {digest}/seeds {seeds[0]}-{seeds[-1]}/{what}"


_MEASURES = ("accuracy", "ranking", "hard", "close", "whole", "entropy", "top", "layers_entropy", "layers_top")


@dataclass(frozen=True)
class MethodResult:
    """One method in one model.

    `training` holds losses and curve by seed, seeds that diverged, parameters, seconds and bytes; `measures` by name
    and size are [seeds, ...], NaN where there is no number.
    """

    training: dict[str, Any]
    measures: Mapping[str, Mapping[int, np.ndarray]]


def result_of(plan: ComparisonPlan, store: RunStore, model: ModelSpec, method: Method) -> MethodResult:
    """The result of a method in a model, once all its tasks are done."""
    stacks = plan.stacks()
    trained = [store.record(plan.key(model, method, seeds)) for seeds in stacks]
    memory = [one["memory"] for one in trained]
    training = {
        "loss": [value for one in trained for value in one["loss"]],
        "diverged": [seed for one in trained for seed, bad in zip(one["seeds"], one["diverged"], strict=True) if bad],
        "curve": [
            [step, [loss for one in trained for loss in one["curve"][place][1]]]
            for place, (step, _) in enumerate(trained[0]["curve"])
        ],
        "parameters": trained[0]["parameters"],
        "seconds": round(sum(one["seconds"] for one in trained), 2),
        "memory": None if None in memory else max(memory),
    }
    tested = {size: [store.record(plan.key(model, method, seeds, size)) for seeds in stacks] for size in plan.sizes}
    measures = {
        name: {size: np.array([value for one in found for value in one[name]], float) for size, found in tested.items()}
        for name in _MEASURES
    }
    return MethodResult(training, measures)


@contextmanager
def _peak_bytes(device: torch.device) -> Iterator[list[int | None]]:
    """A list that holds, after this block, by how many bytes the memory of a GPU rose in it; None elsewhere."""
    found: list[int | None] = [None]
    if device.type != "cuda":
        yield found
        return
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps them, so that the first block would pay for them
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    yield found
    peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    found[0] = peak - held - (left - torch.cuda.memory_allocated(device))


_TEST = 2  # the random stream of test examples, apart from that of training
_CURVE = 50
_PAGE = 2**16
_FEATURES = {"cpu": 2**22, "cuda": 2**28}  # numbers of one layer's features that are held at once


def train(
    *,
    method: Method,
    task: str,
    model: ModelSpec,
    seeds: Sequence[int],
    steps: int,
    batch: int,
    device: str,
) -> Outcome:
    """Train the seeds of a method side by side; the blob holds their weights."""
    problem, on = sized_task(task), torch.device(device)
    recipe, options = recipe_for(model, method, problem, steps, batch), method.examples(problem)

    def data(seed: int, block: int, count: int) -> list[Tensor]:
        return problem.draw((count, recipe.batch), recipe.sizes, seeded(on, seed, block), **options).parts

    curve: list[tuple[int, Tensor]] = []
    with _quiet(), _peak_bytes(on) as peak:
        initial = partial(model.build, method, problem, seeds)
        training = StackedTraining(initial, _losses, data, recipe, seeds, steps, on)
        began = time.monotonic()
        while training.step < steps:
            loss = training.next_block()
            curve.append((training.step, loss))
        curve[-1][1].tolist()  # waits for a GPU
        seconds = time.monotonic() - began
    last = curve[-1][1]
    every = math.ceil(len(curve) / _CURVE)
    weights = training.heads()
    record = {
        "seeds": list(seeds),
        "loss": _finite(last),
        "diverged": [not math.isfinite(value) for value in last.tolist()],
        "curve": [
            [step, _finite(loss)] for place, (step, loss) in enumerate(curve, 1) if place % every == 0 or loss is last
        ],
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
    """Test trained seeds on `samples` examples of one size each."""
    problem, on = sized_task(task), torch.device(device)
    safetensors = require("safetensors.torch", "reproduce", "sharpmax compare")
    trained = model.build(method, problem, seeds, test=True)
    missing, left = trained.load_state_dict(safetensors.load(blob), strict=False)
    if other := [name for name in (*missing, *left) if "normalisers." not in name]:  # they may differ at test
        raise ValueError(f"weights do not fit the model: {other[0]}")
    trained = trained.to(on).requires_grad_(False).eval()
    began = time.monotonic()
    with torch.inference_mode(), _quiet():
        pages = [
            _measured(trained.read(examples.inputs, examples.visible, examples.answer.shape[-1]), examples)
            for examples in _pages(problem, model, seeds, size, samples, on)
        ]
        whole = {name: torch.cat([page[name] for page in pages], dim=1).cpu().double() for name in pages[0]}
    counted, close = whole["counted"], whole["close"]
    record: dict[str, Any] = {"seeds": list(seeds), "size": size, "samples": samples}
    for name in ("accuracy", "ranking", "hard"):
        record[name] = _finite(whole[name].sum(1) / counted.sum(1))
    record["close"] = _finite((whole["ranked"] * close).sum(1) / close.sum(1))
    record["whole"] = _finite(whole["whole"].mean(1))
    for name in ("entropy", "top"):
        by_layer = whole[name].mean(1)
        record[name] = _finite(by_layer[:, -1].mean(-1))
        record[f"layers_{name}"] = [[_finite(heads) for heads in one] for one in by_layer]
    return Outcome(record | {"seconds": round(time.monotonic() - began, 2)})


def _losses(model: SetHeads | Encoders, data: Sequence[Tensor]) -> Tensor:
    inputs, visible, answer = data
    scores = model.answer(inputs, visible, answer.shape[-1])
    losses = F.cross_entropy(scores.flatten(0, -2), answer.flatten(), reduction="none", ignore_index=NOTHING)
    # Where nothing is asked the loss is 0.
    return losses.view(len(answer), -1).sum(-1) / (answer != NOTHING).view(len(answer), -1).sum(-1)


def _measured(reading: Reading, examples: Batch) -> dict[str, Tensor]:
    """Measures of each example, [S, B, ...]."""
    asked = examples.answer != NOTHING

    def right(scores: Tensor) -> Tensor:
        # The largest of scores that are not numbers is no answer.
        return (scores.argmax(-1) == examples.answer) & scores.isfinite().all(-1) & asked

    ranked = (reading.layers[-1].first == examples.source) & asked
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
    many = asked.sum(-1)[:, :, None, None]
    for name in ("entropy", "top"):
        rows = torch.stack([getattr(layer, name) for layer in reading.layers], dim=2)
        found[name] = (rows * asked[:, :, None, None]).sum(-1) / many
    return found


def _pages(
    task: SizedTask, model: ModelSpec, seeds: Sequence[int], size: int, samples: int, device: torch.device
) -> Iterator[Batch]:
    """Examples of all seeds side by side, [S, B, ...]; a seed's do not depend on the other seeds."""
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
    """Where a policy leaves the range it was fitted on is part of the results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        yield


def _finite(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]
