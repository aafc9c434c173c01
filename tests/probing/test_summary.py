"""Kinds of heads, tables and the three sentences, from readings whose numbers are known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sharpmax.probing.findings import (
    DISPERSES,
    KINDS,
    LOCAL_SHARE,
    LOSES_FOCUS,
    RULE,
    SINK_SHARE,
    UNKNOWN,
    chain_table,
    kinds_of,
    layers_table,
    verdict,
)
from sharpmax.probing.measurement import Numbers
from tests.probing.readings import KEYS, findings, readings

RISES = np.array([[0.0, 0.0, 0.05], [0.9, 0.6, 0.3], [0.1, 0.0, 0.5]])


def rising(n: float) -> Numbers:
    return 1.0 + RISES * math.log(n / KEYS[8])


def falling(n: float) -> Numbers:
    """Heads that rise lose their top weight; it is a half at 300 keys in the first of them."""
    return np.clip(0.5 - 0.2 * RISES * math.log(n / 300), 0.0, 1.0)


def test_the_numbers_are_those_of_the_heads() -> None:
    found = findings(readings(rising, falling))
    first, second, third = verdict("some-model", [found])
    assert first.startswith("4 (44%) of some-model's 9 attention heads lose focus as inputs grow from 8 to 512 items")
    assert "(64 to 4,096 tokens)" in first
    low, high = (math.exp(1.0 + 0.55 * math.log(n / KEYS[8])) for n in (KEYS[8], KEYS[512]))
    assert f"spreads its weight over {low:.1f} tokens at first and {high:,.0f} at last" in first
    assert second.startswith("Layers 1, 2 and 0 of 3 disperse most; 9 heads have half of their weight on one token")
    assert "6 of them no longer in the largest (median: from 300 tokens on)." in second
    assert third == (
        "Measured up to 64 items, the forecast of entropy at 512 is off by 0.00 nats (median head) and 0.00 "
        "(90th percentile)."
    )


def test_other_tasks_are_in_the_first_sentence() -> None:
    one = findings(readings(rising))
    other = findings(readings(lambda n: np.array([[0.1, 0.1]])), task="text")
    assert "; on text (8 to 512 items (64 to 4,096 tokens)) it is 0 (0%)." in verdict("m", [one, other])[0]


def test_a_model_that_keeps_its_focus() -> None:
    found = findings(readings(lambda n: np.full((2, 2), 1.0 - 0.05 * math.log(n / 64)), lambda n: np.full((2, 2), 0.8)))
    first, second, _ = verdict("m", [found])
    assert first.startswith("0 (0%) of m's 4 attention heads lose focus")
    assert "spreads" not in first
    assert second.startswith("No layer loses focus on average; 4 heads have half")
    assert second.endswith("and all of them still do in the largest.")


def test_a_bad_forecast_has_a_large_error() -> None:
    def bent(n: float) -> Numbers:
        return np.full((2, 2), 1.0 if n <= KEYS[64] else 4.0)

    assert "at 512 is off by 3.00 nats" in verdict("m", [findings(readings(bent))])[2]


def test_layers_are_ranked_by_slope() -> None:
    table = layers_table(findings(readings(rising)))
    assert {layer: about["rank"] for layer, about in table.items()} == {"0": 3, "1": 1, "2": 2}
    assert abs(table["1"]["slope"] - 0.6) < 1e-9
    assert table["1"]["kinds"] == {"dispersing": 3}


def test_the_chain_is_the_correlation_with_the_next_layer() -> None:
    rises = np.array([0.1, 0.4, 0.2, 0.7, 0.3, 0.5])[:, None]
    table = chain_table(findings(readings(lambda n: 1.0 + rises * math.log(n / 64))))
    expected = np.corrcoef(rises[:-1, 0], rises[1:, 0])[0, 1]
    assert abs(table["next"] - expected) < 1e-9
    assert table["pairs"] == 5
    assert table["low"] < table["next"] < table["high"]
    assert chain_table(findings(readings(rising)))["next"] is None  # two pairs are no correlation


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
