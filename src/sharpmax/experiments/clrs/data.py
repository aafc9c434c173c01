"""CLRS-Text examples as token sequences, in groups that a device reads at once.

Each document is one row, in a group of rows of about the same length. Padding comes last, where causal attention does
not see it, so rows need no mask and the fastest causal kernels can be used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from sharpmax.errors import reject
from sharpmax.models.scoring import Reply
from sharpmax.tasks.clrs_text.datasets import load_dataset, make_dataset
from sharpmax.tasks.clrs_text.generation import Example
from sharpmax.tasks.clrs_text.sizes import ALGORITHMS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_ONCE = 2000  # examples tokenized together
Note = Callable[[str], None]


def algorithms_from(text: str | None) -> tuple[str, ...]:
    """The algorithms in "minimum,bfs"; all of them for None."""
    if text is None:
        return ALGORITHMS
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in ALGORITHMS:
            reject("--algorithms", repr(name), f"some of {', '.join(ALGORITHMS)}")
    return names


@dataclass(frozen=True)
class Source:
    """Which examples to generate or to read."""

    algorithms: tuple[str, ...]
    per_cell: int  # examples of each algorithm and size
    seed: int = 0
    sizes: tuple[int, ...] | None = None  # None: the official ones of each algorithm
    dataset: Path | None = None  # a file to read instead of generating

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values, without machine paths."""
        sizes = {} if self.sizes is None else {"sizes": list(self.sizes)}
        if self.dataset is not None:
            return {"algorithms": list(self.algorithms), "dataset": self.dataset.name, **sizes}
        made = {"per_cell": self.per_cell, "seed": self.seed}
        return {"algorithms": list(self.algorithms), "dataset": None, **sizes, **made}

    def examples(
        self, split: Literal["train", "test"], folder: Path, *, processes: int = 1, note: Note = lambda text: None
    ) -> list[Example]:
        """Load the examples, or generate them in `folder`. Test examples never occur in training."""
        path = self.dataset
        if path is None:
            path = make_dataset(
                folder, split, self.algorithms, self.sizes, per_cell=self.per_cell, seed=self.seed,
                processes=processes, note=note,
            )  # fmt: skip
        elif not path.exists():
            reject("--dataset", repr(str(path)), "a file that exists")
        known = [one for one in load_dataset(path) if one.algo_name in self.algorithms]
        if not known:
            reject("--dataset", repr(str(path)), f"a file with examples of {', '.join(self.algorithms)}")
        found = [one for one in known if self.sizes is None or one.length in self.sizes]
        if not found:
            there = ", ".join(map(str, sorted({one.length for one in known})))
            reject("--sizes", list(self.sizes or ()), f"sizes that are in {str(path)!r}: {there}")
        return found


