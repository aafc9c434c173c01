"""The paper's single attention head over a set, for many seeds at once.

A set of n items and one query q is read as

    h_i = ψ(item_i)    s_i = (Q ψ_q(q)) · (K h_i)    z = Σ softmax(s)_i V h_i    class logits = φ(z)

with two-layer GELU networks ψ, ψ_q and φ of width 128. There is one query per set, so K and V need not touch the items:
(Q q)·(K h_i) = (Kᵀ Q q)·h_i and Σ p_i V h_i = V Σ p_i h_i. What is left per item is ψ and two dot products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.attention.normalisers import Normaliser
from sharpmax.models.activations import Activation
from sharpmax.models.stacked import Linear, Mlp, Normalisers, initialise
from sharpmax.tasks.max_retrieval import CLASSES, FEATURES

__all__ = ["WIDTH", "SingleHeads"]

WIDTH = 128


class SingleHeads(nn.Module):
    """The single heads of S seeds; every input and output has the seeds as its first axis.

    `normalisers` take the place of softmax, `activation` that of GELU inside the feed-forward networks.
    """

    def __init__(
        self,
        seeds: int,
        *,
        width: int = WIDTH,
        activation: Activation = F.gelu,
        normalisers: Normalisers | None = None,
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

    def weights(self, features: Tensor, query: Tensor, live: Tensor) -> Tensor:
        """Attention weights of h [S, ..., n, W] for queries [S, ...]: [S, ..., n]."""
        if self.normalisers is None:
            return self.logits(features, query).masked_fill(~live, -torch.inf).softmax(-1)
        if type(self.normalisers.kind).score is Normaliser.score:
            q, k = self._direction(query), features
        else:  # its scores are no dot products, which K could be moved out of
            q, k = self._asked(query), self.k(features)
        found: Tensor = self.normalisers(q[..., None, :], k, mask=live[..., None, :], scale=1.0)
        return found[..., 0, :]

    def classify(self, pooled: Tensor) -> Tensor:
        """Class logits for Σ p_i h_i [S, ..., W]: [S, ..., 10]."""
        return self.classes(self.v(pooled))  # type: ignore[no-any-return]

    def forward(self, items: Tensor, query: Tensor, live: Tensor) -> Tensor:
        """Class logits [S, ..., 10] of whole sets."""
        h = self.features(items)
        return self.classify(torch.matmul(self.weights(h, query, live)[..., None, :], h)[..., 0, :])

    def _asked(self, query: Tensor) -> Tensor:
        return self.q(self.question(query[..., None]))  # type: ignore[no-any-return]

    def _direction(self, query: Tensor) -> Tensor:
        """Kᵀ Q q: what every h is multiplied with."""
        q = self._asked(query)
        return torch.bmm(q.reshape(len(q), -1, q.shape[-1]), self.k.weight.mT).reshape(q.shape)
