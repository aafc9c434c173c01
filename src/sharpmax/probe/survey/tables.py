"""Findings as plain tables: texts, numbers and None where a number is not known."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from sharpmax.probe.survey.findings import Findings
from sharpmax.probe.survey.fits import known_mean
from sharpmax.probe.survey.forecast import error
from sharpmax.probe.survey.kinds import KINDS

__all__ = ["chain_table", "forecast_table", "heads_table", "layers_table"]

_SHOWN = ("count", "entropy", "top", "sink", "spread", "local", "effective")


def heads_table(found: Findings) -> dict[str, Any]:
    """Every head by its name, layer.head."""
    table = {}
    for layer, head in zip(*np.nonzero(found.curves["count"][-1] > 0), strict=True):
        at = int(layer), int(head)
        foretold = {} if found.forecast is None else found.forecast.values
        table[f"{layer}.{head}"] = {
            "kind": str(found.kinds[at]),
            "slope": _number(found.slope[at]),
            "slope_low": _number(found.slope_low[at]),
            "slope_high": _number(found.slope_high[at]),
            "curve": {
                str(size): {name: _number(found.curves[name][place][at]) for name in _SHOWN}
                for place, size in enumerate(found.sizes)
            },
            "forecast": {
                str(size): {name: _number(values[name][at]) for name in ("entropy", "top")}
                for size, values in foretold.items()
            },
            "horizon": {
                "tokens": _number(found.horizon[at]),
                "low": _number(found.horizon_low[at]),
                "high": _number(found.horizon_high[at]),
            },
        }
    return table


def layers_table(found: Findings) -> dict[str, Any]:
    """Every layer by its number; rank 1 disperses first."""
    order, slopes = found.order, found.layer_slopes
    return {
        str(layer): {
            "slope": _number(slopes[layer]),
            "rank": order.index(layer) + 1 if layer in order else None,
            "kinds": {kind: many for kind in KINDS if (many := Counter(found.kinds[layer].tolist())[kind])},
            "sink": _number(known_mean(found.curves["sink"][-1][layer]).item()),
            "top": _number(known_mean(found.curves["top"][-1][layer]).item()),
        }
        for layer in range(len(slopes))
    }


def forecast_table(found: Findings) -> dict[str, Any] | None:
    """The errors of the forecast at the sizes it did not know, and those of the methods that were not chosen."""
    forecast = found.forecast
    if forecast is None:
        return None
    measured = {
        size: {name: found.curves[name][place] for name in ("entropy", "top")} for place, size in enumerate(found.sizes)
    }
    return {
        "method": forecast.method,
        "fitted": list(forecast.fitted),
        "tested": {str(size): error(values, measured[size]) for size, values in forecast.values.items()},
        "methods": {
            name: {
                "decided_by": _number(forecast.decided.get(name, math.nan)),
                "tested": {str(size): error(values, measured[size]) for size, values in one.items()},
            }
            for name, one in forecast.others.items()
        },
    }


def chain_table(found: Findings) -> dict[str, Any]:
    """How a layer's mean slope goes with the next layer's: their correlation, with a 95% interval."""
    slopes = found.layer_slopes
    here, following = slopes[:-1], slopes[1:]
    both = np.isfinite(here) & np.isfinite(following)
    pairs = int(both.sum())
    known = pairs > 2 and min(here[both].std(), following[both].std()) > 0.0
    if not known:
        return {"next": None, "low": None, "high": None, "pairs": pairs}
    related = float(np.corrcoef(here[both], following[both])[0, 1])
    low = high = None
    if pairs > 3 and abs(related) < 1.0:
        reach = 1.96 / math.sqrt(pairs - 3)  # Fisher's transformation
        low, high = (math.tanh(math.atanh(related) + way * reach) for way in (-1.0, 1.0))
    return {"next": related, "low": low, "high": high, "pairs": pairs}


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
