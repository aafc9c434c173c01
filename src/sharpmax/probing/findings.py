"""What one task shows of every head: curves, slope, kind, horizon, forecast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sharpmax.models.language import context_of
from sharpmax.probing.capture import LOCAL
from sharpmax.probing.forecast import Forecast, predict
from sharpmax.probing.inputs import Passage, ProbeInputs
from sharpmax.probing.measurement import Fits, Numbers, Readings, curves_of, fit, known_mean, measure_replicated
from sharpmax.probing.replication import replication_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNIFORM_SHARE = 0.5
"""A head whose effective number of keys is half of all keys or more singles out none of them."""

SINK_SHARE = 0.5
"""Weight on the first key: with half of it there, all other keys together have no more."""

LOCAL_SHARE = 0.5
"""Weight on the last 16 keys, likewise."""

DISPERSES = 0.25
"""Slope of entropy against ln n: a quarter of that of a uniform head. Over inputs that grow eightfold, as from the
sizes that forecasts know to those they are tested at, the effective number of keys then grows by 1.7 and more."""

HALF = 0.5
"""The top weight under which a head has lost its focus: no key holds half of the weight."""

KINDS = ("sharp", "dispersing", "uniform", "sink", "local")
UNKNOWN = "unknown"
LOSES_FOCUS = ("dispersing", "uniform")
"""The kinds whose rows spread as inputs grow."""

RULE: Mapping[str, str] = MappingProxyType(
    {
        "uniform": f"at the largest size the weight is spread over {UNIFORM_SHARE:.0%} or more of all keys, in effect",
        "sink": f"otherwise, at the largest size the first key has {SINK_SHARE:.0%} or more of the weight",
        "local": f"otherwise, at the largest size the last {LOCAL} keys have {LOCAL_SHARE:.0%} or more of the weight "
        f"(causal models, rows of more than {2 * LOCAL} keys)",
        "dispersing": f"otherwise, entropy rises with ln n by a slope of {DISPERSES} or more",
        "sharp": "otherwise: the head attends to about as many keys at every size",
    }
)
"""How a head gets its kind, in this order."""

_REPLICATED = 6
"""Passages that are read with replicated keys, for each size that is forecast."""


def kinds_of(slope: Numbers, last: Mapping[str, Numbers], causal: bool) -> NDArray[Any]:
    """The kind of every head from its slope and its statistics at the largest size, all `[layers, heads]`.

    `UNKNOWN` where a head has no numbers. In rows that see keys on both sides the last keys are not the nearest:
    "local" is a kind of `causal` models alone, and "sink" then is about whatever comes first, such as a class token.
    """
    asked = {
        "uniform": np.exp(last["entropy"]) >= UNIFORM_SHARE * last["count"],
        "sink": last["sink"] >= SINK_SHARE,
        "local": (last["local"] >= LOCAL_SHARE) & (last["count"] > 2 * LOCAL) & causal,
        "dispersing": slope >= DISPERSES,
    }
    found = np.select(list(asked.values()), list(asked), default="sharp")
    return np.where(np.isnan(last["entropy"]) | np.isnan(slope), UNKNOWN, found)


@dataclass(frozen=True, eq=False)
class Findings(Fits):
    """The fits of one task, with the kinds `[layers, heads]` of the heads and a forecast."""

    task: str
    unit: str
    sizes: tuple[int, ...]
    prompts: Mapping[int, int]  # by size
    fit_up_to: int
    kinds: NDArray[Any]
    forecast: Forecast | None

    @property
    def layer_slopes(self) -> Numbers:
        """The mean slope of every layer, `[layers]`."""
        return known_mean(self.slope, 1)[:, 0]

    @property
    def order(self) -> list[int]:
        """The layers that have a slope, the steepest first."""
        slopes = self.layer_slopes
        return sorted((int(layer) for layer in np.flatnonzero(np.isfinite(slopes))), key=lambda layer: -slopes[layer])

    def counted(self, *kinds: str) -> int:
        """How many heads are of these kinds."""
        return int(np.isin(self.kinds, kinds).sum())

    @property
    def known(self) -> int:
        """How many heads have numbers."""
        return int(np.isfinite(self.slope).sum())

    def measured(self, size: int) -> dict[str, Numbers]:
        """Entropy and top weight at one size."""
        place = self.sizes.index(size)
        return {name: self.curves[name][place] for name in ("entropy", "top")}


def findings_of(
    inputs: ProbeInputs, readings: Readings, causal: bool, forecast: Forecast | None, seed: int
) -> Findings:
    """Everything that follows from the readings of one task."""
    fits = fit(readings, inputs.nested, HALF, seed)
    return Findings(
        **vars(fits),
        task=inputs.task,
        unit=inputs.unit,
        sizes=inputs.sizes,
        prompts={size: len(one["count"]) for size, one in readings.items()},
        fit_up_to=inputs.fit_up_to,
        kinds=kinds_of(fits.slope, {name: values[-1] for name, values in fits.curves.items()}, causal),
        forecast=forecast,
    )


def forecast_work(inputs: ProbeInputs) -> int:
    """The work of the passages that `forecast_of` reads with replicated keys."""
    return sum(one.work for base, _ in _pairs(inputs) for one in inputs.passages[base][:_REPLICATED])


def forecast_of(
    model: PreTrainedModel, inputs: ProbeInputs, readings: Readings, done: Callable[[Passage, int], None] | None
) -> Forecast | None:
    """Forecast the larger sizes from the smaller ones; None where there are none.

    `done` is called with each passage that has been read with replicated keys; None leaves that method out.
    """
    pairs, changes = _pairs(inputs), {}
    if not pairs:
        return None
    for base, target in pairs if done is not None else ():
        more = (target - base) / inputs.per_item
        passages = inputs.passages[base][:_REPLICATED]
        replications = [(one, replication_of(one, more, context_of(model))) for one in passages]
        ready = [(one, replication) for one, replication in replications if replication is not None]
        if ready and len(ready) == len(passages):
            changes[base, target] = {
                name: (values - readings[base][name][: len(ready)]).mean(0)
                for name, values in measure_replicated(model, ready).items()
            }
        for one in passages:
            if done is not None:
                done(one, target)
    return predict(curves_of(readings, inputs.nested), inputs.sizes, inputs.fit_up_to, changes)


def _pairs(inputs: ProbeInputs) -> list[tuple[int, int]]:
    """Which sizes stand for which: the largest known one for every larger, and the one before it for that one."""
    known = [size for size in inputs.sizes if size <= inputs.fit_up_to]
    later = [size for size in inputs.sizes if size > inputs.fit_up_to]
    if len(known) < 2 or not later:
        return []
    return [(known[-2], known[-1]), *((known[-1], size) for size in later)]
