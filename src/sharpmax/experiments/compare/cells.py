"""The tasks of a comparison: train one method's seeds, test them at one size."""

from __future__ import annotations

import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.compare.methods import Method, ModelSpec, recipe_for
from sharpmax.experiments.engines.task import Outcome
from sharpmax.experiments.recipe import Recipe
from sharpmax.experiments.stacked_training import StackedTraining
from sharpmax.lazy import require
from sharpmax.models.encoder import Encoders
from sharpmax.models.single_head import Reading, SetHeads
from sharpmax.tasks.max_retrieval import seeded
from sharpmax.tasks.sized import NOTHING, Batch, SizedTask
from sharpmax.tasks.sized_registry import sized_task


@contextmanager
def peak_of(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """A function that gives, after the work, by how many bytes the device's memory rose in it; None if unknown."""
    found: list[int | None] = [None]
    gc.collect()
    if device.type == "cuda":
        # cuBLAS keeps workspaces for as long as the process lives, so that the first work of all would pay for them.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        yield lambda: found[0]
        peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        torch._C._cuda_clearCublasWorkspaces()
        workspaces = left - torch.cuda.memory_allocated(device)
        found[0] = peak - held - workspaces
        return
    with _LiveTensors() as counted:
        yield lambda: found[0]
    found[0] = counted.peak


class _LiveTensors(TorchDispatchMode):
    """Count the bytes of the tensors made while this is active.

    The process's own memory depends on how fragmented earlier work left the heap: the same training took 38 to 58 MB.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self._storages.add(key)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._storages.discard(key)
        self._live -= size


_TEST = 2
"""Tells the stream of test examples from that of training."""

_CURVE = 50
_PAGE = 2**16
_ROOM = {"cpu": 2**22, "cuda": 2**28}
"""Numbers of one layer's features that are held at once."""


def train(
    *,
    method: Mapping[str, Any],
    task: str,
    model: Mapping[str, Any],
    seeds: Sequence[int],
    steps: int,
    batch: int,
    device: str,
) -> Outcome:
    """Train the seeds of a method side by side; the blob holds their weights."""
    chosen, spec, problem, on = Method.of(method), ModelSpec(**model), sized_task(task), torch.device(device)
    recipe, options = recipe_for(spec, chosen, problem, steps, batch), chosen.examples(problem)

    def begun(with_recipe: Recipe, with_seeds: Sequence[int]) -> StackedTraining[SetHeads | Encoders]:
        def data(seed: int, block: int, count: int) -> list[Tensor]:
            shape = (count, with_recipe.batch)
            return problem.draw(shape, with_recipe.sizes, seeded(on, seed, block), **options).parts

        def initial() -> SetHeads | Encoders:
            return spec.build(chosen, problem, with_seeds)

        return StackedTraining(initial, _losses, data, with_recipe, with_seeds, steps, on)

    with _quiet():
        if on.type == "cpu":
            begun(recipe, seeds)  # what libraries load late is not the method's memory
        with peak_of(on) as peak:  # not timed: measuring memory exactly takes time
            begun(recipe, seeds).next_block()
        training = begun(recipe, seeds)
        began = time.monotonic()
        curve: list[tuple[int, Tensor]] = []
        while training.step < steps:
            loss = training.next_block()
            curve.append((training.step, loss))
        final = curve[-1][1].tolist()  # waits for a GPU
        seconds = time.monotonic() - began
    weights = training.heads()
    record = {
        "seeds": list(seeds),
        "loss": [_finite(value) for value in final],
        "diverged": [not math.isfinite(value) for value in final],
        "curve": [[step, [_finite(value) for value in loss.tolist()]] for step, loss in _thinned(curve)],
        "parameters": sum(tensor.numel() for tensor in weights.values()) // len(seeds),
        "seconds": round(seconds, 2),
        "memory": peak(),
    }
    safetensors = require("safetensors.torch", "reproduce", "sharpmax compare")
    return Outcome(record, safetensors.save(weights))


def examine(
    *,
    method: Mapping[str, Any],
    task: str,
    model: Mapping[str, Any],
    seeds: Sequence[int],
    size: int,
    samples: int,
    device: str,
    blob: bytes,
) -> Outcome:
    """Test trained seeds on `samples` examples of one size each."""
    chosen, spec, problem, on = Method.of(method), ModelSpec(**model), sized_task(task), torch.device(device)
    safetensors = require("safetensors.torch", "reproduce", "sharpmax compare")
    trained = spec.build(chosen, problem, seeds, test=True)
    _load(trained, safetensors.load(blob))
    trained = trained.to(on).requires_grad_(False).eval()
    began = time.monotonic()
    found: dict[str, list[Tensor]] = {}
    with torch.inference_mode(), _quiet():
        for examples in _pages(problem, spec, seeds, size, samples, on):
            asked = examples.answer.shape[-1]
            for name, value in _measured(trained.read(examples.inputs, examples.visible, asked), examples).items():
                found.setdefault(name, []).append(value)
        whole = {name: torch.cat(values, dim=1).cpu().double() for name, values in found.items()}
    counted = whole.pop("counted")
    record: dict[str, Any] = {"seeds": list(seeds), "size": size, "samples": samples}
    for name in ("accuracy", "ranking", "hard"):
        record[name] = _each(whole[name].sum(1) / counted.sum(1))
    close = whole.pop("close")
    record["close"] = _each((whole["ranked"] * close).sum(1) / close.sum(1))
    record["whole"] = _each(whole["whole"].mean(1))
    for name in ("entropy", "top"):
        by_layer = whole[name].mean(1)
        record[name] = _each(by_layer[:, -1].mean(-1))
        record[f"layers_{name}"] = [[_each(heads) for heads in one] for one in by_layer]
    return Outcome(record | {"seconds": round(time.monotonic() - began, 2)})


def _losses(model: SetHeads | Encoders, data: Sequence[Tensor]) -> Tensor:
    inputs, live, answer = data
    scores = model.answer(inputs, live, answer.shape[-1])
    losses = F.cross_entropy(scores.flatten(0, -2), answer.flatten(), reduction="none", ignore_index=NOTHING)
    # Where nothing is asked the loss is 0.
    return losses.view(len(answer), -1).sum(-1) / (answer != NOTHING).view(len(answer), -1).sum(-1)


def _measured(reading: Reading, examples: Batch) -> dict[str, Tensor]:
    """What is measured of each example, [S, B, ...]."""
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
        rows = torch.stack([getattr(look, name) for look in reading.layers], dim=2)
        found[name] = (rows * asked[:, :, None, None]).sum(-1) / many
    return found


def _pages(
    task: SizedTask, model: ModelSpec, seeds: Sequence[int], size: int, samples: int, device: torch.device
) -> Iterator[Batch]:
    """Examples of all seeds side by side, [S, B, ...]; a seed's are the same whatever stands beside it."""
    generators = [seeded(device, seed, size, _TEST) for seed in seeds]
    page = max(1, _PAGE // size)
    for start in range(0, samples, page):
        count = min(page, samples - start)
        drawn = [task.draw((count,), size, generator) for generator in generators]
        names = ("inputs", "visible", "answer", "source", "close")
        whole = [torch.stack([getattr(one, name) for one in drawn]) for name in names]
        positions = whole[1].shape[-1]
        at_once = max(1, _ROOM.get(device.type, _ROOM["cpu"]) // (len(seeds) * positions * model.width))
        for first in range(0, count, at_once):
            yield Batch(*(part[:, first : first + at_once] for part in whole))


def _load(model: SetHeads | Encoders, weights: Mapping[str, Tensor]) -> None:
    """Put trained weights into a model, whose normaliser may be another at test."""
    missing, left = model.load_state_dict(dict(weights), strict=False)
    if other := [name for name in (*missing, *left) if "normalisers." not in name]:
        raise ValueError(f"weights do not fit the model: {other[0]}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Where a policy leaves the range it was fitted on is part of the results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        yield


def _thinned(curve: Sequence[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    every = max(1, math.ceil(len(curve) / _CURVE))
    return [one for place, one in enumerate(curve, start=1) if place % every == 0 or place == len(curve)]


def _each(values: Tensor) -> list[float | None]:
    return [_finite(value) for value in values.tolist()]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
