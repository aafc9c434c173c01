"""CLRS-Text examples as token sequences."""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sharpmax.errors import reject
from sharpmax.models.scoring import Reply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_ONCE = 2000


class Question(Protocol):
    """A question with its answer, as `sharpmax.tasks.clrs_text.generation.Example` is one."""

    @property
    def question(self) -> str:
        """What the model reads."""

    @property
    def answer(self) -> str:
        """What it has to say, white space at its end aside."""

    @property
    def characters(self) -> int:
        """The length of both."""

    @property
    def algo_name(self) -> str:
        """The algorithm."""

    @property
    def length(self) -> int:
        """The size of the problem."""


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer."""
    end: Any = tokenizer.eos_token_id
    if end is None:
        reject("model", "a tokenizer without an end-of-sequence token", "one that has it: it ends every answer")
    return int(end)


def replies(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Question]) -> Iterator[Reply]:
    """Each example as tokens. Question and answer are cut apart: a token never has letters of both."""
    end = end_of(tokenizer)
    for place in range(0, len(examples), _AT_ONCE):
        part = examples[place : place + _AT_ONCE]
        asked = tokenizer([one.question for one in part], verbose=False).input_ids
        said = tokenizer([one.answer.rstrip() for one in part], add_special_tokens=False, verbose=False).input_ids
        for question, answer in zip(asked, said, strict=True):
            # Some tokenizers end every text they are given.
            read = question[:-1] if question[-1:] == [end] else question
            if not read:
                reject("--dataset", "a question without a single token", "questions with text")
            yield Reply((*read, *answer, end), len(read))


@dataclass(frozen=True, eq=False)
class Documents:
    """Many documents in few arrays: tokens one after the other, where each begins, and where its answer does."""

    ids: np.ndarray
    begins: np.ndarray
    """`[documents + 1]`: the last is the end of them all."""

    starts: np.ndarray
    """Tokens of the question of each."""

    dropped: int = 0
    """How many are not there because they are longer than allowed."""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Question],
        most: int | None = None,
        note: Callable[[int], None] = lambda done: None,
    ) -> Documents:
        """The documents of up to `most` tokens; `note` is told how many have been read."""
        ids: list[np.ndarray] = []
        starts, dropped = [], 0
        for done, reply in enumerate(replies(tokenizer, examples), 1):
            if most is not None and len(reply.ids) > most:
                dropped += 1
            else:
                ids.append(np.array(reply.ids, dtype=np.int32))
                starts.append(reply.start)
            if done % _AT_ONCE == 0:
                note(done)
        if not ids:
            reject("examples", f"{len(examples)} of which none fits", f"examples of up to {most} tokens")
        begins = np.cumsum([0, *(len(one) for one in ids)], dtype=np.int64)
        return cls(np.concatenate(ids), begins, np.array(starts, dtype=np.int64), dropped)

    def __len__(self) -> int:
        return len(self.starts)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each."""
        return np.diff(self.begins)

    @property
    def answer_length(self) -> float:
        """Tokens of an answer on average."""
        return float((self.lengths - self.starts).mean())

    def __getitem__(self, number: int) -> Reply:
        if not 0 <= number < len(self):
            raise IndexError(number)
        one = self.ids[self.begins[number] : self.begins[number + 1]]
        return Reply(tuple(one.tolist()), int(self.starts[number]))


def fingerprint(examples: Sequence[Question]) -> str:
    """Tells one set of examples from another, order included."""
    digest = hashlib.sha256()
    for one in examples:
        digest.update(f"{one.algo_name}\0{one.length}\0{one.question}\0{one.answer}\1".encode())
    return digest.hexdigest()[:16]


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
