"""From answers to the tables of `sharpmax clrs evaluate`."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sharpmax.experiments.clrs.data import Question
from sharpmax.experiments.clrs.evaluation import Arm, Exam, Store
from sharpmax.experiments.statistics import CONFIDENCE, accuracy, paired
from sharpmax.results import FILE_NAME, load

_ELSEWHERE = ("policy", "sizes")
"""Settings that the examination says itself."""


def trainings(words: Sequence[str], arms: Sequence[Arm]) -> dict[str, Any]:
    """Command, provenance, settings, loss curve and speed of every arm, named by `words`, that has results."""
    found = {}
    for word, arm in zip(words, arms, strict=True):
        file = Path(word) / FILE_NAME
        if arm.run is None or not file.is_file():
            continue
        saved = load(file)
        found[arm.name] = {
            "command": saved.command,
            "provenance": saved.provenance,
            "setting": {name: value for name, value in saved.tables["setting"].items() if name not in _ELSEWHERE},
            "curve": saved.tables["curve"],
            "speed": saved.tables["speed"],
        }
    return found


IN, OUT = "in", "out"
"""Sizes that the arms were trained on, and all others."""

Cells = dict[str, dict[int, list[int]]]
"""For each algorithm and size, its questions, or whether the answer to each is right."""

_DRAWS = 4000


def exam_tables(exam: Exam, store: Store, trained: Mapping[str, Sequence[int]], seed: int) -> dict[str, Any]:
    """Everything a reader may ask for: `trained` holds the sizes of each algorithm that the arms learned from."""
    final: Any = importlib.import_module("sharpmax.tasks.clrs_text").final_answer
    places = _places(exam.questions)
    wanted = [one.answer.strip() for one in exam.questions]
    ends = [final(one) for one in wanted]
    last: dict[str, Cells] = {}
    whole: dict[str, Cells] = {}
    for arm in exam.arms:
        said = [store[arm.name, item].text.strip() for item in range(len(wanted))]
        last[arm.name] = _cells(places, [int(final(a) == b) for a, b in zip(said, ends, strict=True)])
        whole[arm.name] = _cells(places, [int(a == b) for a, b in zip(said, wanted, strict=True)])
    base = exam.arms[0].name
    others = [arm.name for arm in exam.arms[1:]]
    groups = {IN: _group(places, trained, inside=True), OUT: _group(places, trained, inside=False)}
    shown = {name: cells for name, cells in groups.items() if cells}
    return {
        "setting": {
            **exam.identity(),
            "base": base,
            "remarks": {arm.name: store.remarks(arm.name) for arm in exam.arms},
            "sizes": {
                name: {"trained": list(trained.get(name, ())), "examined": list(cells)}
                for name, cells in places.items()
            },
        },
        "accuracy": {arm: _each(cells, accuracy) for arm, cells in last.items()},
        "exact": {arm: _each(cells, accuracy) for arm, cells in whole.items()},
        "majority": _each(places, lambda items: accuracy(_majority([ends[item] for item in items]))),
        "paired": {
            arm: {
                name: {str(size): paired(last[base][name][size], right) for size, right in cells.items()}
                for name, cells in last[arm].items()
            }
            for arm in others
        },
        "means": {arm: {name: _mean(last[arm], cells, seed) for name, cells in shown.items()} for arm in last},
        "means_exact": {arm: {name: _mean(whole[arm], cells, seed) for name, cells in shown.items()} for arm in whole},
        "gains": {
            arm: {name: _gain(last[base], last[arm], cells, seed) for name, cells in shown.items()} for arm in others
        },
        "by_algorithm": {arm: _apart(shown, partial(_mean, last[arm], seed=seed)) for arm in last},
        "gains_by_algorithm": {arm: _apart(shown, partial(_gain, last[base], last[arm], seed=seed)) for arm in others},
        "speed": {arm.name: _speed(store, arm.name, len(wanted)) for arm in exam.arms},
    }


def _places(questions: Sequence[Question]) -> Cells:
    """The numbers of the questions of each algorithm and size."""
    found: dict[str, dict[int, list[int]]] = {}
    for item, one in enumerate(questions):
        found.setdefault(one.algo_name, {}).setdefault(one.length, []).append(item)
    return {name: dict(sorted(cells.items())) for name, cells in found.items()}


def _cells(places: Cells, right: Sequence[int]) -> Cells:
    return {name: {s: [right[i] for i in items] for s, items in cells.items()} for name, cells in places.items()}


def _each(cells: Cells, value: Any) -> dict[str, Any]:
    return {name: {str(size): value(right) for size, right in sizes.items()} for name, sizes in cells.items()}


def _majority(answers: Sequence[str]) -> list[int]:
    """Which questions one would get right with their most frequent answer."""
    most, _ = Counter(answers).most_common(1)[0]
    return [int(answer == most) for answer in answers]


def _group(
    places: Mapping[str, Mapping[int, Any]], trained: Mapping[str, Sequence[int]], *, inside: bool
) -> dict[str, list[int]]:
    """The sizes of each algorithm that were trained on, or those that were not; algorithms without any are left out."""
    found = {name: [s for s in cells if (s in trained.get(name, ())) == inside] for name, cells in places.items()}
    return {name: sizes for name, sizes in found.items() if sizes}


def _apart(groups: Mapping[str, Mapping[str, Sequence[int]]], value: Any) -> dict[str, Any]:
    """A value of the sizes trained on and of the others, for each algorithm by itself."""
    found: dict[str, dict[str, Any]] = {}
    for group, cells in groups.items():
        for name, sizes in cells.items():
            found.setdefault(name, {})[group] = value({name: sizes})
    return found


def _mean(cells: Cells, chosen: Mapping[str, Sequence[int]], seed: int) -> dict[str, Any]:
    """Every algorithm counts the same, and every size of it; the interval comes from drawing answers again."""
    rng = np.random.default_rng(seed)
    drawn, means = [], []
    for name, sizes in chosen.items():
        rows = [cells[name][size] for size in sizes]
        means.append(np.mean([np.mean(row) for row in rows]))
        # Drawing right and wrong answers again, with replacement, is drawing from a binomial distribution.
        drawn.append(np.mean([rng.binomial(len(row), np.mean(row), _DRAWS) / len(row) for row in rows], axis=0))
    return _interval(float(np.mean(means)), np.mean(drawn, axis=0)) | {"algorithms": len(chosen)}


def _gain(base: Cells, arm: Cells, chosen: Mapping[str, Sequence[int]], seed: int) -> dict[str, Any]:
    """The mean of an arm less that of the base on the same questions, drawn again in pairs; and McNemar's test."""
    rng = np.random.default_rng(seed)
    drawn, means = [], []
    for name, sizes in chosen.items():
        apart = [np.subtract(arm[name][size], base[name][size]) for size in sizes]
        means.append(np.mean([np.mean(row) for row in apart]))
        parts = []
        for row in apart:
            shares = [float(np.mean(row == 1)), float(np.mean(row == -1)), float(np.mean(row == 0))]
            counts = rng.multinomial(len(row), np.array(shares) / math.fsum(shares), _DRAWS)
            parts.append((counts[:, 0] - counts[:, 1]) / len(row))
        drawn.append(np.mean(parts, axis=0))
    pairs = [(name, size) for name, sizes in chosen.items() for size in sizes]
    before = [right for name, size in pairs for right in base[name][size]]
    after = [right for name, size in pairs for right in arm[name][size]]
    return _interval(float(np.mean(means)), np.mean(drawn, axis=0)) | paired(before, after)


def _interval(mean: float, drawn: np.ndarray) -> dict[str, Any]:
    low, high = np.quantile(drawn, [0.5 - 0.5 * CONFIDENCE, 0.5 + 0.5 * CONFIDENCE])
    return {"mean": 100.0 * mean, "low": 100.0 * float(low), "high": 100.0 * float(high)}


def _speed(store: Store, arm: str, count: int) -> dict[str, Any]:
    """Tokens said and the seconds in which some process was at it: what several said at the same time counts once."""
    said = [store[arm, item] for item in range(count)]
    tokens, seconds = sum(one.tokens for one in said), _covered({(one.began, one.ended) for one in said})
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds if seconds else None}


def _covered(spans: Collection[tuple[float, float]]) -> float:
    """The length of what spans of time cover together.

    >>> _covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, until = 0.0, -math.inf
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
