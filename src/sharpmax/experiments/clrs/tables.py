"""From answers to the tables of `sharpmax clrs evaluate`."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sharpmax.experiments.clrs.evaluation import AnswerStore, Evaluation, Variant
from sharpmax.experiments.statistics import CONFIDENCE, accuracy, paired
from sharpmax.results import FILE_NAME, json_values, load

if TYPE_CHECKING:
    from sharpmax.tasks.clrs_text.generation import Example

_ELSEWHERE = ("policy", "sizes")  # settings that the evaluation has itself


def trainings(words: Sequence[str], variants: Sequence[Variant]) -> dict[str, Any]:
    """Command, provenance, settings, loss curve and speed of every variant, named by `words`, that has results."""
    found = {}
    for word, variant in zip(words, variants, strict=True):
        file = Path(word) / FILE_NAME
        if variant.run is None or not file.is_file():
            continue
        saved = load(file)
        found[variant.name] = {
            "command": saved.command,
            "provenance": saved.provenance,
            "setting": {name: value for name, value in saved.tables["setting"].items() if name not in _ELSEWHERE},
            "curve": saved.tables["curve"],
            "speed": saved.tables["speed"],
        }
    return found


IN, OUT = "in", "out"
"""Sizes that the variants were trained on, and all others."""

Cells = dict[str, dict[int, list[int]]]
"""For each algorithm and size, its questions, or whether the answer to each is right."""

_DRAWS = 4000


@dataclass(frozen=True)
class MeanAccuracy:
    """Accuracy in percent, mean over algorithms, with a bootstrap interval."""

    mean: float
    low: float
    high: float
    algorithms: int


@dataclass(frozen=True)
class Gain:
    """Percentage points over the base with a bootstrap interval, and McNemar's test."""

    mean: float
    low: float
    high: float
    gained: int
    lost: int
    p: float


def evaluation_tables(
    evaluation: Evaluation, store: AnswerStore, trained: Mapping[str, Sequence[int]], seed: int
) -> dict[str, Any]:
    """All tables; `trained` holds the sizes of each algorithm that the variants were trained on."""
    final: Any = importlib.import_module("sharpmax.tasks.clrs_text").final_answer
    places = _places(evaluation.questions)
    wanted = [question.answer.strip() for question in evaluation.questions]
    ends = [final(answer) for answer in wanted]
    names = [variant.name for variant in evaluation.variants]
    base, others = names[0], names[1:]
    last: dict[str, Cells] = {}
    whole: dict[str, Cells] = {}
    for name in names:
        texts = [store[name, item].text.strip() for item in range(len(wanted))]
        last[name] = _cells(places, [int(final(a) == b) for a, b in zip(texts, ends, strict=True)])
        whole[name] = _cells(places, [int(a == b) for a, b in zip(texts, wanted, strict=True)])
    groups = {IN: _group(places, trained, inside=True), OUT: _group(places, trained, inside=False)}
    shown = {group: cells for group, cells in groups.items() if cells}
    tables: dict[str, Any] = {
        "setting": {
            **evaluation.identity(),
            "base": base,
            "remarks": {name: store.remarks(name) for name in names},
            "sizes": {
                algorithm: {"trained": list(trained.get(algorithm, ())), "examined": list(cells)}
                for algorithm, cells in places.items()
            },
        },
        "accuracy": {name: _each(last[name], accuracy) for name in names},
        "exact": {name: _each(whole[name], accuracy) for name in names},
        "majority": _each(places, lambda items: accuracy(_majority([ends[item] for item in items]))),
        "paired": {
            name: {
                algorithm: {str(size): paired(last[base][algorithm][size], right) for size, right in cells.items()}
                for algorithm, cells in last[name].items()
            }
            for name in others
        },
        "means": {name: {g: _mean(last[name], cells, seed) for g, cells in shown.items()} for name in names},
        "means_exact": {name: {g: _mean(whole[name], cells, seed) for g, cells in shown.items()} for name in names},
        "gains": {
            name: {g: _gain(last[base], last[name], cells, seed) for g, cells in shown.items()} for name in others
        },
        "by_algorithm": {name: _apart(shown, partial(_mean, last[name], seed=seed)) for name in names},
        "gains_by_algorithm": {
            name: _apart(shown, partial(_gain, last[base], last[name], seed=seed)) for name in others
        },
        "speed": {name: _speed(store, name, len(wanted)) for name in names},
    }
    return json_values(tables)


def _places(questions: Sequence[Example]) -> Cells:
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


def _mean(cells: Cells, chosen: Mapping[str, Sequence[int]], seed: int) -> MeanAccuracy:
    """Every algorithm counts the same, and every size of it; the interval comes from drawing answers again."""
    rng = np.random.default_rng(seed)
    drawn, means = [], []
    for name, sizes in chosen.items():
        rows = [cells[name][size] for size in sizes]
        means.append(np.mean([np.mean(row) for row in rows]))
        # Drawing right and wrong answers again, with replacement, is drawing from a binomial distribution.
        drawn.append(np.mean([rng.binomial(len(row), np.mean(row), _DRAWS) / len(row) for row in rows], axis=0))
    return MeanAccuracy(*_interval(float(np.mean(means)), np.mean(drawn, axis=0)), len(chosen))


def _gain(base: Cells, variant: Cells, chosen: Mapping[str, Sequence[int]], seed: int) -> Gain:
    """The mean of a variant minus that of the base on the same questions, drawn again in pairs; and McNemar's test."""
    rng = np.random.default_rng(seed)
    drawn, means = [], []
    for name, sizes in chosen.items():
        apart = [np.subtract(variant[name][size], base[name][size]) for size in sizes]
        means.append(np.mean([np.mean(row) for row in apart]))
        parts = []
        for row in apart:
            shares = [float(np.mean(row == 1)), float(np.mean(row == -1)), float(np.mean(row == 0))]
            counts = rng.multinomial(len(row), np.array(shares) / math.fsum(shares), _DRAWS)
            parts.append((counts[:, 0] - counts[:, 1]) / len(row))
        drawn.append(np.mean(parts, axis=0))
    pairs = [(name, size) for name, sizes in chosen.items() for size in sizes]
    before = [right for name, size in pairs for right in base[name][size]]
    after = [right for name, size in pairs for right in variant[name][size]]
    test = paired(before, after)
    return Gain(*_interval(float(np.mean(means)), np.mean(drawn, axis=0)), test.gained, test.lost, test.p)


def _interval(mean: float, drawn: np.ndarray) -> tuple[float, float, float]:
    low, high = np.quantile(drawn, [0.5 - 0.5 * CONFIDENCE, 0.5 + 0.5 * CONFIDENCE])
    return 100.0 * mean, 100.0 * float(low), 100.0 * float(high)


def _speed(store: AnswerStore, variant: str, count: int) -> dict[str, Any]:
    """Tokens generated and the seconds in which some process was generating; overlapping times count once."""
    answers = [store[variant, item] for item in range(count)]
    tokens, seconds = sum(one.tokens for one in answers), _covered({(one.began, one.ended) for one in answers})
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
