"""Max retrieval, the paper's controlled experiment: name the class of the item with the highest priority.

The answer depends on one item of the set, however large the set is, so a head has to stay sharp to give it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sharpmax.tasks.sized import Sizes, limits

__all__ = ["CLASSES", "FEATURES", "VERSION", "Sets", "draw", "seeded"]

VERSION = 1
"""Changes when the same seed no longer gives the same sets."""

CLASSES = 10

FEATURES = 1 + CLASSES
"""Numbers an item is given by: its priority and its class, one-hot."""


@dataclass(frozen=True)
class Sets:
    """Sets of items: `priority` [..., n] in 0 … 1, `label` [..., n] in 0 … 9, `query` [...], `live` [..., n].

    `query` is a random number that carries no information; `live` is False where a set is smaller than n.
    """

    priority: Tensor
    label: Tensor
    query: Tensor
    live: Tensor

    def split(self, count: int) -> list[Sets]:
        """The same sets, `count` at a time along the first axis."""
        fields = (self.priority, self.label, self.query, self.live)
        starts = range(0, len(self.query), count)
        return [Sets(*(field[start : start + count] for field in fields)) for start in starts]

    @property
    def items(self) -> Tensor:
        """What a model is given of each item: [..., n, 11]."""
        # Compared instead of `one_hot`, which on a GPU asks the host whether every class is in range.
        classes = torch.arange(CLASSES, device=self.label.device)
        one_hot = (self.label[..., None] == classes).to(self.priority.dtype)
        return torch.cat((self.priority[..., None], one_hot), dim=-1)

    @property
    def best(self) -> Tensor:
        """The position of the item with the highest priority: [...]."""
        return self.priority.masked_fill(~self.live, -1.0).argmax(-1)

    @property
    def answer(self) -> Tensor:
        """The class of that item: [...]."""
        return self.label.gather(-1, self.best[..., None])[..., 0]


def seeded(device: torch.device, *numbers: int) -> torch.Generator:
    """A generator whose stream belongs to these whole numbers, each under 2³²; trailing zeros do not count."""
    words = np.random.SeedSequence(numbers).generate_state(2)
    return torch.Generator(device).manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


def draw(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> Sets:
    """Independent sets, `shape` of them, on the generator's device.

    `sizes` is the number of items, or the least and the largest number, between which each set draws its own; sets
    are then as wide as the largest, with the rest not live.

    >>> sets = draw((3,), (5, 16), torch.Generator().manual_seed(0))
    >>> tuple(sets.priority.shape), sets.live.sum(-1).tolist()
    ((3, 16), [9, 10, 11])
    """
    least, most = limits(sizes)
    device = generator.device
    priority = torch.rand(*shape, most, generator=generator, device=device)
    label = torch.randint(CLASSES, (*shape, most), generator=generator, device=device)
    query = torch.rand(shape, generator=generator, device=device)
    size = torch.randint(least, most + 1, shape, generator=generator, device=device)
    return Sets(priority, label, query, torch.arange(most, device=device) < size[..., None])
