"""The measured horizon: on prompts of growing size, the number of keys from which on no key holds the mass.

It is where the top weight of a head, in the last row and averaged over prompts, falls under the mass for good; prompts
drawn again say how sure that is. Nothing here is certain, and none of it speaks of other inputs: for that there is the
certified horizon (`sharpmax.probing.certified`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sharpmax.errors import reject
from sharpmax.models.language import context_of
from sharpmax.probing.inputs import Material, Passage, task_material
from sharpmax.probing.measurement import Numbers, Readings, crossing, curve, interval, measure, repeats, slope, work
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
    """What prompts showed of one head."""

    layer: int
    head: int
    spread: float
    """The mean spread of its logits in the longest prompts, in nats."""

    widest: float
    """The largest spread in any prompt."""

    slope: float | None
    """How its entropy grows with ln n: 1 is pure dispersion, 0 none; None where n did not grow."""

    slope_low: float | None
    slope_high: float | None
    kind: str
    """One of `KINDS`."""

    tokens: float | None
    """The measured horizon, where it lies at a number of keys."""

    low: float | None
    high: float | None
    """Of prompts drawn again 95% say a horizon between these; None for an end that lies before, or beyond."""


@dataclass(frozen=True)
class MeasuredHorizons:
    """What prompts showed of every head."""

    mass: float
    task: str
    sizes: tuple[int, ...]
    prompts: int
    shortest: int
    longest: int
    """Keys of the shortest and of the longest row."""

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
    """The measured horizon of every head, on prompts of the task kv of up to `LONGEST` tokens."""
    whole = task_material(get_task(_TASK), tokenizer, context_of(model), None, None, seed)
    short = {size: ones for size, ones in whole.passages.items() if ones[0].length <= LONGEST}
    if len(short) < 2:
        given = f"{_TASK} prompts of {[ones[0].length for ones in whole.passages.values()]} tokens"
        reject("model", given, f"room for prompts of two sizes, up to {LONGEST}", "certify it alone (--certified-only)")
    material = Material(whole.task, whole.unit, short)
    total, read = sum(work(one.length) for ones in short.values() for one in ones), [0]

    def done(passage: Passage, size: int) -> None:
        read[0] += work(passage.length)
        if progress is not None:
            progress(read[0], total)

    return horizons_of(measure(model, material, "last", done), mass, _TASK, seed)


def horizons_of(readings: Readings, mass: float, task: str, seed: int = 0) -> MeasuredHorizons:
    """The horizons that rows of growing size say, with what they would have been had prompts been drawn again."""
    rise, fall = _rise(readings), _fall(readings, mass)
    again = [(_rise(readings, share), _fall(readings, mass, share)) for share in repeats(readings, seed)]
    slope_low, slope_high = interval([one[0] for one in again], rise)
    low, high = interval([one[1] for one in again], fall)
    spread = curve(readings, "spread", nested=False)[-1]
    widest = np.max([one["spread"].max(0) for one in readings.values()], axis=0)
    counts = [one["count"] for one in readings.values()]
    heads = [
        MeasuredHead(
            layer,
            head,
            spread=float(spread[layer, head]),
            widest=float(widest[layer, head]),
            slope=_finite(rise[layer, head]),
            slope_low=_finite(slope_low[layer, head]),
            slope_high=_finite(slope_high[layer, head]),
            kind="at" if math.isfinite(fall[layer, head]) else "before" if fall[layer, head] < 0 else "beyond",
            tokens=_finite(fall[layer, head]),
            low=_finite(low[layer, head]),
            high=_finite(high[layer, head]),
        )
        for layer, head in np.ndindex(*fall.shape)
        if np.isfinite(spread[layer, head])  # layers may have fewer heads than others
    ]
    return MeasuredHorizons(
        mass,
        task,
        tuple(readings),
        sum(len(one) for one in counts),
        int(np.nanmin(counts[0])),
        int(np.nanmax(counts[-1])),
        tuple(heads),
    )


def _rise(readings: Readings, share: Numbers | None = None) -> Numbers:
    counts = np.log(curve(readings, "count", nested=False, share=share))
    return slope(counts, curve(readings, "entropy", nested=False, share=share))


def _fall(readings: Readings, mass: float, share: Numbers | None = None) -> Numbers:
    counts = np.log(curve(readings, "count", nested=False, share=share))
    found = crossing(counts, curve(readings, "top", nested=False, share=share), mass)
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(found), np.exp(found), found)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
