"""The paper's single attention head over a set, for many seeds at once and with any normaliser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.models.stacked import ACTIVATIONS, Activation, Linear, Mlp, Normalisers, initialise
from sharpmax.normalisers.base import Normaliser
from sharpmax.tasks.max_retrieval import CLASSES, FEATURES, items_and_query

WIDTH = 128


class SingleHeads(nn.Module):
    """The single heads of S seeds; every input and output has the seeds as its first axis.

    `normalisers` take the place of softmax, `activation` that of GELU inside the feed-forward networks.
    """

    def __init__(
        self, seeds: int, *, width: int = WIDTH, activation: Activation = F.gelu, normalisers: Normalisers | None = None
    ) -> None:
        super().__init__()
        self.items = Mlp(seeds, FEATURES, width, width, active_out=True, activation=activation)
        self.question = Mlp(seeds, 1, width, width, active_out=True, activation=activation)
        self.q = Linear(seeds, width, width, bias=False)
        self.k = Linear(seeds, width, width, bias=False)
        self.v = Linear(seeds, width, width, bias=False)
        self.classes = Mlp(seeds, width, width, CLASSES, activation=activation)
        self.normalisers = normalisers

    @classmethod
    def initial(cls, seeds: Sequence[int]) -> SingleHeads:
        """Untrained heads; a seed's weights do not depend on which other seeds stand beside it."""
        heads = cls(len(seeds))
        initialise(heads, seeds)
        return heads

    def features(self, items: Tensor) -> Tensor:
        """h for items [S, ..., n, 11]: [S, ..., n, W]."""
        return self.items(items)  # type: ignore[no-any-return]

    def logits(self, features: Tensor, query: Tensor) -> Tensor:
        """s for h [S, ..., n, W] and queries [S, ...]: [S, ..., n]."""
        return torch.matmul(features, self._direction(query)[..., None])[..., 0]

    def weights(self, features: Tensor, query: Tensor, visible: Tensor) -> Tensor:
        """Attention weights of h [S, ..., n, W] for queries [S, ...]: [S, ..., n]."""
        if self.normalisers is None:
            return self.logits(features, query).masked_fill(~visible, -torch.inf).softmax(-1)
        if type(self.normalisers.kind).score is Normaliser.score:
            q, k = self._direction(query), features
        else:  # its scores are no dot products, which K could be moved out of
            q, k = self._asked(query), self.k(features)
        found: Tensor = self.normalisers(q[..., None, :], k, mask=visible[..., None, :], scale=1.0)
        return found[..., 0, :]

    def classify(self, pooled: Tensor) -> Tensor:
        """Class logits for Σ p_i h_i [S, ..., W]: [S, ..., 10]."""
        return self.classes(self.v(pooled))  # type: ignore[no-any-return]

    def forward(self, items: Tensor, query: Tensor, visible: Tensor) -> Tensor:
        """Class logits [S, ..., 10] of whole sets."""
        h = self.features(items)
        return self.classify(torch.matmul(self.weights(h, query, visible)[..., None, :], h)[..., 0, :])

    def _asked(self, query: Tensor) -> Tensor:
        return self.q(self.question(query[..., None]))  # type: ignore[no-any-return]

    def _direction(self, query: Tensor) -> Tensor:
        """Kᵀ Q q: what every h is multiplied with."""
        q = self._asked(query)
        return torch.bmm(q.reshape(len(q), -1, q.shape[-1]), self.k.weight.mT).reshape(q.shape)


@dataclass(frozen=True)
class RowSummary:
    """Rows of attention: `entropy` and `top` weight [S, B, H, R] as shares of a row, and where they are largest.

    `each` [S, B, H, R] is the key that a head gives most, `first` [S, B, R] the one that all heads together do.
    """

    entropy: Tensor
    top: Tensor
    each: Tensor
    first: Tensor

    @classmethod
    def joined(cls, parts: Sequence[RowSummary]) -> RowSummary:
        """The rows of all parts, in order."""
        names = ("entropy", "top", "each", "first")
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names))

    def argmax_values(self, values: Tensor) -> Tensor:
        """The value [S, B, H, R, D] of the key that each head gives most, from values [S, B, H, L, D]."""
        index = self.each[..., None].expand(*self.each.shape, values.shape[-1])
        return values.gather(-2, index)


def summarise_rows(weights: Tensor) -> RowSummary:
    """The summary of weights [S, B, H, R, L], which need not sum to 1."""
    share = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    top = share.max(-1)
    return RowSummary(torch.special.entr(share).sum(-1), top.values, top.indices, share.mean(2).argmax(-1))


@dataclass(frozen=True)
class Reading:
    """Class logits [S, B, A, C] where something is asked, those of argmax attention in the last layer, all summaries.

    Argmax attention takes the key with the largest weight in each head. What it gets wrong is ranked wrong; what it
    gets right where the model does not is lost to dispersion.
    """

    scores: Tensor
    argmax_scores: Tensor
    layers: tuple[RowSummary, ...]


class SetHeads(SingleHeads):
    """Single heads of several seeds that read the rows of `sharpmax.tasks.max_retrieval.MAX`."""

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

    def answer(self, inputs: Tensor, visible: Tensor, asked: int = 1) -> Tensor:
        """Class logits [S, B, 1, 10] for rows [S, B, n + 1, 13]."""
        return self(*items_and_query(inputs), visible[..., :-1])[..., None, :]  # type: ignore[no-any-return]

    def read(self, inputs: Tensor, visible: Tensor, asked: int = 1) -> Reading:
        """The answer, and summaries of the attention rows."""
        items, query = items_and_query(inputs)
        h = self.features(items)
        weights = self.weights(h, query, visible[..., :-1])[:, :, None, None, :]
        summary = summarise_rows(weights)
        h = h[:, :, None]
        scores = self.classify(torch.cat((torch.matmul(weights, h), summary.argmax_values(h)), dim=2)[..., 0, :])
        return Reading(scores[:, :, :1], scores[:, :, 1:], (summary,))
