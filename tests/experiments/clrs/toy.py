"""Texts like those of CLRS-Text that are quick to learn: the first or the last of some letters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from sharpmax.tasks.clrs_text.generation import Example

ALGORITHMS = FIRST, LAST = "minimum", "quickselect"
"""Names of real algorithms, since others are not read from files."""

_ASKED = {FIRST: "first", LAST: "last"}

TRAIN = (4, 6)


def example(algorithm: str, size: int, rng: random.Random) -> Example:
    letters = [rng.choice("abc") for _ in range(size)]
    said = letters[0] if algorithm == FIRST else letters[-1]
    trace = "".join(letters[:2])
    question = f"{_ASKED[algorithm]}:\nkey: {' '.join(letters)}\ntrace | pred:\n"
    return Example(question, f"{trace} | {said}\n\n", algorithm, size)


def examples(algorithms: Sequence[str], sizes: Sequence[int], per_cell: int, split: str, seed: int) -> list[Example]:
    return [
        example(algorithm, size, random.Random(f"{split}/{seed}/{_ASKED[algorithm]}/{size}/{number}"))
        for algorithm in algorithms
        for size in sizes
        for number in range(per_cell)
    ]


def write(path: Path, sizes: Sequence[int], per_cell: int, split: str) -> Path:
    made = examples(ALGORITHMS, sizes, per_cell, split, 0)
    path.write_text("".join(one.line() for one in made), encoding="utf-8")
    return path
