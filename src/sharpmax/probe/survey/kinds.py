"""What kind of head a head is, by a rule that anybody can check against its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharpmax.probe.statistics import LOCAL
from sharpmax.probe.survey.measuring import Numbers

__all__ = [
    "DISPERSES",
    "KINDS",
    "LOCAL_SHARE",
    "LOSES_FOCUS",
    "RULE",
    "SINK_SHARE",
    "UNIFORM_SHARE",
    "UNKNOWN",
    "kinds_of",
]

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
