"""Read inputs of growing size, fit curves to the row statistics of every head, and find measured horizons.

The measured horizon is the number of keys from which on no key holds the mass: where the top weight of a head, in the
last row and averaged over prompts, falls under it for good. It is an estimate and says nothing about other inputs; for
that there is the certified horizon (`sharpmax.probing.certified`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sharpmax.errors import reject
from sharpmax.models.language import context_of
from sharpmax.probing.capture import STATISTICS, capture
from sharpmax.probing.inputs import Passage, ProbeInputs, task_inputs
from sharpmax.tasks.registry import get_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Numbers = NDArray[np.float64]
Readings = Mapping[int, Mapping[str, Numbers]]
"""By size, each statistic of every passage and head, `[passages, layers, heads]`, NaN where there is none."""

Progress = Callable[[str, int, int, str], None]
"""Called with what is being done, the work done, the work in all, and a remark."""

REPEATS = 200
"""Bootstrap samples of passages for an interval."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "entropy": (0.0, np.inf), "top": (0.0, 1.0), "sink": (0.0, 1.0), "local": (0.0, 1.0), "spread": (0.0, np.inf),
}  # fmt: skip


def measure(model: PreTrainedModel, inputs: ProbeInputs, rows: str, done: Callable[[Passage, int], None]) -> Readings:
    """Statistics of every head at every size, the longest passages last; the mean over the chosen rows of a passage.

    `done` is called with each passage that has been read, and its size. The model must be in evaluation mode.
    """
    found: dict[int, dict[str, Numbers]] = {}
    for size, passages in inputs.passages.items():
        parts: dict[str, list[Numbers]] = {name: [] for name in STATISTICS}
        for passage in passages:
            with capture(model, rows) as captured:
                call_model(model, passage.inputs)
            last = {call.layer: call.statistics for call in captured.calls}
            for name in STATISTICS:
                # A row without visible keys, such as padding, does not count. Not every device has float64.
                layers = [
                    one[name].masked_fill(one["count"] == 0, torch.nan).cpu().double().nanmean(-1)
                    for _, one in sorted(last.items())
                ]
                parts[name].append(grid(layers))
            done(passage, size)
        found[size] = {name: np.concatenate(values) for name, values in parts.items()}
    return found


def grid(layers: Sequence[torch.Tensor]) -> Numbers:
    """`[B, heads]` of each layer as `[B, layers, heads]`, NaN where a layer has fewer heads."""
    heads = max(layer.shape[1] for layer in layers)
    grid = np.full((layers[0].shape[0], len(layers), heads), np.nan)
    for place, layer in enumerate(layers):
        grid[:, place, : layer.shape[1]] = layer.cpu().double().numpy()
    return grid


