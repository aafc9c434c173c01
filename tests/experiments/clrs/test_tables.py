"""Scores against counts made by hand, and intervals against actual resampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharpmax.experiments.clrs.evaluation import Answer, evaluation_tables
from sharpmax.tasks.clrs_text.generation import Example

Q = Example
QUESTIONS = [
    Q("q", "a b | c\n\n", "first", 4), Q("q", "a c | c\n\n", "first", 4), Q("q", "b b | a\n\n", "first", 4),
    Q("q", "b b | b\n\n", "first", 8), Q("q", "b a | b", "first", 8),
    Q("q", "x | y", "last", 4), Q("q", "x | z", "last", 4),
]  # fmt: skip
BASE = ["a b | c", "a b | c", "b b | b", "b b | a", "no", "x | y", "x | y"]
SHARP = ["a b | c", "a c | c ", "b b | a", "z | b", "no", "x | y", ""]


def answers(texts: list[str]) -> list[Answer]:
    return [Answer(text, 3, 0.5, 0.25) for text in texts]


def tables_of(**said: list[list[Answer]]) -> dict[str, Any]:
    return evaluation_tables(QUESTIONS, said, {"scored": True}, {"first": [4], "last": [4]}, 0)


def test_seeds_are_pooled_and_also_reported_one_by_one() -> None:
    found = tables_of(base=[answers(BASE), answers(SHARP)], sharp=[answers(SHARP), answers(SHARP)])
    alone = tables_of(base=[answers(BASE)], sharp=[answers(SHARP)])
    each = [alone["means"][name]["in"]["mean"] for name in ("base", "sharp")]
    assert found["seeds"]["base"]["in"] == pytest.approx(each)
    assert found["means"]["base"]["in"]["mean"] == pytest.approx(sum(each) / 2)
    # A seed is compared with the same seed of the base.
    assert found["gains"]["sharp"]["in"]["mean"] == pytest.approx(alone["gains"]["sharp"]["in"]["mean"] / 2)
    assert (found["gains"]["sharp"]["in"]["gained"], found["gains"]["sharp"]["in"]["lost"]) == (1, 0)
    assert found["entropy"]["base"] == {"4": 0.25, "8": 0.25}
    assert "seeds" not in alone


def means(cells: dict[str, dict[str, Any]]) -> list[float]:
    return [cell["mean"] for by_size in cells.values() for cell in by_size.values()]


def test_accuracy_of_final_answers_and_of_the_most_frequent_one() -> None:
    tables = tables_of(base=[answers(BASE)], sharp=[answers(SHARP)])
    # Algorithm "first" at sizes 4 and 8, "last" at 4.
    assert means(tables["accuracy"]["base"]) == pytest.approx([200 / 3, 0.0, 50.0])
    assert means(tables["accuracy"]["sharp"]) == pytest.approx([100.0, 50.0, 50.0])
    assert means(tables["majority"]) == pytest.approx([200 / 3, 100.0, 50.0])
    assert tables["accuracy"]["sharp"]["first"]["8"]["n"] == 2
    assert tables["speed"]["base"] == {"tokens": 21, "seconds": 3.5, "tokens_per_second": 6.0}


def test_means_and_gains_over_algorithms_and_by_algorithm() -> None:
    tables = tables_of(base=[answers(BASE)], sharp=[answers(SHARP)])
    inside, outside = tables["means"]["base"]["in"], tables["means"]["base"]["out"]
    assert (inside["mean"], inside["algorithms"]) == (pytest.approx(100 * (2 / 3 + 1 / 2) / 2), 2)
    assert (outside["mean"], outside["algorithms"]) == (0.0, 1)
    assert means(tables["by_algorithm"]["base"]) == pytest.approx([200 / 3, 0.0, 50.0])
    assert list(tables["gains"]) == list(tables["gains_by_algorithm"]) == ["sharp"]
    gains = tables["gains_by_algorithm"]["sharp"]
    assert means(gains) == pytest.approx([100 / 3, 50.0, 0.0])
    assert tables["gains"]["sharp"]["in"]["mean"] == pytest.approx(100 * (1 / 3) / 2)
    for gain in (tables["gains"]["sharp"]["in"], gains["first"]["out"]):
        assert (gain["gained"], gain["lost"]) == (1, 0)


def test_intervals_are_those_of_resampled_answers() -> None:
    rng = np.random.default_rng(3)
    base = {"a": {4: rng.integers(0, 2, 60).tolist(), 8: [1] * 30}, "b": {4: rng.integers(0, 2, 40).tolist()}}
    other = {"a": {4: rng.integers(0, 2, 60).tolist(), 8: [1, 0] * 15}, "b": {4: rng.integers(0, 2, 40).tolist()}}
    chosen = {"a": [4, 8], "b": [4]}
    drawn_means, gains = [], []
    for _ in range(3000):
        here: list[tuple[float, float]] = []
        for name, sizes in chosen.items():
            cells = []
            for size in sizes:
                pick = rng.integers(0, len(base[name][size]), len(base[name][size]))
                cells.append((np.array(base[name][size])[pick].mean(), np.array(other[name][size])[pick].mean()))
            here.append(tuple(np.mean(cells, axis=0)))
        first, second = np.mean(here, axis=0)
        drawn_means.append(100 * first)
        gains.append(100 * (second - first))
    asked = [(name, size, place) for name, sizes in base.items() for size in sizes for place in range(len(sizes[size]))]
    said = {
        who: [[Answer(str(right[name][size][place]), 1, 0.1) for name, size, place in asked]]
        for who, right in (("base", base), ("other", other))
    }
    tables = evaluation_tables([Q("q", "1", name, size) for name, size, _ in asked], said, {}, chosen, 0)
    for found, drawn in ((tables["means"]["base"]["in"], drawn_means), (tables["gains"]["other"]["in"], gains)):
        low, high = np.quantile(drawn, [0.025, 0.975])
        assert found["low"] == pytest.approx(low, abs=1.0)
        assert found["high"] == pytest.approx(high, abs=1.0)
        assert found["low"] < found["mean"] < found["high"]
