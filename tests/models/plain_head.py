"""The paper's head as it is written down: one seed, ordinary linear layers, K and V applied to every item."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


class PlainHead:
    """One seed of stacked weights; gradients flow back into the stack."""

    def __init__(self, tensors: Mapping[str, Tensor], seed: int, dtype: torch.dtype) -> None:
        self._tensors = {name: tensor[seed].to(dtype) for name, tensor in tensors.items()}

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self._tensors.get(f"{name}.bias")
        return F.linear(x, self._tensors[f"{name}.weight"].T, None if bias is None else bias[0])

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        return self._linear(f"{name}.second", F.gelu(self._linear(f"{name}.first", x)))

    def features(self, items: Tensor) -> Tensor:
        """h_i = ψ(item_i): [..., n, 11] -> [..., n, 128]."""
        return F.gelu(self._mlp("items", items))

    def logits(self, features: Tensor, query: Tensor) -> Tensor:
        """s_i = (Q ψ_q(query)) · (K h_i): [..., n]."""
        q = self._linear("q", F.gelu(self._mlp("question", query[..., None])))
        return (q[..., None, :] * self._linear("k", features)).sum(-1)

    def classify(self, weights: Tensor, features: Tensor) -> Tensor:
        """φ(Σ p_i V h_i): [..., 10]."""
        return self._mlp("classes", (weights[..., None] * self._linear("v", features)).sum(-2))

    def scores(self, items: Tensor, query: Tensor, visible: Tensor) -> Tensor:
        """Class logits with plain softmax."""
        h = self.features(items)
        return self.classify(self.logits(h, query).masked_fill(~visible, -torch.inf).softmax(-1), h)
