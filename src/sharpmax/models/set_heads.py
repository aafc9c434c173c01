"""The paper's single head with any normaliser, on rows of numbers: a set and one question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sharpmax.models.activations import ACTIVATIONS
from sharpmax.models.looking import Reading, look
from sharpmax.models.single_head import WIDTH, SingleHeads
from sharpmax.models.stacked import Normalisers, initialise
from sharpmax.tasks.sets import items_and_query

__all__ = ["SetHeads"]


class SetHeads(SingleHeads):
    """Single heads of several seeds that read the rows of `sharpmax.tasks.sets.MAX`."""

    def __init__(
        self,
        seeds: Sequence[int],
        normaliser: str,
        options: Mapping[str, Any],
        *,
        width: int = WIDTH,
        feed_forward: str = "gelu",
    ) -> None:
        normalisers = Normalisers(seeds, normaliser, options)
        super().__init__(len(seeds), width=width, activation=ACTIVATIONS[feed_forward], normalisers=normalisers)
        initialise(self, seeds)

    def answer(self, inputs: Tensor, live: Tensor, asked: int = 1) -> Tensor:
        """Class logits [S, B, 1, 10] for rows [S, B, n + 1, 13]."""
        return self(*items_and_query(inputs), live[..., :-1])[..., None, :]  # type: ignore[no-any-return]

    def read(self, inputs: Tensor, live: Tensor, asked: int = 1) -> Reading:
        """The answer and what was looked at."""
        items, query = items_and_query(inputs)
        h = self.features(items)
        weights = self.weights(h, query, live[..., :-1])[:, :, None, None, :]
        seen = look(weights)
        h = h[:, :, None]
        scores = self.classify(torch.cat((torch.matmul(weights, h), seen.hard(h)), dim=2)[..., 0, :])
        return Reading(scores[:, :, :1], scores[:, :, 1:], (seen,))
