"""Documents packed into rows, none of which sees another.

Attention costs the square of a row, so that one long document must not make every row long: a long one has a row of
a room that suits it, short ones fill it up and share short rows, and rows of one room are read together.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharpmax.experiments.clrs.documents import Documents

__all__ = ["IGNORED", "Group", "Packed", "batch_of", "pack", "rooms"]

IGNORED = -100
"""The label of a token that nobody has to say."""

_OPEN = 32
"""Rows that are being filled at the same time."""


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


def rooms(least: int, longest: int) -> list[int]:
    """Rooms that double from `least` on until the longest document has one.

    >>> rooms(512, 1500), rooms(512, 100)
    ([512, 1024, 2048], [512])
    """
    found = [least]
    while found[-1] < longest:
        found.append(2 * found[-1])
    return found


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
        least: int,
        *,
        group_tokens: int,
        together: int,
        steps: int | None,
        epochs: float,
        seed: int,
    ) -> Packed:
        """Groups for `steps` steps of `together` groups, or without `steps` for `epochs` passes over the documents.

        The smallest room is `least`, and a group has `group_tokens` tokens. Every pass is shuffled and packed anew.
        """
        groups: list[Group] = []
        for one in _passes(documents, least, group_tokens, seed):
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
            # What fills the row up is a document of its own.
            positions[row, place:] = np.arange(group.room - place)
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


def _passes(documents: Documents, least: int, group_tokens: int, seed: int) -> Iterator[list[Group]]:
    lengths = documents.lengths
    sizes = rooms(least, int(lengths.max()))
    suits = np.searchsorted(sizes, lengths)
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        order = rng.permutation(len(documents))
        packed = {room: pack(lengths, order[suits[order] == i], room) for i, room in enumerate(sizes) if i}
        short = deque(order[suits[order] == 0].tolist())
        long = [(room, row) for room, rows in packed.items() for row in rows]
        for place in rng.permutation(len(long)):
            room, row = long[place]
            _fill(room, row, short, lengths)
        packed[least] = pack(lengths, list(short), least)
        groups = []
        for room, rows in packed.items():
            many = max(1, group_tokens // room)
            parts = (rows[first : first + many] for first in range(0, len(rows), many))
            groups += [Group(room, tuple(map(tuple, part))) for part in parts]
        yield [groups[place] for place in rng.permutation(len(groups))]


def _fill(room: int, row: list[int], short: deque[int], lengths: np.ndarray) -> None:
    """Put short documents behind the long one of a row, as many as there is room for."""
    left = room - int(lengths[row].sum())
    while short and lengths[short[0]] <= left:
        left -= int(lengths[short[0]])
        row.append(short.popleft())


def batch_of(groups: Sequence[dict[str, Tensor]]) -> dict[str, object]:
    """A group as a causal model takes it. That there is neither mask nor cache makes it see documents by position."""
    (group,) = groups
    return {
        "input_ids": group["ids"],
        "position_ids": group["positions"],
        "labels": group["labels"],
        "use_cache": False,
    }