def call_model(model: PreTrainedModel, inputs: Mapping[str, Any]) -> None:
    """Let a model read inputs on its device, without a cache and with the logits of one row."""
    known = inspect.signature(model.forward).parameters
    options = {name: value for name, value in {"use_cache": False, "logits_to_keep": 1}.items() if name in known}
    moved = {name: v.to(model.device) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
    with torch.no_grad():
        model(**{**options, **moved})


@dataclass(frozen=True, eq=False)
class Fits:
    """Slopes and horizons `[3, layers, heads]` with the ends of a 95% bootstrap interval; NaN where unknown."""

    curves: Mapping[str, Numbers]  # `[sizes, layers, heads]`, of every statistic and of `effective`, e^entropy
    slope: Numbers  # of entropy against ln n
    horizon: Numbers
    """The number of keys from which on the top weight stays under the mass; inf: beyond the largest size, −inf: at
    every size."""


def fit(readings: Readings, nested: bool, mass: float, seed: int) -> Fits:
    """Curves, slopes and horizons of readings, with intervals from bootstrap samples of the passages."""

    def both(curves: Mapping[str, Numbers]) -> Numbers:
        lengths = np.log(np.maximum(curves["count"], 1.0))
        crossed = crossing(lengths, curves["top"], mass)
        horizon = np.where(np.isfinite(crossed), np.exp(crossed), crossed)
        return np.stack([slope(lengths, curves["entropy"]), horizon])

    curves = curves_of(readings, nested)
    found = both(curves)
    draws = [both(curves_of(readings, nested, share)) for share in repeats(readings, seed)]
    return Fits(curves, *np.stack([found, *interval(draws, found)], axis=1))


def curves_of(readings: Readings, nested: bool, share: Numbers | None = None) -> dict[str, Numbers]:
    """The curve of every statistic, and of the effective number of keys."""
    found = {name: curve(readings, name, nested, share) for name in next(iter(readings.values()))}
    found["entropy"] = np.minimum(found["entropy"], np.log(np.maximum(found["count"], 1.0)))
    return found | {"effective": np.exp(found["entropy"])}


def curve(readings: Readings, name: str, nested: bool, share: Numbers | None = None) -> Numbers:
    """A statistic of every head at every size, `[sizes, layers, heads]`; `share` weights the passages (None: equally).

    Larger sizes have fewer passages. Where passages are nested, a size adds to the one before what it changes in the
    passages that both have: a mean of its own would mostly reflect which passages these are.
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
    return np.clip(np.stack(found), *_RANGES.get(name, (-np.inf, np.inf)))


def _mean(values: Numbers, share: Numbers | None) -> Numbers:
    weight = np.ones(len(values)) if share is None else share[: len(values)]
    if weight.sum() == 0.0:  # the sample holds none of these passages
        weight = np.ones(len(values))
    mean: Numbers = np.tensordot(weight / weight.sum(), values, axes=1)
    return mean


def known_mean(values: Numbers, axis: int | None = None) -> Numbers:
    """The mean of the finite values, axes kept; NaN where there is none."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(axis, keepdims=True)
    with np.errstate(invalid="ignore"):
        found: Numbers = total / known.sum(axis, keepdims=True)
    return found


def finite_or_none(value: float) -> float | None:
    """A number as JSON can hold it: None where it is not finite."""
    return float(value) if math.isfinite(value) else None


def repeats(readings: Readings, seed: int) -> Iterator[Numbers]:
    """`REPEATS` bootstrap samples: how often each passage is drawn. None of a single passage."""
    passages = max(len(one["count"]) for one in readings.values())
    if passages < 2:
        return
    rng = np.random.default_rng(seed)
    for _ in range(REPEATS):
        yield np.bincount(rng.integers(passages, size=passages), minlength=passages).astype(float)


def slope(x: Numbers, y: Numbers) -> Numbers:
    """The least-squares slope of `y` against `x`, both `[sizes, …]`; NaN where x does not change.

    >>> slope(np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.5, 2.0]))
    array(0.5)
    """
    apart = x - x.mean(0)
    square = (apart**2).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Numbers = np.asarray((apart * y).sum(0) / np.where(square > 1e-12, square, np.nan))
    return found


def interval(draws: list[Numbers], like: Numbers) -> tuple[Numbers, Numbers]:
    """The 2.5% and 97.5% quantiles of bootstrap draws; NaN without any draw."""
    if not draws:
        return np.full_like(like, np.nan), np.full_like(like, np.nan)
    # Infinite draws lie beyond what was measured: between two of them there is nothing to interpolate.
    low, high = np.quantile(np.stack(draws), [0.025, 0.975], axis=0, method="inverted_cdf")
    return low, high


def crossing(x: Numbers, y: Numbers, level: float) -> Numbers:
    """From which x on y `[sizes, …]` stays under a level, linear between sizes.

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


KINDS = ("before", "at", "beyond")
"""Where a horizon lies: before the shortest prompt, at a number of keys, or beyond the longest."""

LONGEST = 1024
"""Longer prompts, in tokens, are left out: on a CPU they take minutes (`sharpmax probe` reads them)."""

_TASK = "kv"


@dataclass(frozen=True)
class MeasuredHead:
    """What prompts show of one head; `low` and `high` end a 95% interval, None for an end before or beyond."""

    layer: int
    head: int
    spread: float  # the mean spread of the logits in the longest prompts, in nats
    widest: float  # the largest spread in any prompt
    slope: float | None  # of entropy against ln n: 1 is pure dispersion, 0 none; None where n did not grow
    slope_low: float | None
    slope_high: float | None
    kind: str  # one of `KINDS`
    tokens: float | None  # the measured horizon, where `kind` is "at"
    low: float | None
    high: float | None


@dataclass(frozen=True)
class MeasuredHorizons:
    """What prompts show of every head."""

    mass: float
    task: str
    sizes: tuple[int, ...]
    prompts: int
    shortest: int  # keys of the shortest and of the longest row
    longest: int
    heads: tuple[MeasuredHead, ...]

    def of_layer(self, number: int) -> tuple[MeasuredHead, ...]:
        """The heads of one layer."""
        return tuple(one for one in self.heads if one.layer == number)


def measure_horizons(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mass: float = 0.5,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> MeasuredHorizons:
    """Measure the horizon of every head on prompts of the task kv of up to `LONGEST` tokens."""
    inputs = task_inputs(get_task(_TASK), tokenizer, context_of(model), None, None, seed)
    short = {size: ones for size, ones in inputs.passages.items() if ones[0].length <= LONGEST}
    if len(short) < 2:
        given = f"{_TASK} prompts of {[ones[0].length for ones in inputs.passages.values()]} tokens"
        reject("model", given, f"room for prompts of two sizes, up to {LONGEST}", "certify it alone (--certified-only)")
    done = [0, sum(one.work for ones in short.values() for one in ones)]

    def after(passage: Passage, size: int) -> None:
        done[0] += passage.work
        if progress is not None:
            progress(*done)

    return horizons_of(measure(model, replace(inputs, passages=short), "last", after), mass, _TASK, seed)


def horizons_of(readings: Readings, mass: float, task: str, seed: int = 0) -> MeasuredHorizons:
    """The horizons that follow from readings, with bootstrap intervals."""
    fits = fit(readings, nested=False, mass=mass, seed=seed)
    spread = fits.curves["spread"][-1]
    widest = np.max([one["spread"].max(0) for one in readings.values()], axis=0)
    heads = []
    for layer, head in np.argwhere(np.isfinite(spread)).tolist():  # layers may have fewer heads than others
        at = layer, head
        rise, rise_low, rise_high = (finite_or_none(one[at]) for one in fits.slope)
        tokens, low, high = (finite_or_none(one[at]) for one in fits.horizon)
        kind = "at" if tokens is not None else "before" if fits.horizon[0][at] < 0 else "beyond"
        spreads = float(spread[at]), float(widest[at])
        heads.append(MeasuredHead(layer, head, *spreads, rise, rise_low, rise_high, kind, tokens, low, high))
    counts = [one["count"] for one in readings.values()]
    ends = int(np.nanmin(counts[0])), int(np.nanmax(counts[-1]))
    return MeasuredHorizons(mass, task, tuple(readings), sum(map(len, counts)), *ends, tuple(heads))
