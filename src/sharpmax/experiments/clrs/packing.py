"""Documents packed into rows, none of which sees another.

Attention costs the square of a row, so that one long document must not make every row long: short ones share rows of
one room, a long one has a row to itself, and rows of long ones of about the same length are read together. Such rows
need no mask: what fills a row up comes last, where no token of the document sees it. That leaves attention to the
fastest kernels, which know no other mask than the causal one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharpmax.experiments.clrs.data import Documents

IGNORED = -100
"""The label of a token that nobody has to say."""

_OPEN = 32
"""Rows that are being filled at the same time."""

_WHOLE = 64
"""Rooms of long documents are multiples of this many tokens, as tiles of kernels are."""

_MIXED = 1.1
"""Long documents whose lengths differ by up to this factor meet in every pass in other groups."""


def pack(lengths: Sequence[int] | np.ndarray, order: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """Rows of documents, each of up to `room` tokens in all: every document goes into the first open row it fits in.

    >>> pack([3, 2, 4, 1], [0, 1, 2, 3], 5)
    [[0, 1], [2, 3]]
    """
    rows: list[list[int]] = []
    opened: list[tuple[int, list[int]]] = []  # tokens left, documents
    for number in map(int, order):
        length = int(lengths[number])
        place = next((i for i, (left, _) in enumerate(opened) if left >= length), None)
        if place is None:
            row: list[int] = []
            rows.append(row)
            opened.append((room, row))
            place = len(opened) - 1
            if len(opened) > _OPEN:
                opened.remove(min(opened[:-1], key=lambda one: one[0]))
                place = len(opened) - 1
        left, row = opened[place]
        row.append(number)
        opened[place] = (left - length, row)
    return rows


@dataclass(frozen=True)
class Group:
    """Rows of one room that a device reads at once."""

    room: int
    rows: tuple[tuple[int, ...], ...]
    """The numbers of the documents in each."""


@dataclass(frozen=True, eq=False)
class Packed:
    """The groups of a whole training run in the order in which they are read; nothing in it depends on a policy."""

    documents: Documents
    groups: tuple[Group, ...]
    passes: float
    """How often each document is read, on average."""

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

        Documents of up to `row_tokens` share rows of that room, and a group has up to `group_tokens` tokens. Every pass
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
        shape = len(group.rows), group.room
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
            # What fills a shared row up is a document of its own; behind a single one nobody looks.
            first = place if len(chosen) == 1 else 0
            positions[row, place:] = np.arange(first, first + group.room - place)
        return {name: torch.from_numpy(a) for name, a in (("ids", ids), ("positions", positions), ("labels", labels))}

    def tokens(self, first: int, last: int) -> int:
        """Tokens of the documents in groups `first` … `last` − 1."""
        lengths = self.documents.lengths
        return int(sum(lengths[list(row)].sum() for group in self.groups[first:last] for row in group.rows))

    @property
    def filled(self) -> float:
        """The share of all places that has a token of a document."""
        places = sum(group.room * len(group.rows) for group in self.groups)
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
    # Never more than the longest document, which a model has positions for.
    rooms = np.minimum(-(-lengths // _WHOLE) * _WHOLE, lengths.max())
    about = lengths[order] * rng.uniform(1.0, _MIXED, len(order))
    rows: list[int] = []
    room = 0
    for one in order[np.argsort(-about)].tolist():
        if rows and (len(rows) + 1) * max(room, int(rooms[one])) > group_tokens:
            yield Group(room, tuple((row,) for row in rows))
            rows, room = [], 0
        rows.append(one)
        room = max(room, int(rooms[one]))
    if rows:
        yield Group(room, tuple((row,) for row in rows))


def batch_of(groups: Sequence[dict[str, Tensor]]) -> dict[str, object]:
    """A group as a causal model takes it. That there is neither mask nor cache makes it see documents by position."""
    (group,) = groups
    return {
        "input_ids": group["ids"],
        "position_ids": group["positions"],
        "labels": group["labels"],
        "use_cache": False,
    }
