"""Inputs of growing size, the row statistics of every head on them, and their curves, slopes and horizons."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sharpmax.calibration.data import replicate_keys
from sharpmax.errors import reject, reject_type
from sharpmax.integrations.torch_modules import run_example
from sharpmax.integrations.transformers.support import is_torch_module
from sharpmax.models.scoring import encode, special_tokens
from sharpmax.probing.capture import STATISTICS, capture
from sharpmax.tasks.prompt import Prompt, Task
from sharpmax.tasks.registry import TASKS, get_task
from sharpmax.tasks.text import plain_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT = "text"
"""The name of the task that reads plain text."""

FIT_UP_TO = {"items": 64, "tokens": 512}
"""The largest size that forecasts are fitted to, by unit, if there are larger sizes to test them on."""

REPEATS = 200
"""The number of bootstrap samples for an interval."""

# By default each size gets about 8,192 tokens, in 2 to 12 prompts.
_PROMPTS, _LEAST, _TOKENS = 12, 2, 8192

# Default lengths of text; the longest is for models that do not state a context.
_SHORTEST, _LONGEST = 64, 8192

_PER_ITEM = 8
"""The number of tokens of text that count as one item, about as many as a line of a list has."""

Numbers = NDArray[np.float64]
Readings = Mapping[int, Mapping[str, Numbers]]
"""Each statistic of every passage and head `[passages, layers, heads]`, by size; NaN where there is none."""

Progress = Callable[[str, int, int, str], None]
"""Called with what is being done, the amount of work done, the amount of work, and a remark."""


@dataclass(frozen=True, eq=False)
class Passage:
    """One input of a model, and the items in it that key replication may repeat."""

    inputs: Any  # keyword arguments of the model; for a torch module also a tensor or a tuple of arguments
    items: tuple[int, ...] = ()
    """The item of each token, from 1; 0 before the first item, −1 after the last one. Empty: no items."""

    once: int = 0  # the item asked for, which must not be repeated; 0: none, or it is the first or the last one

    @property
    def length(self) -> int:
        """The length of a prompt in tokens."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True, eq=False)
