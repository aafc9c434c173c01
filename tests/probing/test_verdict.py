"""Three sentences, and whether their numbers are those of the heads."""

from __future__ import annotations

import math
import re

import numpy as np

from sharpmax.probing.measurement import Numbers
from sharpmax.probing.summary import chain_table, layers_table, verdict
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
    assert f"shared by {low:.1f} tokens at first and {high:,.0f} in the end" in first
    assert second.startswith("Layers 1, 2 and 0 of 3 go first; 9 heads have half of their weight on one token")
    assert "6 of them have lost that in the largest, half of these by 300 tokens" in second
    assert third.startswith("Inputs of up to 64 items foretell what happens at 512:")
    assert "off by 0.00 nats in the middle head and by up to 0.00 in nine of ten" in third


def test_other_tasks_are_in_the_first_sentence() -> None:
    one = findings(readings(rising))
    other = findings(readings(lambda n: np.array([[0.1, 0.1]])), task="text")
    assert "; on text (8 to 512 items (64 to 4,096 tokens)) it is 0 (0%)." in verdict("m", [one, other])[0]


def test_a_model_that_keeps_its_focus_is_told_so() -> None:
    found = findings(readings(lambda n: np.full((2, 2), 1.0 - 0.05 * math.log(n / 64)), lambda n: np.full((2, 2), 0.8)))
    first, second, _ = verdict("m", [found])
    assert first.startswith("0 (0%) of m's 4 attention heads lose focus")
    assert "shared by" not in first
    assert second.startswith("No layer loses focus on average; 4 heads have half")
    assert second.endswith("and none of them has lost that in the largest.")


def test_a_bad_forecast_is_called_bad() -> None:
    def bent(n: float) -> Numbers:
        return np.full((2, 2), 1.0 if n <= KEYS[64] else 4.0)

    assert "do not foretell what happens at 512" in verdict("m", [findings(readings(bent))])[2]


def test_sentences_are_sentences() -> None:
    for sentence in verdict("m", [findings(readings(rising, falling))]):
        assert re.fullmatch(r"[A-Z0-9][^\n]*\.", sentence)
        assert "nan" not in sentence.lower()


def test_layers_are_ranked_by_who_disperses_first() -> None:
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
