"""Two artificial algorithms in place of the thirty of CLRS: as text, learnable, and made in no time."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.tasks.clrs_text.generation import Example

ALGORITHMS = ("first", "last")
TRAIN, TEST = (4, 6), (4, 8)


def example(algorithm: str, size: int, rng: random.Random) -> Example:
    letters = [rng.choice("abc") for _ in range(size)]
    said = letters[0] if algorithm == "first" else letters[-1]
    trace = "".join(letters[:2])
    return Example(f"{algorithm}:\nkey: {' '.join(letters)}\ntrace | pred:\n", f"{trace} | {said}\n\n", algorithm, size)


def examples(algorithms: Sequence[str], sizes: Sequence[int], per_cell: int, split: str, seed: int) -> list[Example]:
    return [
        example(algorithm, size, random.Random(f"{split}/{seed}/{algorithm}/{size}/{number}"))
        for algorithm in algorithms
        for size in sizes
        for number in range(per_cell)
    ]


def write(path: Path, made: Sequence[Example]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(one.line() for one in made), encoding="utf-8")
    return path


def training_set(
    folder: Path, algorithms: Sequence[str], *, per_cell: int, text: int | None = None, largest: int | None = None,
    trace: bool = False, seed: int = 0, note: Any = None,
) -> Path:  # fmt: skip
    sizes = [size for size in TRAIN if size <= (largest or TRAIN[-1])]
    made = examples(algorithms, sizes, per_cell, "train", seed)
    return write(Path(folder) / f"train-{per_cell}-{largest}-{seed}.jsonl", made)


def exam_set(
    folder: Path, algorithms: Sequence[str], sizes: Any = None, *, per_cell: int, trace: bool = False, seed: int = 0,
    train: Any = None, note: Any = None,
) -> Path:  # fmt: skip
    made = examples(algorithms, sizes or TEST, per_cell, "test", seed)
    return write(Path(folder) / f"test-{per_cell}-{seed}.jsonl", made)


def load_dataset(path: Path) -> list[Example]:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    try:
        return [Example(**json.loads(line)) for line in lines]
    except TypeError:
        raise FileFormatError(f"--dataset: {str(path)!r} lacks a column") from None


def module() -> ModuleType:
    """What stands in for `sharpmax.tasks.clrs_text`."""
    made = ModuleType("sharpmax.tasks.clrs_text")
    vars(made).update(
        ALGORITHMS=ALGORITHMS, Example=Example, train_sizes=lambda algorithm: TRAIN, test_sizes=lambda algorithm: TEST,
        training_set=training_set, test_set=exam_set, load_dataset=load_dataset,
        final_answer=lambda text: text.rpartition("|")[2].strip(),
    )  # fmt: skip
    return made


def install(set_item: Callable[[Any, str, Any], None]) -> None:
    set_item(sys.modules, "sharpmax.tasks.clrs_text", module())
