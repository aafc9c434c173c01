"""What a model looked at while it answered: how sharp its attention was, and where it pointed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Look", "Reading", "look"]


@dataclass(frozen=True)
class Look:
    """Rows of attention: `entropy` and `top` weight [S, B, H, R] as shares of a row, and where they are largest.

    `each` [S, B, H, R] is the key that a head gives most, `first` [S, B, R] the one that all heads together do.
    """

    entropy: Tensor
    top: Tensor
    each: Tensor
    first: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Look]) -> Look:
        """The rows of all parts, in order."""
        names = ("entropy", "top", "each", "first")
        return cls(*(torch.cat([getattr(part, name) for part in parts], dim=-1) for name in names))

    def hard(self, values: Tensor) -> Tensor:
        """The value [S, B, H, R, D] of the key that each head gives most, from values [S, B, H, L, D]."""
        index = self.each[..., None].expand(*self.each.shape, values.shape[-1])
        return values.gather(-2, index)


def look(weights: Tensor) -> Look:
    """The look of weights [S, B, H, R, L], which need not sum to 1."""
    share = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    top = share.max(-1)
    return Look(torch.special.entr(share).sum(-1), top.values, top.indices, share.mean(2).argmax(-1))


@dataclass(frozen=True)
class Reading:
    """Class logits [S, B, A, C] where something is asked, those of hard attention in the last layer, and all looks.

    Hard attention takes the key that each head gives most, whatever weight that has: what it gets wrong is ranked
    wrong, and what it gets right where the model does not is lost to dispersion.
    """

    scores: Tensor
    hard: Tensor
    layers: tuple[Look, ...]
