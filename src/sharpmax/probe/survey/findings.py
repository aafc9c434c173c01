"""What one task shows of a model's heads: curves, slopes, kinds, horizons and the forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharpmax.probe.statistics import STATISTICS
from sharpmax.probe.survey.fits import crossing, curve, interval, known_mean, repeats, slope
from sharpmax.probe.survey.forecast import Forecast
from sharpmax.probe.survey.kinds import kinds_of
from sharpmax.probe.survey.material import Material
from sharpmax.probe.survey.measuring import Numbers, Readings

__all__ = ["HALF", "Findings", "curves_of", "findings_of"]

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