class ProbeInputs:
    """Passages of one task by size, ascending."""

    task: str
    unit: str  # of sizes: items or tokens
    passages: Mapping[int, Sequence[Passage]]
    per_item: int = 1  # the size of one item
    nested: bool = False  # whether the i-th passage of a size is the end of the i-th passage of every larger size

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.passages)

    @property
    def reads(self) -> int:
        """The number of passages."""
        return sum(map(len, self.passages.values()))

    @property
    def fit_up_to(self) -> int:
        """The largest size that forecasts are fitted to: `FIT_UP_TO`, or half of the sizes if that leaves too few."""
        fitted = [size for size in self.sizes if size <= FIT_UP_TO[self.unit]]
        if len(fitted) < 2 or len(fitted) == len(self.sizes):
            fitted = list(self.sizes[: max(2, len(self.sizes) // 2)])
        return fitted[-1]


def check_task(name: str) -> None:
    """Raise ArgumentError for a name that is not a task, "text" or a file."""
    if name != TEXT and name not in TASKS and not Path(name).is_file():
        reject("task", repr(name), f"one of {[*sorted(TASKS), TEXT]} or the path of a Python file that defines TASK")


def task_inputs(
    task: str | Task,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    sizes: Sequence[int] | None = None,
    prompts: int | None = None,
    seed: int = 0,
    text: str | None = None,
    causal: bool = True,
) -> ProbeInputs:
    """Return prompts of a task, each up to where its answer begins, or windows of plain text.

    `sizes` are by default those of the task that fit the context. `text` replaces Python's documentation.
    """
    for size in sizes or ():
        if type(size) is not int or size < 1:
            reject("sizes", repr(size), "whole numbers from 1")
    sizes = None if sizes is None else sorted(set(sizes))
    if isinstance(task, str):
        check_task(task)
    if task == TEXT:
        found = _windows(plain_text("test") if text is None else text, tokenizer, context, sizes, prompts, causal)
    else:
        task = get_task(task) if isinstance(task, str) else task
        passages: dict[int, list[Passage]] = {}
        for size in task.sizes if sizes is None else sizes:
            task.check_size(size)
            first = _passage(tokenizer, task.prompts(size, 1, seed)[0])
            if context is not None and first.length > context:
                if sizes is None:
                    break
                given = f"{size} for the task {task.name!r}, a prompt of {first.length:,} tokens"
                allowed = f"prompts of up to {context:,} tokens, the model's context"
                reject("sizes", given, allowed, "leave out the largest sizes")
            chosen = task.prompts(size, _count(first.length, prompts), seed)
            passages[size] = [_passage(tokenizer, one) for one in chosen]
        found = ProbeInputs(task.name, "items", passages)
    if len(found.sizes) < 2:
        allowed = f"two or more sizes that fit the model's context of {context} tokens"
        reject("sizes", f"{list(found.sizes)} for {found.task!r}", allowed)
    return found


def _count(tokens: int, prompts: int | None) -> int:
    return max(_LEAST, min(_PROMPTS, _TOKENS // tokens)) if prompts is None else prompts


def _windows(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    sizes: Sequence[int] | None,
    prompts: int | None,
    causal: bool,
) -> ProbeInputs:
    """Return windows of growing size that end with the same tokens; by default sizes double.

    As they end alike, a comparison of sizes does not depend on how easy the last words are. The special tokens that the
    tokenizer puts around a text are around each window and count.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    before, after = special_tokens(tokenizer)
    special = len(before) + len(after)
    most = min(len(ids) + special, context or _LONGEST)
    sizes = [_SHORTEST << power for power in range(16) if _SHORTEST << power <= most] if sizes is None else sizes
    for size in sizes:
        if not special + 2 <= size <= most:
            allowed = f"{special + 2} … {most:,} tokens, which fit the model and the text"
            reject("sizes", f"{size} for text", allowed, "leave it out")
    counts = {size: _count(size, prompts) for size in sizes}
    first, many = max(sizes, default=0) - special, max(counts.values(), default=0)
    # Spread the ends evenly, however many of them a size uses (van der Corput's sequence).
    shares = [int(f"{number:b}"[::-1], 2) / 2 ** number.bit_length() for number in range(1, many + 1)]
    ends = [round(first + share * (len(ids) - first)) for share in shares]
    found = {}
    for size, count in counts.items():
        windows = [[*before, *ids[end - size + special : end], *after] for end in ends[:count]]
        items = tuple(1 + place // _PER_ITEM for place in range(size)) if causal and not after else ()
        found[size] = [Passage({"input_ids": torch.tensor([window])}, items) for window in windows]
    return ProbeInputs(TEXT, "tokens", found, per_item=_PER_ITEM, nested=True)


def _passage(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Passage:
    """Return the prompt up to its answer, with the items that `replicate_keys` finds: counts of 2, or gaps."""
    reply = encode(tokenizer, prompt)
    inputs = {"input_ids": torch.tensor([reply.ids[: reply.start]])}
    if not tokenizer.is_fast:
        return Passage(inputs)
    twice = replicate_keys(tokenizer, prompt, reply, 2)
    gaps = [place - at for at, place in enumerate(twice.positions or range(len(twice.ids)))]
    marks = itertools.groupby(zip((twice.times or ())[: reply.start], gaps, strict=False))
    runs = [(mark[0], len(list(run))) for mark, run in marks]
    if len(runs) < 3:
        return Passage(inputs)
    numbers = [0, *range(1, len(runs) - 1), -1]
    once = next((number for number, (times, _) in zip(numbers, runs, strict=True) if number > 0 and times == 1), 0)
    return Passage(inputs, tuple(n for n, (_, size) in zip(numbers, runs, strict=True) for _ in range(size)), once)


def own_inputs(inputs: Mapping[int, Any] | None, module: bool = False) -> ProbeInputs:
    """Check the caller's inputs: for each size one or several dicts of keyword arguments of the model.

    For a torch module that is not a transformers model, each may also be a tensor or a tuple of arguments.
    """
    kinds, named = ((Mapping, torch.Tensor, tuple), "tensors, tuples or dicts") if module else ((Mapping,), "dicts")
    if not isinstance(inputs, Mapping) or not inputs:
        reject_type("inputs", type(inputs).__name__, f"a mapping from sizes to {named} to call the model with")
    found = {}
    for size in sorted(inputs):
        one = inputs[size]
        given: list[Any] = [one] if isinstance(one, kinds) else list(one)
        if type(size) is not int or size < 1 or not given or not all(isinstance(call, kinds) for call in given):
            allowed = f"{named} to call the model with, for sizes from 1"
            reject("inputs", f"{given!r:.60} for {size!r}", allowed)
        found[size] = [Passage(call) for call in given]
    if len(found) < 2:
        reject("inputs", f"the size {list(found)}", "two or more sizes")
    return ProbeInputs("own", "tokens", found)


def measure(model: nn.Module, inputs: ProbeInputs, rows: str, done: Callable[[int], None]) -> Readings:
    """Measure the mean statistics of every head over the chosen rows of each passage, the largest size last.

    `done` is called with the size after each passage. The model must be in evaluation mode.
    """
    found: dict[int, dict[str, Numbers]] = {}
    many: set[int] = set()
    for size, passages in inputs.passages.items():
        parts: dict[str, list[Numbers]] = {name: [] for name in STATISTICS}
        for passage in passages:
            with capture(model, rows) as captured:
                call_model(model, passage.inputs)
            last = {call.layer: call.statistics for call in captured.calls}
            for name in STATISTICS:
                # Rows without visible keys are padding. Not every device has float64.
                layers = [
                    one[name].masked_fill(one["count"] == 0, torch.nan).cpu().double().nanmean(-1)
                    for _, one in sorted(last.items())
                ]
                parts[name].append(grid(layers))
            many.add(len(last))
            if len(many) > 1:
                reject("inputs", f"inputs with {sorted(many)} attention calls", "as many calls at every size")
            done(size)
        found[size] = {name: np.concatenate(values) for name, values in parts.items()}
    return found


def call_model(model: Any, inputs: Any) -> None:
    """Run a transformers model on its device without a cache and with the logits of one row, if it has these options.

    Any other torch module gets its inputs unchanged.
    """
    if not is_torch_module(model):
        known = inspect.signature(model.forward).parameters
        options = {name: value for name, value in {"use_cache": False, "logits_to_keep": 1}.items() if name in known}
        moved = {name: v.to(model.device) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
        inputs = options | moved
    with torch.no_grad():
        run_example(model, inputs)


def grid(layers: Sequence[torch.Tensor]) -> Numbers:
    """Stack `[B, heads]` of each layer to `[B, layers, heads]`, NaN where a layer has fewer heads."""
    if len({len(layer) for layer in layers}) > 1:  # a module that attends within windows makes batches of its own
        layers = [layer.nanmean(0, keepdim=True) for layer in layers]
    heads = max(layer.shape[1] for layer in layers)
    grid = np.full((layers[0].shape[0], len(layers), heads), np.nan)
    for place, layer in enumerate(layers):
        grid[:, place, : layer.shape[1]] = layer.cpu().double().numpy()
    return grid


def fit(readings: Readings, nested: bool, mass: float, seed: int) -> tuple[dict[str, Numbers], Numbers, Numbers]:
    """Return curves, slopes and horizons, the latter two with 95% intervals from bootstrap samples of the passages.

    There are curves `[sizes, layers, heads]` of every statistic and of `effective`, e^entropy. Slopes are of entropy
    against ln n. A horizon is the number of keys from which the top weight stays below `mass`: inf beyond the largest
    size, −inf if it does at every size. Both are `[3, layers, heads]`: value, low and high; NaN is unknown.
    """

    def both(curves: Mapping[str, Numbers]) -> Numbers:
        lengths = np.log(np.maximum(curves["count"], 1.0))
        crossed = crossing(lengths, curves["top"], mass)
        horizon = np.where(np.isfinite(crossed), np.exp(crossed), crossed)
        return np.stack([slope(lengths, curves["entropy"]), horizon])

    curves = curves_of(readings, nested)
    found, draws = both(curves), []
    passages, rng = max(len(one["count"]) for one in readings.values()), np.random.default_rng(seed)
    needed = {size: {name: one[name] for name in ("entropy", "top", "count")} for size, one in readings.items()}
    for _ in range(REPEATS if passages > 1 else 0):
        share = np.bincount(rng.integers(passages, size=passages), minlength=passages).astype(float)
        draws.append(both(curves_of(needed, nested, share)))
    slopes, horizons = np.stack([found, *interval(draws, found)], axis=1)
    return curves, slopes, horizons


def curves_of(readings: Readings, nested: bool, share: Numbers | None = None) -> dict[str, Numbers]:
    """Return the mean of every statistic by size, `[sizes, layers, heads]`, with passages weighted by `share`.

    Larger sizes have fewer passages. If passages are nested, a size adds to the previous one the mean change in the
    passages that both have; the plain mean would mostly depend on which passages are left.
    """

    def mean(values: Numbers) -> Numbers:
        weight = np.ones(len(values)) if share is None else share[: len(values)]
        if weight.sum() == 0.0:  # the bootstrap sample has none of these passages
            weight = np.ones(len(values))
        return np.asarray(np.tensordot(weight / weight.sum(), values, axes=1))

    found = {}
    for name in next(iter(readings.values())):
        by_size = [one[name] for one in readings.values()]
        curve = [mean(by_size[0])]
        for before, values in itertools.pairwise(by_size):
            both = min(len(before), len(values))
            curve.append(curve[-1] + mean(values[:both] - before[:both]) if nested else mean(values))
        found[name] = np.clip(np.stack(curve), 0.0, 1.0 if name in ("top", "sink", "local") else np.inf)
    found["entropy"] = np.minimum(found["entropy"], np.log(np.maximum(found["count"], 1.0)))
    return found | {"effective": np.exp(found["entropy"])}


def finite_or_none(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return float(value) if math.isfinite(value) else None


def slope(x: Numbers, y: Numbers) -> Numbers:
    """Return the least-squares slope of `y` against `x`, both `[sizes, …]`; NaN where x does not change.

    >>> slope(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.5, 2.0]))
    array(0.5)
    """
    apart = x - x.mean(0)
    square = (apart**2).sum(0)
    return np.asarray((apart * y).sum(0) / np.where(square > 1e-12, square, np.nan))


def interval(draws: list[Numbers], like: Numbers) -> tuple[Numbers, Numbers]:
    """Return the 2.5% and 97.5% quantiles of bootstrap draws; NaN without draws."""
    if not draws:
        return np.full_like(like, np.nan), np.full_like(like, np.nan)
    # Draws may be infinite, so do not interpolate between them.
    low, high = np.quantile(np.stack(draws), [0.025, 0.975], axis=0, method="inverted_cdf")
    return low, high


def crossing(x: Numbers, y: Numbers, level: float) -> Numbers:
    """Return the x from which y `[sizes, …]` stays below a level, interpolated linearly between sizes.

    −inf where y is below the level at every size, inf where it is not at the last size, NaN where y is NaN.

    >>> crossing(np.array([0.0, 1.0, 2.0]), np.array([1.0, 0.75, 0.25]), 0.5)
    array(1.5)
    """
    wide = np.broadcast_to(x.reshape(x.shape + (1,) * (y.ndim - x.ndim)), y.shape)
    found = np.full(y.shape[1:], -np.inf)
    for left in range(len(y) - 1):
        falls = (y[left] >= level) & (y[left + 1] < level)
        drop = np.where(falls, y[left] - y[left + 1], 1.0)
        at = wide[left] + (y[left] - level) / drop * (wide[left + 1] - wide[left])
        found = np.where(falls, at, found)
    found = np.where(y[-1] >= level, np.inf, found)
    return np.where(np.isnan(y).any(0), np.nan, found)
