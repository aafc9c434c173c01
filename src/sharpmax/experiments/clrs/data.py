"""CLRS-Text examples as token sequences, packed into rows.

Attention costs the square of a row, so one long document must not make every row long: short documents share rows of
one size, a long one has a row to itself, and rows of similar length are read together. Rows need no mask: padding comes
last, where no token of a document sees it, so that the fastest causal kernels can be used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sharpmax.errors import reject
from sharpmax.models.scoring import Reply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sharpmax.tasks.clrs_text.generation import Example

_AT_ONCE = 2000  # examples tokenized together


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer."""
    end: Any = tokenizer.eos_token_id
    if end is None:
        reject("model", "a tokenizer without an end-of-sequence token", "one that has it: it ends every answer")
    return int(end)


def replies(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> Iterator[Reply]:
    """Each example as tokens. Question and answer are tokenized apart: no token spans both."""
    end = end_of(tokenizer)
    for place in range(0, len(examples), _AT_ONCE):
        part = examples[place : place + _AT_ONCE]
        asked = tokenizer([one.question for one in part], verbose=False).input_ids
        answers = tokenizer([one.answer.rstrip() for one in part], add_special_tokens=False, verbose=False).input_ids
        for question, answer in zip(asked, answers, strict=True):
            # Some tokenizers end every text they are given.
            read = question[:-1] if question[-1:] == [end] else question
            if not read:
                reject("--dataset", "a question without a single token", "questions with text")
            yield Reply((*read, *answer, end), len(read))


@dataclass(frozen=True, eq=False)
class Documents:
    """Many documents in few arrays: their tokens one after the other, and where each begins."""

    ids: np.ndarray
    begins: np.ndarray  # [documents + 1]
    starts: np.ndarray  # tokens of the question of each
    dropped: int = 0  # documents left out because they are too long

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        most: int | None = None,
        note: Callable[[int], None] = lambda done: None,
    ) -> Documents:
        """The documents of up to `most` tokens; `note` is called with the number read so far."""
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


def fingerprint(examples: Sequence[Example]) -> str:
    """A digest of the examples and their order."""
    digest = hashlib.sha256()
    for one in examples:
        digest.update(f"{one.algo_name}\0{one.length}\0{one.question}\0{one.answer}\1".encode())
    return digest.hexdigest()[:16]


Note = Callable[[str], None]


def _clrs() -> Any:
    """The generators, whose extra may be missing."""
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
    """Which examples to generate or to read."""

    algorithms: tuple[str, ...]
    per_cell: int  # examples of each algorithm and size
    trace: bool = False
    seed: int = 0
    dataset: Path | None = None  # a file to read instead of generating
    # Characters of each algorithm and size to train on at most: the text of a matrix grows with the square of its size.
    cell_text: int | None = None
    largest: int | None = None  # the largest size to train on; None is the largest of each algorithm

    def __post_init__(self) -> None:
        if self.dataset is not None and not self.dataset.exists():
            reject("--dataset", repr(str(self.dataset)), "a file that exists")
        if self.dataset is not None and self.cell_text is not None:
            reject("--cell-text", self.cell_text, "generated examples", "leave it out together with --dataset")

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, without paths of this machine."""
        made = {"per_cell": self.per_cell, "trace": self.trace, "seed": self.seed}
        read = None if self.dataset is None else self.dataset.name
        limits = {"cell_text": self.cell_text, "largest": self.largest}
        some = {name: limit for name, limit in limits.items() if limit is not None}
        return {"algorithms": list(self.algorithms), "dataset": read, **some, **(made if read is None else {})}


def training_examples(source: Source, folder: Path, *, processes: int = 1, note: Note) -> list[Example]:
    """Examples to train on; generated ones are kept in `folder`."""
    path, largest = source.dataset, source.largest
    if path is None:
        limits = {"text": source.cell_text, "largest": largest}
        path = _clrs().training_set(folder, source.algorithms, **limits, **_how(source, processes, note))
    known = _of(source, path)
    found = [one for one in known if largest is None or one.length <= largest]
    if not found:
        reject("--largest", largest, f"{min(one.length for one in known)} or more, the smallest size there is")
    return found


def test_examples(
    source: Source, sizes: Sequence[int] | None, folder: Path, *, without: Path | None, processes: int = 1, note: Note
) -> list[Example]:
    """The test set: examples of the given sizes, or of those meant for tests.

    Generated ones are never generated for training, and none is in the dataset `without`.
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
    several = {} if processes == 1 else {"processes": processes}
    return {"per_cell": source.per_cell, "trace": source.trace, "seed": source.seed, "note": note, **several}


def _of(source: Source, path: Path) -> list[Example]:
    found = [one for one in _clrs().load_dataset(path) if one.algo_name in source.algorithms]
    if not found:
        reject("--dataset", repr(str(path)), f"a file with examples of {', '.join(source.algorithms)}")
    return found


def sizes_of(examples: Sequence[Example]) -> dict[str, list[int]]:
    """The sizes of each algorithm, ascending."""
    found: dict[str, set[int]] = {}
    for one in examples:
        found.setdefault(one.algo_name, set()).add(one.length)
    return {name: sorted(sizes) for name, sizes in found.items()}


def trained_sizes(runs: Sequence[Mapping[str, Any]], algorithms: Sequence[str] = ()) -> dict[str, list[int]]:
    """The sizes of each algorithm that the variants were trained on; without any, those meant for training."""
    if len({run["examples"]["fingerprint"] for run in runs}) > 1:
        reject("model", "models that were trained on different examples", "models that were trained on the same ones")
    if not runs:
        return {name: list(_clrs().train_sizes(name)) for name in algorithms}
    sizes: dict[str, list[int]] = runs[0]["sizes"]
    return sizes


