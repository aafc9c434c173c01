"""Documents packed into rows of one length, none of which sees another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharpmax.experiments.clrs.documents import Documents

__all__ = ["IGNORED", "Packed", "batch_of", "pack"]

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


@dataclass(frozen=True, eq=False)
class Packed:
    """The rows of a whole training run in the order in which they are read; nothing in it depends on a policy."""

    documents: Documents
    rows: tuple[tuple[int, ...], ...]
    room: int
    passes: float
    """How often each document is read, on average."""

    @classmethod
    def of(
        cls, documents: Documents, room: int, *, together: int, steps: int | None, epochs: float, seed: int
    ) -> Packed:
        """Rows for `steps` steps of `together` rows each, or without `steps` for `epochs` passes over the documents.

        Every pass is shuffled and packed anew.
        """
        rows: list[list[int]] = []
        for number, done in enumerate(_passes(documents, room, seed)):
            if steps is None and number == 0:
                steps = max(1, round(len(done) * epochs / together))
            rows += done
            if steps is not None and len(rows) >= steps * together:
                break
        assert steps is not None
        rows = rows[: steps * together]
        used = sum(len(row) for row in rows)
        return cls(documents, tuple(map(tuple, rows)), room, used / len(documents))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """One row: tokens, positions that start anew with every document, and labels of the answers alone."""
        ids = np.zeros(self.room, dtype=np.int64)
        positions = np.zeros(self.room, dtype=np.int64)
        labels = np.full(self.room, IGNORED, dtype=np.int64)
        place = 0
        begins, starts = self.documents.begins, self.documents.starts
        for one in self.rows[number]:
            document = self.documents.ids[begins[one] : begins[one + 1]]
            here, start = slice(place, place + len(document)), place + int(starts[one])
            ids[here], positions[here] = document, np.arange(len(document))
            labels[start : here.stop] = ids[start : here.stop]
            place = here.stop
        # What fills the row up is a document of its own.
        positions[place:] = np.arange(self.room - place)
        return {name: torch.from_numpy(a) for name, a in (("ids", ids), ("positions", positions), ("labels", labels))}

    def tokens(self, first: int, last: int) -> int:
        """Tokens of the documents in rows `first` … `last` − 1."""
        lengths = self.documents.lengths
        return int(sum(lengths[one] for row in self.rows[first:last] for one in row))


def _passes(documents: Documents, room: int, seed: int) -> Iterator[list[list[int]]]:
    number = 0
    while True:
        order = np.random.default_rng([seed, number]).permutation(len(documents))
        yield pack(documents.lengths, order, room)
        number += 1


def batch_of(rows: Sequence[dict[str, Tensor]]) -> dict[str, object]:
    """Rows as a causal model takes them. That there is neither mask nor cache makes it see documents by position."""
    return {
        "input_ids": torch.stack([row["ids"] for row in rows]),
        "position_ids": torch.stack([row["positions"] for row in rows]),
        "labels": torch.stack([row["labels"] for row in rows]),
        "use_cache": False,
    }
