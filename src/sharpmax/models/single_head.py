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

from sharpmax.tasks.max_retrieval import CLASSES, FEATURES

__all__ = ["WIDTH", "SingleHeads"]

WIDTH = 128

_GROUP = 256


class _Stacked(nn.Module):
    """One linear layer per seed: [S, ..., in] -> [S, ..., out]."""

    def __init__(self, seeds: int, size_in: int, size_out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(seeds, size_in, size_out))
        self.bias = nn.Parameter(torch.zeros(seeds, 1, size_out)) if bias else None

    def reset(self, generators: Sequence[torch.Generator]) -> None:
        """Each seed's weights from its own generator: normal with variance 1/in (LeCun's), biases 0."""
        with torch.no_grad():
            for weight, generator in zip(self.weight, generators, strict=True):
                weight.normal_(std=len(weight) ** -0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        # The gradient of a weight is a sum over all rows. Cut into groups, a GPU forms it in many places at once.
        rows = x[0, ..., 0].numel()
        groups = rows // _GROUP if torch.is_grad_enabled() and rows % _GROUP == 0 else 1
        grouped = x.reshape(len(x) * groups, rows // groups, x.shape[-1])
        weight = self.weight[:, None].expand(-1, groups, -1, -1).flatten(0, 1)
        if self.bias is None:
            y = torch.bmm(grouped, weight)
        else:
            y = torch.baddbmm(self.bias[:, None].expand(-1, groups, -1, -1).flatten(0, 1), grouped, weight)
        return y.reshape(*x.shape[:-1], -1)


class _Mlp(nn.Module):
    def __init__(self, seeds: int, size_in: int, size_out: int, *, active_out: bool) -> None:
        super().__init__()
        self.first = _Stacked(seeds, size_in, WIDTH)
        self.second = _Stacked(seeds, WIDTH, size_out)
        self._active_out = active_out

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.gelu(self.first(x)))
        return F.gelu(y) if self._active_out else y


class SingleHeads(nn.Module):
    """The single heads of S seeds; every input and output has the seeds as its first axis."""

    def __init__(self, seeds: int) -> None:
        super().__init__()
        self.items = _Mlp(seeds, FEATURES, WIDTH, active_out=True)
        self.question = _Mlp(seeds, 1, WIDTH, active_out=True)
        self.q = _Stacked(seeds, WIDTH, WIDTH, bias=False)
        self.k = _Stacked(seeds, WIDTH, WIDTH, bias=False)
        self.v = _Stacked(seeds, WIDTH, WIDTH, bias=False)
        self.classes = _Mlp(seeds, WIDTH, CLASSES, active_out=False)

    @classmethod
    def initial(cls, seeds: Sequence[int]) -> SingleHeads:
        """Untrained heads; a seed's weights do not depend on which other seeds stand beside it."""
        heads = cls(len(seeds))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        for layer in heads.modules():
            if isinstance(layer, _Stacked):
                layer.reset(generators)
        return heads

    def features(self, items: Tensor) -> Tensor:
        """h for items [S, ..., n, 11]: [S, ..., n, 128]."""
        return self.items(items)  # type: ignore[no-any-return]

    def logits(self, features: Tensor, query: Tensor) -> Tensor:
        """s for h [S, ..., n, 128] and queries [S, ...]: [S, ..., n]."""
        q = self.q(self.question(query[..., None]))
        direction = torch.bmm(q.reshape(len(q), -1, WIDTH), self.k.weight.mT).reshape(q.shape)
        return torch.matmul(features, direction[..., None])[..., 0]

    def classify(self, pooled: Tensor) -> Tensor:
        """Class logits for Σ p_i h_i [S, ..., 128]: [S, ..., 10]."""
        return self.classes(self.v(pooled))  # type: ignore[no-any-return]

    def forward(self, items: Tensor, query: Tensor, live: Tensor) -> Tensor:
        """Class logits [S, ..., 10] of whole sets, with plain softmax."""
        h = self.features(items)
        weights = self.logits(h, query).masked_fill(~live, -torch.inf).softmax(-1)
        return self.classify(torch.matmul(weights[..., None, :], h)[..., 0, :])
