"""What one task shows of every head (curves, slope, kind, horizon, forecast), as tables and as sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharpmax.probing.capture import LOCAL
from sharpmax.probing.forecast import Forecast, error
from sharpmax.probing.inputs import ProbeInputs
from sharpmax.probing.measurement import Fits, Numbers, Readings, finite_or_none, fit, known_mean
from sharpmax.theory.bounds import whole

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

_SHOWN = ("count", "entropy", "top", "sink", "spread", "local", "effective")


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
class Findings:
    """The fits of one task, with the kinds `[layers, heads]` of the heads and a forecast."""

    task: str
    unit: str
    sizes: tuple[int, ...]
    prompts: Mapping[int, int]  # by size
    fit_up_to: int
    fits: Fits
    kinds: NDArray[Any]
    forecast: Forecast | None

    @classmethod
    def of(
        cls, inputs: ProbeInputs, readings: Readings, causal: bool, forecast: Forecast | None, seed: int
    ) -> Findings:
        """Everything that follows from the readings of one task."""
        fits = fit(readings, inputs.nested, HALF, seed)
        prompts = {size: len(one["count"]) for size, one in readings.items()}
        kinds = kinds_of(fits.slope[0], {name: values[-1] for name, values in fits.curves.items()}, causal)
        return cls(inputs.task, inputs.unit, inputs.sizes, prompts, inputs.fit_up_to, fits, kinds, forecast)

    @property
    def layer_slopes(self) -> Numbers:
        """The mean slope of every layer, `[layers]`."""
        return known_mean(self.fits.slope[0], 1)[:, 0]

    @property
    def order(self) -> list[int]:
        """The layers that have a slope, the steepest first."""
        slopes = self.layer_slopes
        return sorted(np.flatnonzero(np.isfinite(slopes)).tolist(), key=lambda layer: -slopes[layer])

    @property
    def known(self) -> int:
        """How many heads have numbers."""
        return int(np.isfinite(self.fits.slope[0]).sum())

    def error(self, size: int, forecast: Mapping[str, Numbers]) -> dict[str, Any]:
        """The error of a forecast at one size."""
        place = self.sizes.index(size)
        return error(forecast, {name: self.fits.curves[name][place] for name in ("entropy", "top")})


def tables_of(found: Findings) -> dict[str, Any]:
    """The tables of a task by their names in saved results; no forecast where there is nothing to forecast."""
    tables = {"heads": heads_table(found), "layers": layers_table(found), "forecast": forecast_table(found)}
    return {kind: table for kind, table in tables.items() if table is not None} | {"chain": chain_table(found)}


def heads_table(found: Findings) -> dict[str, Any]:
    """Every head by its name, layer.head."""
    table = {}
    curves, predicted = found.fits.curves, {} if found.forecast is None else found.forecast.values
    for layer, head in np.argwhere(curves["count"][-1] > 0).tolist():

        def at(values: Numbers, place: tuple[int, int] = (layer, head)) -> float | None:
            return finite_or_none(values[place])

        table[f"{layer}.{head}"] = {
            "kind": str(found.kinds[layer, head]),
            **dict(zip(("slope", "slope_low", "slope_high"), map(at, found.fits.slope), strict=True)),
            "curve": {
                str(size): {name: at(curves[name][place]) for name in _SHOWN} for place, size in enumerate(found.sizes)
            },
            "forecast": {
                str(size): {name: at(values[name]) for name in ("entropy", "top")} for size, values in predicted.items()
            },
            "horizon": dict(zip(("tokens", "low", "high"), map(at, found.fits.horizon), strict=True)),
        }
    return table


def layers_table(found: Findings) -> dict[str, Any]:
    """Every layer by its number; rank 1 disperses most."""
    order, slopes = found.order, found.layer_slopes
    return {
        str(layer): {
            "slope": finite_or_none(slopes[layer]),
            "rank": order.index(layer) + 1 if layer in order else None,
            "kinds": {kind: many for kind in KINDS if (many := Counter(found.kinds[layer].tolist())[kind])},
            **{name: finite_or_none(known_mean(found.fits.curves[name][-1][layer]).item()) for name in ("sink", "top")},
        }
        for layer in range(len(slopes))
    }


def forecast_table(found: Findings) -> dict[str, Any] | None:
    """The errors of the forecast at the sizes it did not know, and those of every method."""
    forecast = found.forecast
    if forecast is None:
        return None

    def errors(values: Mapping[int, Mapping[str, Numbers]]) -> dict[str, Any]:
        return {str(size): found.error(size, one) for size, one in values.items()}

    methods = {
        name: {"decided_by": finite_or_none(forecast.decided.get(name, math.nan)), "tested": errors(values)}
        for name, values in forecast.others.items()
    }
    tested = errors(forecast.values)
    return {"method": forecast.method, "fitted": list(forecast.fitted), "tested": tested, "methods": methods}


def chain_table(found: Findings) -> dict[str, Any]:
    """The correlation of a layer's mean slope with the next layer's, with a 95% interval."""
    here, following = found.layer_slopes[:-1], found.layer_slopes[1:]
    both = np.isfinite(here) & np.isfinite(following)
    pairs = int(both.sum())
    if pairs < 3 or min(here[both].std(), following[both].std()) == 0.0:
        return {"next": None, "low": None, "high": None, "pairs": pairs}
    related = float(np.corrcoef(here[both], following[both])[0, 1])
    low = high = None
    if pairs > 3 and abs(related) < 1.0:
        reach = 1.96 / math.sqrt(pairs - 3)  # Fisher's transformation
        low, high = (math.tanh(math.atanh(related) + way * reach) for way in (-1.0, 1.0))
    return {"next": related, "low": low, "high": high, "pairs": pairs}


def verdict(model: str, found: Sequence[Findings]) -> list[str]:
    """Three sentences about the first task; the first also names the others."""
    return [_how_many(model, found), _where(found[0]), _forecast(found[0])]


def _how_many(model: str, found: Sequence[Findings]) -> str:
    first = found[0]
    losing = np.isin(first.kinds, LOSES_FOCUS)
    text = f"{_share(first)} of {model}'s {first.known:,} attention heads lose focus as inputs grow"
    text += f" from {_sizes(first)}"
    if losing.any():
        low, high = (float(np.median(first.fits.curves["effective"][end][losing])) for end in (0, -1))
        text += f": the median of them spreads its weight over {_many(low)} tokens at first and {_many(high)} at last"
    others = "".join(f"; on {one.task} ({_sizes(one)}) it is {_share(one)}" for one in found[1:])
    return f"{text}{others}."


def _where(found: Findings) -> str:
    rising = [str(layer) for layer in found.order if found.layer_slopes[layer] > 0.0][:3]
    text = "No layer loses focus on average"
    if rising:
        named = " and ".join([", ".join(rising[:-1]), rising[-1]]) if len(rising) > 1 else rising[0]
        plural = len(rising) > 1
        text = f"Layer{'s' * plural} {named} of {len(found.layer_slopes)} disperse{'' if plural else 's'} most"
    focused, still = (found.fits.curves["top"][end] >= HALF for end in (0, -1))
    if not focused.any():
        return f"{text}; no head has half of its weight on one token even in the smallest inputs."
    lost, horizon = focused & ~still, found.fits.horizon[0]
    ends = horizon[lost & np.isfinite(horizon)]
    text += f"; {int(focused.sum()):,} heads have half of their weight on one token in the smallest inputs"
    if not ends.size:
        return f"{text}, and all of them still do in the largest."
    median = whole(np.median(ends))
    return f"{text}, {int(lost.sum()):,} of them no longer in the largest (median: from {median:,} tokens on)."


def _forecast(found: Findings) -> str:
    forecast = found.forecast
    if forecast is None or not forecast.values:
        return "There is no forecast: it needs two sizes to fit and a larger one to test."
    size = max(forecast.values)
    off = found.error(size, forecast.values[size])["entropy"]
    if off["median"] is None:
        return "There is no forecast: the model gives no numbers."
    return (
        f"Measured up to {found.fit_up_to:,} {found.unit}, the forecast of entropy at {size:,} is off by "
        f"{off['median']:.2f} nats (median head) and {off['p90']:.2f} (90th percentile)."
    )


def _share(found: Findings) -> str:
    many = int(np.isin(found.kinds, LOSES_FOCUS).sum())
    return f"{many:,} ({many / max(1, found.known):.0%})"


def _sizes(found: Findings) -> str:
    keys = np.nanmax(found.fits.curves["count"], axis=(1, 2))
    sizes = f"{found.sizes[0]:,} to {found.sizes[-1]:,} {found.unit}"
    return sizes if found.unit == "tokens" else f"{sizes} ({_many(keys[0])} to {_many(keys[-1])} tokens)"


def _many(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"