def fingerprint(examples: Sequence[Example]) -> str:
    """A digest of the examples in their order."""
    digest = hashlib.sha256()
    for one in examples:
        digest.update(f"{one.algo_name}\0{one.length}\0{one.question}\0{one.answer}\1".encode())
    return digest.hexdigest()[:16]


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer."""
    end: Any = tokenizer.eos_token_id
    if end is None:
        reject("model", "a tokenizer without an end-of-sequence token", "one that has it: it ends every answer")
    return int(end)


def replies(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> Iterator[Reply]:
    """Each example as tokens. Question and answer are tokenized separately, so no token spans both."""
    end = end_of(tokenizer)
    for place in range(0, len(examples), _AT_ONCE):
        part = examples[place : place + _AT_ONCE]
        asked = tokenizer([one.question for one in part], verbose=False).input_ids
        answers = tokenizer([one.answer.rstrip() for one in part], add_special_tokens=False, verbose=False).input_ids
        for question, answer in zip(asked, answers, strict=True):
            # Some tokenizers add the end token to every text.
            read = question[:-1] if question[-1:] == [end] else question
            if not read:
                reject("--dataset", "a question without a single token", "questions with text")
            yield Reply((*read, *answer, end), len(read))


@dataclass(frozen=True, eq=False)
class Documents:
    """Examples as arrays of tokens."""

    ids: Sequence[np.ndarray]
    starts: Sequence[int]  # number of question tokens of each
    lengths: np.ndarray
    about: Mapping[str, Any]  # "examples" they come from and their "sizes" by algorithm

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        most: int | None = None,
        note: Note = lambda text: None,
    ) -> Documents:
        """Tokenize the examples, dropping those of more than `most` tokens."""
        ids: list[np.ndarray] = []
        starts = []
        for done, reply in enumerate(replies(tokenizer, examples)):
            if done % _AT_ONCE == 0:
                note(f"tokenizing {done:,} of {len(examples):,} examples")
            if most is None or len(reply.ids) <= most:
                ids.append(np.array(reply.ids, dtype=np.int32))
                starts.append(reply.start)
        if not ids:
            reject("examples", f"{len(examples)} of which none fits", f"examples of up to {most} tokens")
        sizes: dict[str, set[int]] = {}
        for one in examples:
            sizes.setdefault(one.algo_name, set()).add(one.length)
        dropped = len(examples) - len(ids)
        counted = {"count": len(examples), "fingerprint": fingerprint(examples), "dropped": dropped}
        about = {"examples": counted, "sizes": {name: sorted(known) for name, known in sizes.items()}}
        return cls(ids, starts, np.array([len(one) for one in ids]), about)


IGNORED = -100
"""The label of tokens without a loss."""

MIXED = 1.1
"""Documents whose lengths differ by up to this factor are shuffled between groups in every pass."""

_MULTIPLE = 16  # the length of a row is a multiple of this


@dataclass(frozen=True, eq=False)
class Batches:
    """The groups of documents of a training, in the order they are read, which depends only on the seed."""

    documents: Documents
    groups: Sequence[Sequence[int]]  # indices of documents
    together: int  # groups per step

    @classmethod
    def of(
        cls,
        documents: Documents,
        group_tokens: int,
        together: int,
        steps: int | None = None,
        seed: int = 0,
        mixed: float = MIXED,
    ) -> Batches:
        """Groups of up to `group_tokens` tokens, for `steps` steps of `together` groups or one pass over the documents.

        With a larger `mixed`, groups mix documents of more different lengths.
        """
        groups: list[list[int]] = []
        number, wanted = 0, 1
        while len(groups) < wanted:
            rng = np.random.default_rng([seed, number])
            found = list(_alike(documents.lengths, group_tokens, rng, mixed))
            groups += [found[place] for place in rng.permutation(len(found))]
            wanted = together * (steps or max(1, round(len(found) / together)))
            number += 1
        return cls(documents, groups[:wanted], together)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Inputs of the model for one group: labels are set for answers only; `answers` counts those of its step."""
        group, documents = self.groups[number], self.documents
        size = _padded(documents.lengths[list(group)], documents.lengths.max()).max()
        ids = np.zeros((len(group), size), dtype=np.int64)
        labels = np.full_like(ids, IGNORED)
        for row, one in enumerate(group):
            start, length = documents.starts[one], len(documents.ids[one])
            ids[row, :length] = documents.ids[one]
            labels[row, start:length] = ids[row, start:length]
        first = number // self.together * self.together
        answers = sum(map(len, self.groups[first : first + self.together]))
        tensors = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        return tensors | {"answers": answers, "use_cache": False}

    def tokens(self, first: int, last: int) -> int:
        """The number of tokens in groups `first` … `last` − 1, without padding."""
        return int(sum(self.documents.lengths[list(group)].sum() for group in self.groups[first:last]))

    @property
    def passes(self) -> float:
        """How often each document is read, on average."""
        return sum(map(len, self.groups)) / len(self.documents.ids)


def _padded(lengths: np.ndarray, most: int) -> np.ndarray:
    """Lengths with padding, at most that of the longest document, for which the model has positions."""
    rows: np.ndarray = np.minimum(-(-lengths // _MULTIPLE) * _MULTIPLE, most)
    return rows


def _alike(lengths: np.ndarray, group_tokens: int, rng: np.random.Generator, mixed: float) -> Iterator[list[int]]:
    """Groups of documents of about the same length, the longest first."""
    sizes, order = _padded(lengths, lengths.max()), rng.permutation(len(lengths))
    about = lengths[order] * rng.uniform(1.0, mixed, len(order))
    group: list[int] = []
    size = 0
    for one in order[np.argsort(-about)].tolist():
        if group and (len(group) + 1) * max(size, int(sizes[one])) > group_tokens:
            yield group
            group, size = [], 0
        group.append(one)
        size = max(size, int(sizes[one]))
    yield group