IGNORED = -100
"""The label of a token that is not trained on."""

_OPEN = 32  # rows that are filled at the same time
_MULTIPLE = 16  # rows of long documents have a multiple of this many tokens
_MIXED = 1.1  # long documents whose lengths differ by up to this factor are grouped differently in every pass


def pack(lengths: Sequence[int] | np.ndarray, order: Sequence[int] | np.ndarray, size: int) -> list[list[int]]:
    """Rows of documents, each of up to `size` tokens in all: every document goes into the first open row it fits in.

    >>> pack([3, 2, 4, 1], [0, 1, 2, 3], 5)
    [[0, 1], [2, 3]]
    """
    rows: list[list[int]] = []
    opened: list[tuple[int, list[int]]] = []  # tokens left, documents
    for number in map(int, order):
        length = int(lengths[number])
        place = next((i for i, (left, _) in enumerate(opened) if left >= length), None)
        if place is None:
            if len(opened) == _OPEN:
                opened.remove(min(opened, key=lambda one: one[0]))
            place = len(opened)
            rows.append([])
            opened.append((size, rows[-1]))
        left, row = opened[place]
        row.append(number)
        opened[place] = (left - length, row)
    return rows


@dataclass(frozen=True)
class Group:
    """Rows of `size` tokens that a device reads at once, with the numbers of the documents in each."""

    size: int
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Packed:
    """The groups of a whole training in the order in which they are read, which does not depend on a policy."""

    documents: Documents
    groups: tuple[Group, ...]
    passes: float  # how often each document is read, on average

    @classmethod
    def of(
        cls,
        documents: Documents,
        row_tokens: int,
        *,
        group_tokens: int,
        together: int,
        steps: int | None,
        epochs: float,
        seed: int,
    ) -> Packed:
        """Groups for `steps` steps of `together` groups, or without `steps` for `epochs` passes over the documents.

        Documents of up to `row_tokens` share rows of that size, and a group has up to `group_tokens` tokens. Every pass
        is shuffled and packed anew.
        """
        groups: list[Group] = []
        for one in _passes(documents, row_tokens, group_tokens, seed):
            if steps is None:
                steps = max(1, round(len(one) * epochs / together))
            groups += one
            if len(groups) >= steps * together:
                groups = groups[: steps * together]
                break
        used = sum(len(row) for group in groups for row in group.rows)
        return cls(documents, tuple(groups), used / len(documents))

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """One group: tokens, positions that start anew with every document, and labels of the answers alone."""
        group = self.groups[number]
        shape = len(group.rows), group.size
        ids, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        begins, starts = self.documents.begins, self.documents.starts
        for row, chosen in enumerate(group.rows):
            place = 0
            for one in chosen:
                document = self.documents.ids[begins[one] : begins[one + 1]]
                here, start = slice(place, place + len(document)), place + int(starts[one])
                ids[row, here], positions[row, here] = document, np.arange(len(document))
                labels[row, start : here.stop] = ids[row, start : here.stop]
                place = here.stop
            # The padding of a shared row is a document of its own; behind a single document no token sees it.
            first = place if len(chosen) == 1 else 0
            positions[row, place:] = np.arange(first, first + group.size - place)
        return {name: torch.from_numpy(a) for name, a in (("ids", ids), ("positions", positions), ("labels", labels))}

    def tokens(self, first: int, last: int) -> int:
        """Tokens of the documents in groups `first` … `last` − 1."""
        lengths = self.documents.lengths
        return int(sum(lengths[list(row)].sum() for group in self.groups[first:last] for row in group.rows))

    @property
    def filled(self) -> float:
        """The share of positions that hold a token of a document."""
        places = sum(group.size * len(group.rows) for group in self.groups)
        return self.tokens(0, len(self)) / places


def _passes(documents: Documents, row_tokens: int, group_tokens: int, seed: int) -> Iterator[list[Group]]:
    lengths = documents.lengths
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        order = rng.permutation(len(documents))
        is_long = lengths[order] > row_tokens
        rows = pack(lengths, order[~is_long], row_tokens)
        many = max(1, group_tokens // row_tokens)
        parts = (rows[first : first + many] for first in range(0, len(rows), many))
        groups = [Group(row_tokens, tuple(map(tuple, part))) for part in parts]
        groups += _alike(lengths, order[is_long], group_tokens, rng)
        yield [groups[place] for place in rng.permutation(len(groups))]


def _alike(lengths: np.ndarray, order: np.ndarray, group_tokens: int, rng: np.random.Generator) -> Iterator[Group]:
    """Groups of long documents of about the same length, each alone in its row, the longest first."""
    # At most the longest document, which the model has positions for.
    sizes = np.minimum(-(-lengths // _MULTIPLE) * _MULTIPLE, lengths.max())
    about = lengths[order] * rng.uniform(1.0, _MIXED, len(order))
    rows: list[int] = []
    size = 0
    for one in order[np.argsort(-about)].tolist():
        if rows and (len(rows) + 1) * max(size, int(sizes[one])) > group_tokens:
            yield Group(size, tuple((row,) for row in rows))
            rows, size = [], 0
        rows.append(one)
        size = max(size, int(sizes[one]))
    if rows:
        yield Group(size, tuple((row,) for row in rows))


def batch_of(groups: Sequence[dict[str, Tensor]]) -> dict[str, object]:
    """A group as a causal model takes it. Without mask and cache, the positions tell documents apart."""
    (group,) = groups
    return {
        "input_ids": group["ids"],
        "position_ids": group["positions"],
        "labels": group["labels"],
        "use_cache": False,
    }
