"""Scores against counts made by hand, and intervals against answers that are really drawn again."""

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


@pytest.fixture
def tables() -> dict[str, Any]:
    return tables_of(base=[answers(BASE)], sharp=[answers(SHARP)])


def test_seeds_are_taken_together_and_kept_apart() -> None:
    found = tables_of(base=[answers(BASE), answers(SHARP)], sharp=[answers(SHARP), answers(SHARP)])
    alone = tables_of(base=[answers(BASE)], sharp=[answers(SHARP)])
    each = [alone["means"][name]["in"]["mean"] for name in ("base", "sharp")]
    assert found["seeds"]["base"]["in"] == pytest.approx(each)
    assert found["means"]["base"]["in"]["mean"] == pytest.approx(sum(each) / 2)
    # Each seed is compared with the same seed of the base.
    assert found["gains"]["sharp"]["in"]["mean"] == pytest.approx(alone["gains"]["sharp"]["in"]["mean"] / 2)
    assert (found["gains"]["sharp"]["in"]["gained"], found["gains"]["sharp"]["in"]["lost"]) == (1, 0)
    assert found["entropy"]["base"] == {"4": 0.25, "8": 0.25}
    assert "seeds" not in alone


def test_final_answers(tables: dict[str, Any]) -> None:
    final = tables["accuracy"]
    assert final["base"]["first"]["4"]["mean"] == pytest.approx(100 * 2 / 3)
    assert final["sharp"]["first"]["8"] == {**final["sharp"]["first"]["8"], "mean": 50.0, "n": 2}
    assert final["sharp"]["last"]["4"]["mean"] == 50.0


def test_the_most_frequent_answer(tables: dict[str, Any]) -> None:
    assert tables["majority"]["first"]["4"]["mean"] == pytest.approx(100 * 2 / 3)
    assert tables["majority"]["first"]["8"]["mean"] == 100.0
    assert tables["majority"]["last"]["4"]["mean"] == 50.0


def test_means_by_algorithm_and_pairs(tables: dict[str, Any]) -> None:
    means = tables["means"]
    assert means["base"]["in"]["mean"] == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)
    assert means["base"]["out"]["mean"] == 0.0
    assert means["base"]["in"]["algorithms"] == 2
    assert means["base"]["out"]["algorithms"] == 1
    gain = tables["gains"]["sharp"]["in"]
    assert gain["mean"] == pytest.approx(100 * (1 / 3) / 2)
    assert (gain["gained"], gain["lost"]) == (1, 0)
    assert tables["speed"]["base"] == {"tokens": 21, "seconds": 3.5, "tokens_per_second": 6.0}
    assert list(tables["gains"]) == ["sharp"]


def test_intervals_are_those_of_answers_drawn_again() -> None:
    rng = np.random.default_rng(3)
    base = {"a": {4: rng.integers(0, 2, 60).tolist(), 8: [1] * 30}, "b": {4: rng.integers(0, 2, 40).tolist()}}
    arm = {"a": {4: rng.integers(0, 2, 60).tolist(), 8: [1, 0] * 15}, "b": {4: rng.integers(0, 2, 40).tolist()}}
    chosen = {"a": [4, 8], "b": [4]}
    means, gains = [], []
    for _ in range(3000):
        here: list[tuple[float, float]] = []
        for name, sizes in chosen.items():
            cells = []
            for size in sizes:
                pick = rng.integers(0, len(base[name][size]), len(base[name][size]))
                cells.append((np.array(base[name][size])[pick].mean(), np.array(arm[name][size])[pick].mean()))
            here.append(tuple(np.mean(cells, axis=0)))
        first, second = np.mean(here, axis=0)
        means.append(100 * first)
        gains.append(100 * (second - first))
    asked = [(name, size, place) for name, sizes in base.items() for size in sizes for place in range(len(sizes[size]))]
    said = {
        who: [[Answer(str(right[name][size][place]), 1, 0.1) for name, size, place in asked]]
        for who, right in (("base", base), ("arm", arm))
    }
    tables = evaluation_tables([Q("q", "1", name, size) for name, size, _ in asked], said, {}, chosen, 0)
    for found, drawn in ((tables["means"]["base"]["in"], means), (tables["gains"]["arm"]["in"], gains)):
        low, high = np.quantile(drawn, [0.025, 0.975])
        assert found["low"] == pytest.approx(low, abs=1.0)
        assert found["high"] == pytest.approx(high, abs=1.0)
        assert found["low"] < found["mean"] < found["high"]


def test_every_algorithm_by_itself(tables: dict[str, Any]) -> None:
    one = tables["by_algorithm"]["base"]
    assert one["first"]["in"]["mean"] == pytest.approx(100 * 2 / 3)
    assert one["first"]["out"]["mean"] == 0.0
    assert list(one["last"]) == ["in"]
    gains = tables["gains_by_algorithm"]
    assert list(gains) == ["sharp"]
    assert gains["sharp"]["first"]["in"]["mean"] == pytest.approx(100 / 3)
    assert (gains["sharp"]["first"]["out"]["gained"], gains["sharp"]["first"]["out"]["lost"]) == (1, 0)
    # The mean over algorithms is the mean of these.
    for group in ("in", "out"):
        each = [cells[group]["mean"] for cells in one.values() if group in cells]
        assert tables["means"]["base"][group]["mean"] == pytest.approx(sum(each) / len(each))
