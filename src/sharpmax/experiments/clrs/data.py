"""Where examples come from: made by the generators of CLRS-Text, or read from a file of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.errors import reject
from sharpmax.experiments.clrs.documents import Question

__all__ = ["Source", "algorithms_from", "examination", "sizes_of", "trained_on", "trained_sizes", "training_examples"]

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

    def __post_init__(self) -> None:
        if self.per_cell < 1:
            reject("--per-cell", self.per_cell, "1 or more")
        if self.dataset is not None and not self.dataset.exists():
            reject("--dataset", repr(str(self.dataset)), "a file that exists")

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, without anything of this machine."""
        made = {"per_cell": self.per_cell, "trace": self.trace, "seed": self.seed}
        read = None if self.dataset is None else self.dataset.name
        return {"algorithms": list(self.algorithms), "dataset": read, **(made if read is None else {})}

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Source | None:
        """Settings as `to_dict` gave them; None where they name a file, whose place they do not tell."""
        if body["dataset"] is not None:
            return None
        return cls(tuple(body["algorithms"]), body["per_cell"], body["trace"], body["seed"])


def training_examples(source: Source, folder: Path, note: Note) -> list[Question]:
    """The examples to learn from; those that are made are kept in `folder`."""
    return _of(source, source.dataset or _training_file(source, folder, note))


def examination(
    source: Source, sizes: Sequence[int] | None, folder: Path, trained_on: Source | None, note: Note
) -> list[Question]:
    """The examples to be examined with: of the sizes given or those meant for tests, none of them in `trained_on`."""
    if source.dataset is not None:
        found = _of(source, source.dataset)
        return [one for one in found if sizes is None or one.length in sizes]
    more = {} if trained_on is None else {"train": _training_file(trained_on, folder, note)}
    chosen = None if sizes is None else tuple(sizes)
    made = _clrs().test_set(
        folder, source.algorithms, chosen, per_cell=source.per_cell, trace=source.trace, seed=source.seed, note=note,
        **more,
    )  # fmt: skip
    return _of(source, made)


def _training_file(source: Source, folder: Path, note: Note) -> Path:
    made: Path = _clrs().training_set(
        folder, source.algorithms, per_cell=source.per_cell, trace=source.trace, seed=source.seed, note=note
    )
    return made


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


def trained_on(runs: Sequence[Mapping[str, Any]]) -> Source | None:
    """What the arms were trained on, so that no question is asked that they know; None where that was a file."""
    found = [Source.from_dict(run["data"]) for run in runs]
    for source in found[1:]:
        if source != found[0]:
            reject("model", "arms that were trained on other data than the first", "arms that differ in policy alone")
    return found[0] if found else None


def trained_sizes(runs: Sequence[Mapping[str, Any]], algorithms: Sequence[str] = ()) -> dict[str, list[int]]:
    """The sizes of each algorithm that the arms were trained on; of models as they come, those meant for training."""
    if not runs:
        return {name: list(_clrs().train_sizes(name)) for name in algorithms}
    sizes: dict[str, list[int]] = runs[0]["sizes"]
    return sizes
