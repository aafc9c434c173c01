"""Normalisers without the softmax: weights that need not sum to 1, or that have no exponential."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from sharpmax.attention.normalisers.base import Normaliser, live_softmax
from sharpmax.policies.base import check_number

__all__ = ["Linear", "Sigmoid", "SoftmaxPlusOne"]

_LEAST_LOG_FEATURE = -30.0


class Sigmoid(Normaliser):
    """σ(s + bias) for each key on its own; the bias is −ln n, n being the keys the row sees, unless given.

    Each weight is at most 1, and a row can sum to anything up to n.

    >>> Sigmoid()(torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0], [0.0]]))
    tensor([[0.2500, 0.2500, 0.2500]])
    """

    name: ClassVar[str] = "sigmoid"
    disperses: ClassVar[str] = (
        "yes with the bias −ln n: a weight falls like e^s/n, though no rival takes it; "
        "no with a fixed bias, but the rivals' sum then grows with n"
    )
    can_disperse: ClassVar[bool] = True
    sums_to_one: ClassVar[bool] = False

    def __init__(self, bias: float | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else check_number("bias", bias)

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Elementwise sigmoid."""
        if self.bias is not None:
            return torch.sigmoid(logits + self.bias)
        return torch.sigmoid(logits - live.sum(-1, keepdim=True).to(logits.dtype).log())

    def extra_repr(self) -> str:
        """The bias."""
        return f"bias={'−ln n' if self.bias is None else self.bias}"


class SoftmaxPlusOne(Normaliser):
    """exp(s)/(1 + Σ exp(s)): softmax beside one more key with logit 0 and no value, so a row can say nothing.

    >>> SoftmaxPlusOne()(torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0], [0.0]]))
    tensor([[0.2500, 0.2500, 0.2500]])
    """

    name: ClassVar[str] = "softmax-plus-one"
    disperses: ClassVar[str] = "yes: it is softmax with one more key, so no weight exceeds softmax's"
    can_disperse: ClassVar[bool] = True
    sums_to_one: ClassVar[bool] = False

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Softmax times the share that is not left to the extra key."""
        # With L = ln Σ exp(s), Σ/(1 + Σ) is σ(L): no exponential of a large number anywhere.
        total = torch.where(live, logits, -math.inf).logsumexp(-1, keepdim=True)
        return live_softmax(logits, live) * torch.sigmoid(total)


class Linear(Normaliser):
    """φ(q)·φ(k)/Σ φ(q)·φ(k) with φ = elu + 1 (Katharopoulos et al., 2020), written out as weights.

    `scale` would multiply every score of a row alike and cancels. There are no logits, so a float mask may
    only hide. Features are kept above e⁻³⁰: too little to matter beside others, but a sum to divide by.

    >>> Linear()(torch.tensor([[0.0]]), torch.tensor([[0.0], [2.0]]))
    tensor([[0.2500, 0.7500]])
    """

    name: ClassVar[str] = "linear"
    disperses: ClassVar[str] = "yes: bounded queries and keys have bounded scores, which share a total of 1"
    can_disperse: ClassVar[bool] = True
    adds_mask: ClassVar[bool] = False

    def score(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Products of positive features."""
        return _features(q) @ _features(k).mT

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Each score by the sum of the live ones."""
        scores = torch.where(live, logits, 0.0)
        return scores / scores.sum(-1, keepdim=True)


def _features(x: Tensor) -> Tensor:
    # elu(x) + 1 in two halves: expm1(x) + 1 would round features under 1e-7 to 0.
    return x.clamp(_LEAST_LOG_FEATURE, 0.0).exp() + x.clamp(min=0.0)
