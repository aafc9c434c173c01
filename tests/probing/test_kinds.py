"""The rule that gives a head its kind, on heads whose kind is plain."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sharpmax.probing.findings import DISPERSES, KINDS, LOCAL_SHARE, LOSES_FOCUS, RULE, SINK_SHARE, UNKNOWN, kinds_of


def kind(slope: float = 0.0, causal: bool = True, **last: float) -> str:
    given: dict[str, float] = {"entropy": 1.0, "sink": 0.1, "local": 0.1, "count": 1000.0} | last
    return str(kinds_of(np.array([[slope]]), {name: np.array([[v]]) for name, v in given.items()}, causal)[0, 0])


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("sharp", {}),
        ("sharp", {"slope": -0.5}),
        ("dispersing", {"slope": 0.6, "entropy": 4.0}),
        ("uniform", {"slope": 0.99, "entropy": math.log(900.0)}),
        ("uniform", {"slope": 0.99, "entropy": math.log(500.1), "local": 0.6}),
        ("sink", {"sink": 0.8, "slope": 0.6}),
        ("local", {"local": 0.9, "slope": 0.6}),
        ("dispersing", {"local": 0.9, "slope": 0.6, "causal": False}),
        ("dispersing", {"local": 0.9, "slope": 0.6, "count": 20.0, "entropy": 1.5}),
    ],
)
def test_plain_heads(expected: str, given: dict[str, Any]) -> None:
    assert kind(**given) == expected


def test_limits_belong_to_the_kind() -> None:
    assert kind(slope=DISPERSES) == "dispersing"
    assert kind(slope=DISPERSES - 1e-9) == "sharp"
    assert kind(sink=SINK_SHARE) == "sink"
    assert kind(local=LOCAL_SHARE) == "local"


def test_a_head_without_numbers_is_called_so() -> None:
    """NaN compares as False: without a word for it such a head would be called sharp."""
    assert kind(slope=math.nan) == UNKNOWN
    assert kind(entropy=math.nan) == UNKNOWN


def test_every_kind_has_its_rule() -> None:
    assert set(RULE) == set(KINDS)
    assert set(LOSES_FOCUS) < set(KINDS)
