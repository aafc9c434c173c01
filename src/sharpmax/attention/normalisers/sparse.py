"""Normalisers that give most keys exactly nothing."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from sharpmax.arrays import in_float64
from sharpmax.attention.normalisers.base import Normaliser, live_softmax, positive_whole
from sharpmax.lazy import require
from sharpmax.rows.dense import centred

__all__ = ["Entmax15", "Hard", "Sparsemax", "TopK"]

_FAR_BELOW = -4.0
"""Both maps give 0 to every key more than 2 under the maximum: lower ones need not be told apart."""


def _by_entmax(map_name: str, logits: Tensor, live: Tensor) -> Tensor:
    """A map of the `entmax` package, kept inside the range where its arithmetic is sound.

    It sums squares of all logits of the row, hidden ones too: −inf and large offsets come out as NaN, and in
    float32 the weights of one leader over 16,384 near-ties sum to 0.9991. Hence relative to the maximum, cut
    where the weight is 0 anyway, and in float64.
    """
    wide = in_float64(logits)
    live = live.to(wide.device)
    relative, _ = centred(wide, live)
    bounded = torch.where(live, relative.clamp(min=_FAR_BELOW), _FAR_BELOW)
    weights: Tensor = getattr(_entmax(map_name), map_name)(bounded, dim=-1)
    return weights.to(logits.dtype).to(logits.device)


def _entmax(map_name: str) -> Any:
    return require("entmax", "entmax", f"normaliser({map_name!r})")


class Sparsemax(Normaliser):
    """The point of the simplex nearest to the logits (Martins & Astudillo, 2016); needs the extra `entmax`.

    >>> Sparsemax()(torch.tensor([[1.0]]), torch.tensor([[1.0], [0.5], [-1.0]]))
    tensor([[0.7500, 0.2500, 0.0000]])
    """

    name: ClassVar[str] = "sparsemax"
    disperses: ClassVar[str] = (
        "no for a leader: ahead by g it keeps at least min(1, g); yes among close rivals (uniform: 2/√n)"
    )
    can_disperse: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        _entmax(self.name)  # a missing package is better said now than in the first forward pass

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Euclidean projection of the live logits onto the simplex."""
        return _by_entmax("sparsemax", logits, live)


class Entmax15(Normaliser):
    """1.5-entmax, half way between softmax and sparsemax (Peters et al., 2019); needs the extra `entmax`.

    >>> Entmax15()(torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0], [0.0]]))
    tensor([[1., 0., 0.]])
    """

    name: ClassVar[str] = "entmax15"
    disperses: ClassVar[str] = (
        "no for a leader: ahead by g it keeps at least min(1, g/2)²; yes among close rivals (ties: 1/n)"
    )
    can_disperse: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        _entmax(self.name)

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """(s/2 − τ)₊² over the live keys, τ such that they sum to 1."""
        return _by_entmax("entmax15", logits, live)


class Hard(Normaliser):
    """All weight on the largest visible logit, the first one on ties; the gradient is that of softmax.

    >>> Hard()(torch.tensor([[1.0]]), torch.tensor([[1.0], [3.0], [3.0]]))
    tensor([[0., 1., 0.]])
    """

    name: ClassVar[str] = "hard"
    disperses: ClassVar[str] = "no: one key has weight 1 whatever n is (its softmax gradient does disperse)"
    can_disperse: ClassVar[bool] = False

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """One-hot values with a straight-through gradient."""
        soft = live_softmax(logits, live)
        top = torch.where(live, logits, -math.inf).argmax(-1, keepdim=True)
        # soft − soft is exactly 0, so the values stay one-hot to the bit.
        return torch.zeros_like(soft).scatter(-1, top, 1.0) + (soft - soft.detach())


class TopK(Normaliser):
    """Softmax over the k largest visible logits, never more than k of them; the first ones on ties.

    >>> TopK(k=2)(torch.tensor([[1.0]]), torch.tensor([[5.0], [5.0], [5.0], [1.0]]))
    tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """

    name: ClassVar[str] = "top-k"
    disperses: ClassVar[str] = "no: the largest of k weights is at least 1/k whatever n is"
    can_disperse: ClassVar[bool] = False

    def __init__(self, k: int = 8) -> None:
        super().__init__()
        self.k = positive_whole("k", k)

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Softmax over the first k live keys in descending order."""
        # torch.topk does not say which of equal logits it takes; a stable sort does.
        order = torch.where(live, logits, -math.inf).sort(dim=-1, descending=True, stable=True).indices
        kept = torch.zeros_like(live).scatter(-1, order[..., : self.k], True)
        return live_softmax(logits, kept & live)

    def extra_repr(self) -> str:
        """The number of keys kept."""
        return f"k={self.k}"
