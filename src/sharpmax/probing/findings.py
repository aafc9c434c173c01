"""What one task shows of every head: curves, slope, kind, horizon, forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sharpmax.models.language import context_of
from sharpmax.probing.capture import LOCAL, STATISTICS
from sharpmax.probing.forecast import Forecast, foretell
from sharpmax.probing.inputs import Material, Passage
from sharpmax.probing.measurement import (
    Numbers,
    Readings,
    crossing,
    curve,
    interval,
    known_mean,
    read_crowded,
    repeats,
    slope,
)
from sharpmax.probing.replication import crowding_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNIFORM_SHARE = 0.5
"""A head whose effective number of keys is half of all keys or more says nothing about any of them."""

SINK_SHARE = 0.5
"""Weight on the first key: with half of it there, no other key and not even all others together have more."""

LOCAL_SHARE = 0.5
"""Weight on the last 16 keys, likewise."""

DISPERSES = 0.25
"""Slope of entropy against ln n: a quarter of that of a uniform head. Over inputs that grow eightfold, as from the
sizes that forecasts know to those they are tested at, the effective number of keys then grows by 1.7 and more."""

KINDS = ("sharp", "dispersing", "uniform", "sink", "local")

UNKNOWN = "unknown"

LOSES_FOCUS = ("dispersing", "uniform")
"""The kinds whose rows spread as inputs grow."""

RULE: Mapping[str, str] = MappingProxyType(
    {
        "uniform": f"at the largest size the weight is spread over {UNIFORM_SHARE:.0%} or more of all keys, in effect",
        "sink": f"otherwise, at the largest size the first key has {SINK_SHARE:.0%} or more of the weight",
        "local": f"otherwise, at the largest size the last {LOCAL} keys have {LOCAL_SHARE:.0%} or more of the weight "
        f"(models that only look back, rows of more than {2 * LOCAL} keys)",
        "dispersing": f"otherwise, entropy rises with ln n by a slope of {DISPERSES} or more",
        "sharp": "otherwise: the head keeps looking at about as many keys",
    }
)
"""The rule, in the order in which it is asked."""


def kinds_of(slope: Numbers, last: Mapping[str, Numbers], causal: bool) -> NDArray[Any]:
    """The kind of every head from its slope and its statistics at the largest size, all `[layers, heads]`.

    `UNKNOWN` where a head has no numbers. Of rows that see keys on both sides the last ones are not the nearest:
    "local" is for `causal` models alone, and "sink" then is about whatever comes first, such as a class token.
    """
    asked = {
        "uniform": np.exp(last["entropy"]) >= UNIFORM_SHARE * last["count"],
        "sink": last["sink"] >= SINK_SHARE,
        "local": (last["local"] >= LOCAL_SHARE) & (last["count"] > 2 * LOCAL) & causal,
        "dispersing": slope >= DISPERSES,
    }
    found = np.select(list(asked.values()), list(asked), default="sharp")
    return np.where(np.isnan(last["entropy"]) | np.isnan(slope), UNKNOWN, found)


HALF = 0.5
"""The top weight at which a head has lost its focus: no key holds half of the weight."""


@dataclass(frozen=True, eq=False)
class Findings:
    """Arrays are `[layers, heads]`, NaN where something is not known; curves have sizes in front."""

    task: str
    unit: str
    sizes: tuple[int, ...]
    prompts: Mapping[int, int]
    fit_up_to: int
    curves: Mapping[str, Numbers]
    slope: Numbers
    slope_low: Numbers
    slope_high: Numbers
    kinds: NDArray[Any]
    horizon: Numbers
    """Number of keys from which on the top weight stays under a half; inf beyond the largest size, −inf at all."""

    horizon_low: Numbers
    horizon_high: Numbers
    forecast: Forecast | None

    @property
    def layer_slopes(self) -> Numbers:
        """The mean slope of every layer, `[layers]`."""
        return known_mean(self.slope, 1)[:, 0]

    @property
    def order(self) -> list[int]:
        """The layers that have a slope, the one that disperses first in front."""
        slopes = self.layer_slopes
        return sorted((int(layer) for layer in np.flatnonzero(np.isfinite(slopes))), key=lambda layer: -slopes[layer])

    def counted(self, kind: str) -> int:
        """How many heads are of a kind."""
        return int((self.kinds == kind).sum())

    @property
    def known(self) -> int:
        """How many heads there are numbers of."""
        return int(np.isfinite(self.slope).sum())


def curves_of(readings: Readings, nested: bool, share: Numbers | None = None) -> dict[str, Numbers]:
    """Every statistic, and the effective number of keys e^H."""
    found = {name: curve(readings, name, nested, share) for name in STATISTICS}
    found["entropy"] = np.minimum(found["entropy"], np.log(np.maximum(found["count"], 1.0)))
    return found | {"effective": np.exp(found["entropy"])}


def findings_of(material: Material, readings: Readings, causal: bool, forecast: Forecast | None, seed: int) -> Findings:
    """Everything that follows from what was read."""
    curves = curves_of(readings, material.nested)
    rise, fall = _rise(curves), _fall(curves)
    slopes, falls = [], []
    for share in repeats(readings, seed):
        again = curves_of(readings, material.nested, share)
        slopes.append(_rise(again))
        falls.append(_fall(again))
    slope_low, slope_high = interval(slopes, rise)
    horizon_low, horizon_high = interval(falls, fall)
    return Findings(
        task=material.task,
        unit=material.unit,
        sizes=material.sizes,
        prompts={size: len(one["count"]) for size, one in readings.items()},
        fit_up_to=material.fit_up_to,
        curves=curves,
        slope=rise,
        slope_low=slope_low,
        slope_high=slope_high,
        kinds=kinds_of(rise, {name: values[-1] for name, values in curves.items()}, causal),
        horizon=fall,
        horizon_low=horizon_low,
        horizon_high=horizon_high,
        forecast=forecast,
    )


def _rise(curves: Mapping[str, Numbers]) -> Numbers:
    return slope(np.log(np.maximum(curves["count"], 1.0)), curves["entropy"])


def _fall(curves: Mapping[str, Numbers]) -> Numbers:
    with np.errstate(over="ignore"):
        found: Numbers = np.exp(crossing(np.log(np.maximum(curves["count"], 1.0)), curves["top"], HALF))
    # e^−inf is 0: under a half at every size.
    return np.where(found == 0.0, -np.inf, found)


_CROWDED = 6
"""Passages that are read as if they were longer, for each size that is forecast."""


def read_for_forecast(material: Material) -> Iterator[Passage]:
    """The passages that `forecast_of` reads again, each as often as it does."""
    for base, _ in _pairs(material):
        yield from material.passages[base][:_CROWDED]


def forecast_of(
    model: PreTrainedModel, material: Material, readings: Readings, done: Callable[[Passage, int], None] | None
) -> Forecast | None:
    """Forecast the larger sizes from the smaller ones; None where there are none.

    `done` is told of each short passage that has been read as if it were of a larger size; None leaves that out.
    """
    pairs = _pairs(material)
    if not pairs:
        return None
    room, changes = context_of(model), {}
    tell = done or (lambda passage, size: None)
    for base, target in pairs if done is not None else ():
        more = (target - base) / material.per_item
        chosen = [(one, crowding_of(one, more, room)) for one in material.passages[base][:_CROWDED]]
        ready = [(one, crowding) for one, crowding in chosen if crowding is not None]
        if ready and len(ready) == len(chosen):
            crowded = read_crowded(model, ready)
            changes[base, target] = {
                name: (values - readings[base][name][: len(ready)]).mean(0) for name, values in crowded.items()
            }
        for one, _ in chosen:
            tell(one, target)
    return foretell(curves_of(readings, material.nested), material.sizes, material.fit_up_to, changes)


def _pairs(material: Material) -> list[tuple[int, int]]:
    """Which sizes stand for which: the largest known one for every larger, and the one before it for that one."""
    known = [size for size in material.sizes if size <= material.fit_up_to]
    later = [size for size in material.sizes if size > material.fit_up_to]
    if len(known) < 2 or not later:
        return []
    return [(known[-2], known[-1]), *((known[-1], size) for size in later)]
