"""Where examples come from: made by the generators of CLRS-Text, or read from a file of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.errors import reject
from sharpmax.experiments.clrs.documents import Question

__all__ = ["Source", "algorithms_from", "examination", "shortened", "sizes_of", "trained_sizes", "training_examples"]

Note = Callable[[str], None]


def _clrs() -> Any:
    """The generators, imported when they are needed: their extra may be missing."""
    return importlib.import_module("sharpmax.tasks.clrs_text")


def algorithms_from(text: str | None) -> tuple[str, ...]:
    """Algorithms from "minimum,bfs"; None is all of them."""
    known: tuple[str, ...] = _clrs().ALGORITHMS
    if text is None:
        return known
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in known:
            reject("--algorithms", repr(name), f"some of {', '.join(known)}")
    return names


@dataclass(frozen=True)
class Source:
    """What examples to make or to read."""

    algorithms: tuple[str, ...]
    per_cell: int
    """Examples of each algorithm and size."""

    trace: bool = False
    seed: int = 0
    dataset: Path | None = None
    """A file to read instead."""

    cell_text: int | None = None
    """Characters of each algorithm and size to learn from at most: text of a matrix grows with the square of the size,
    and would take up nearly all of a training."""

    largest: int | None = None
    """The largest size to learn from; None is the largest of each algorithm."""

    def __post_init__(self) -> None:
        if self.per_cell < 1:
            reject("--per-cell", self.per_cell, "1 or more")
        if self.cell_text is not None and self.cell_text < 1:
            reject("--cell-text", self.cell_text, "1 or more characters")
        if self.dataset is not None and not self.dataset.exists():
            reject("--dataset", repr(str(self.dataset)), "a file that exists")

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, without anything of this machine."""
        made = {"per_cell": self.per_cell, "trace": self.trace, "seed": self.seed}
        read = None if self.dataset is None else self.dataset.name
        limits = {"cell_text": self.cell_text, "largest": self.largest}
        some = {name: limit for name, limit in limits.items() if limit is not None}
        return {"algorithms": list(self.algorithms), "dataset": read, **some, **(made if read is None else {})}


def training_examples(source: Source, folder: Path, *, processes: int = 1, note: Note) -> list[Question]:
    """The examples to learn from; those that are made are kept in `folder`."""
    if source.dataset is None:
        limits = {"text": source.cell_text, "largest": source.largest}
        path = _clrs().training_set(folder, source.algorithms, **limits, **_how(source, processes, note))
        found = _of(source, path)
    else:
        found = _up_to(source.largest, _of(source, source.dataset))
    return found if source.cell_text is None else shortened(found, source.cell_text)


def _up_to(largest: int | None, examples: list[Question]) -> list[Question]:
    left = [one for one in examples if largest is None or one.length <= largest]
    if not left:
        reject("--largest", largest, f"{min(one.length for one in examples)} or more, the smallest size there is")
    return left


def shortened(examples: Sequence[Question], most: int) -> list[Question]:
    """The first examples of each algorithm and size, until they have `most` characters; at least one."""
    used: dict[tuple[str, int], int] = {}
    left = []
    for one in examples:
        cell, text = (one.algo_name, one.length), one.characters
        fits = cell not in used or used[cell] + text <= most
        if fits:
            left.append(one)
        # What does not fit ends its cell: shorter ones after it would be easier ones.
        used[cell] = used.get(cell, 0) + text if fits else most
    return left


def examination(
    source: Source, sizes: Sequence[int] | None, folder: Path, *, without: Path | None, processes: int = 1, note: Note
) -> list[Question]:
    """The examples to be examined with, of the sizes given or those meant for tests.

    None that is made is ever made for training, and none is in the dataset `without`.
    """
    if source.dataset is not None:
        found = _of(source, source.dataset)
        chosen = [one for one in found if sizes is None or one.length in sizes]
        if not chosen:
            there = sorted({one.length for one in found})
            reject("--sizes", sizes, f"sizes that are in {str(source.dataset)!r}: {', '.join(map(str, there))}")
        return chosen
    asked = None if sizes is None else tuple(sizes)
    how = _how(source, processes, note)
    return _of(source, _clrs().test_set(folder, source.algorithms, asked, train=without, **how))


def _how(source: Source, processes: int, note: Note) -> dict[str, Any]:
    if processes < 1:
        reject("--processes", processes, "1 or more")
    several = {} if processes == 1 else {"processes": processes}
    return {"per_cell": source.per_cell, "trace": source.trace, "seed": source.seed, "note": note, **several}


def _of(source: Source, path: Path) -> list[Question]:
    found = [one for one in _clrs().load_dataset(path) if one.algo_name in source.algorithms]
    if not found:
        reject("--dataset", repr(str(path)), f"a file with examples of {', '.join(source.algorithms)}")
    return found


def sizes_of(examples: Sequence[Question]) -> dict[str, list[int]]:
    """The sizes of each algorithm, ascending."""
    found: dict[str, set[int]] = {}
    for one in examples:
        found.setdefault(one.algo_name, set()).add(one.length)
    return {name: sorted(sizes) for name, sizes in found.items()}


def trained_sizes(runs: Sequence[Mapping[str, Any]], algorithms: Sequence[str] = ()) -> dict[str, list[int]]:
    """The sizes of each algorithm that the arms were trained on; of models as they come, those meant for training."""
    if len({run["examples"]["fingerprint"] for run in runs}) > 1:
        reject("model", "arms that were trained on different examples", "arms that were trained on the same ones")
    if not runs:
        return {name: list(_clrs().train_sizes(name)) for name in algorithms}
    sizes: dict[str, list[int]] = runs[0]["sizes"]
    return sizes
