"""Read inputs of growing size and fit curves to the row statistics of every head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sharpmax.integrations.transformers.interface import observed
from sharpmax.probing.capture import STATISTICS, capture
from sharpmax.probing.inputs import Material, Passage
from sharpmax.probing.replication import Crowding, crowded_row, crowding
from sharpmax.stats.call import AttentionCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Numbers = NDArray[np.float64]
Readings = Mapping[int, Mapping[str, Numbers]]
"""By size, each statistic of every passage and head, `[passages, layers, heads]`, NaN where there is none."""

Progress = Callable[[str, int, int, str], None]
"""Told what is being done, how much of how much is done, and a remark."""


def work(length: int) -> int:
    """How much there is to do for a passage, in tokens of a short one: attention makes long ones cost more."""
    return length + length * length // 8192


def measure(model: PreTrainedModel, material: Material, rows: str, done: Callable[[Passage, int], None]) -> Readings:
    """Statistics of every head at every size, the longest passages last; of several rows of a passage, the mean.

    `done` is told of each passage that has been read, and its size. The model must not be in training.
    """
    found: dict[int, dict[str, Numbers]] = {}
    for size, passages in material.passages.items():
        parts: dict[str, list[Numbers]] = {name: [] for name in STATISTICS}
        for passage in passages:
            for name, value in _read(model, passage, rows).items():
                parts[name].append(value)
            done(passage, size)
        found[size] = {name: np.concatenate(values) for name, values in parts.items()}
    return found


def read_crowded(model: PreTrainedModel, passages: Sequence[tuple[Passage, Crowding]]) -> dict[str, Numbers]:
    """Entropy and top weight of the last row of passages that stand for longer ones, `[passages, layers, heads]`."""
    found: dict[str, list[Numbers]] = {"entropy": [], "top": []}
    for passage, chosen in passages:
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def see(call: AttentionCall, into: dict[int, Any] = seen) -> None:
            into[call.layer] = crowded_row(call)

        ids = passage.inputs["input_ids"]
        # The mask says that all is one text: without it a gap would be taken for the start of another.
        more = {"position_ids": chosen.positions[None], "attention_mask": torch.ones_like(ids)}
        with observed(model, see), crowding(model, chosen):
            _call(model, {**passage.inputs, **more})
        for place, name in enumerate(found):
            found[name].append(_grid([seen[layer][place] for layer in sorted(seen)]))
    return {name: np.concatenate(values) for name, values in found.items()}


def _read(model: PreTrainedModel, passage: Passage, rows: str) -> dict[str, Numbers]:
    with capture(model, rows) as seen:
        _call(model, passage.inputs)
    last = {call.layer: call.statistics for call in seen.calls}
    found = {}
    for name in STATISTICS:
        layers = []
        for layer in sorted(last):
            value, live = last[layer][name].cpu().double(), last[layer]["count"].cpu() > 0
            # A row that sees nothing, as padding does, says nothing.
            layers.append(value.masked_fill(~live, torch.nan).nanmean(-1))
        found[name] = _grid(layers)
    return found


def _grid(layers: Sequence[torch.Tensor]) -> Numbers:
    """`[B, heads]` of each layer as `[B, layers, heads]`, filled up where layers have fewer heads."""
    heads = max(layer.shape[1] for layer in layers)
    grid = np.full((layers[0].shape[0], len(layers), heads), np.nan)
    for place, layer in enumerate(layers):
        grid[:, place, : layer.shape[1]] = layer.cpu().double().numpy()
    return grid


def _call(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    known = inspect.signature(model.forward).parameters
    options = {name: value for name, value in {"use_cache": False, "logits_to_keep": 1}.items() if name in known}
    placed = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    with torch.no_grad():
        model(**{**options, **placed})


REPEATS = 200
"""How often passages are drawn again for an interval."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "entropy": (0.0, np.inf), "top": (0.0, 1.0), "sink": (0.0, 1.0), "local": (0.0, 1.0), "spread": (0.0, np.inf),
}  # fmt: skip


def curve(readings: Readings, name: str, nested: bool, share: Numbers | None = None) -> Numbers:
    """A statistic of every head at every size, `[sizes, layers, heads]`, from a `share` of each passage (None: equal).

    Fewer passages are read of larger sizes. Where passages are nested, a size adds to the one before what it changes
    in the passages that both have; a mean of its own would mostly tell which passages these are.
    """
    found: list[Numbers] = []
    before: Numbers | None = None
    for size in readings:
        values = readings[size][name]
        if before is None or not nested:
            found.append(_mean(values, share))
        else:
            both = min(len(before), len(values))
            found.append(found[-1] + _mean(values[:both] - before[:both], share))
        before = values
    low, high = _RANGES.get(name, (-np.inf, np.inf))
    return np.clip(np.stack(found), low, high)


def _mean(values: Numbers, share: Numbers | None) -> Numbers:
    weight = np.ones(len(values)) if share is None else share[: len(values)]
    if weight.sum() == 0.0:  # none of these passages was drawn, and the others are not there
        weight = np.ones(len(values))
    mean: Numbers = np.tensordot(weight / weight.sum(), values, axes=1)
    return mean


def known_mean(values: Numbers, axis: int | None = None) -> Numbers:
    """The mean of those numbers that are known, its axes kept; NaN where none is."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis, keepdims=True)
    with np.errstate(invalid="ignore"):
        found: Numbers = total / known.sum(axis, keepdims=True)
    return found


def repeats(readings: Readings, seed: int) -> Iterator[Numbers]:
    """How often each passage is drawn when as many are drawn again, `REPEATS` times; none of a single passage."""
    passages = max(len(one["count"]) for one in readings.values())
    if passages < 2:
        return
    rng = np.random.default_rng(seed)
    for _ in range(REPEATS):
        yield np.bincount(rng.integers(passages, size=passages), minlength=passages).astype(float)


def slope(x: Numbers, y: Numbers) -> Numbers:
    """The slope of the straight line through `y` against `x`, both `[sizes, …]`; NaN where x does not change.

    >>> slope(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.5, 2.0]))
    array(0.5)
    """
    apart = x - x.mean(0)
    square = (apart**2).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Numbers = np.asarray((apart * y).sum(0) / np.where(square > 1e-12, square, np.nan))
    return found


def interval(draws: list[Numbers], like: Numbers) -> tuple[Numbers, Numbers]:
    """Where 95% of what was drawn lies; NaN without any draw."""
    if not draws:
        return np.full_like(like, np.nan), np.full_like(like, np.nan)
    # Infinite draws are beyond what was measured: between two of them there is no number to be found.
    low, high = np.quantile(np.stack(draws), [0.025, 0.975], axis=0, method="inverted_cdf")
    return low, high


def crossing(x: Numbers, y: Numbers, level: float) -> Numbers:
    """From which x on y `[sizes, …]` stays under a level, between sizes on a straight line.

    −inf where it is under the level at every size, inf where it is not under it at the last, NaN where y is.

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
