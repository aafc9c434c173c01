"""The measured horizon: on prompts of growing size, the number of keys from which on no key holds the mass.

It is where the top weight of a head, in the last row and averaged over prompts, falls under the mass for good, with a
bootstrap interval over prompts. It is an estimate and says nothing about other inputs: for that there is the certified
horizon (`sharpmax.probing.certified`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sharpmax.errors import reject
from sharpmax.models.language import context_of
from sharpmax.probing.inputs import Passage, task_inputs
from sharpmax.probing.measurement import Readings, fit, measure
from sharpmax.tasks.registry import get_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    total, read = sum(one.work for ones in short.values() for one in ones), 0

    def done(passage: Passage, size: int) -> None:
        nonlocal read
        read += passage.work
        if progress is not None:
            progress(read, total)

    return horizons_of(measure(model, replace(inputs, passages=short), "last", done), mass, _TASK, seed)


def horizons_of(readings: Readings, mass: float, task: str, seed: int = 0) -> MeasuredHorizons:
    """The horizons that follow from readings, with bootstrap intervals."""
    fits = fit(readings, nested=False, mass=mass, seed=seed)
    spread, fall = fits.curves["spread"][-1], fits.horizon
    widest = np.max([one["spread"].max(0) for one in readings.values()], axis=0)
    counts = [one["count"] for one in readings.values()]
    heads = [
        MeasuredHead(
            at[0],
            at[1],
            spread=float(spread[at]),
            widest=float(widest[at]),
            slope=_finite(fits.slope[at]),
            slope_low=_finite(fits.slope_low[at]),
            slope_high=_finite(fits.slope_high[at]),
            kind="at" if math.isfinite(fall[at]) else "before" if fall[at] < 0 else "beyond",
            tokens=_finite(fall[at]),
            low=_finite(fits.horizon_low[at]),
            high=_finite(fits.horizon_high[at]),
        )
        for at in np.ndindex(*fall.shape)
        if np.isfinite(spread[at])  # layers may have fewer heads than others
    ]
    prompts = sum(len(one) for one in counts)
    ends = int(np.nanmin(counts[0])), int(np.nanmax(counts[-1]))
    return MeasuredHorizons(mass, task, tuple(readings), prompts, *ends, tuple(heads))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
