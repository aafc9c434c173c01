"""Rows whose logits have to be computed anyway: those of a single query, and those that are capped."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpmax.hf.logits import any_row, of_heads
from sharpmax.policies.base import Remeasure
from sharpmax.rows.layout import as_beta, floats_at_least_32, hidden_by
from sharpmax.rows.stats import RowStats

__all__ = ["DenseLogits", "single_query_attention", "single_query_logits"]


@dataclass(frozen=True, eq=False)
class DenseLogits:
    """Logits `[B, H, Lq, Lk]`, with what a float mask adds to them, and which are hidden (None: none of them)."""

    values: Tensor
    hidden: Tensor | None

    @classmethod
    def masked(cls, values: Tensor, mask: Tensor | None) -> DenseLogits:
        """Logits under a mask as transformers makes it: boolean (True = visible) or float (added)."""
        if mask is None:
            return cls(values, None)
        hidden = hidden_by(mask)
        return cls(values + mask.masked_fill(hidden, 0.0) if mask.is_floating_point() else values, hidden)

    @property
    def rows(self) -> torch.Size:
        """The shape of the rows, `[B, H, Lq]`."""
        return self.values.shape[:-1]

    @property
    def like(self) -> Tensor:
        """A tensor of the device and dtype of the logits."""
        return self.values

    @functools.cached_property
    def top(self) -> Tensor:
        """The largest visible logit of each row; carries no gradient."""
        return self.scaled(None).detach().amax(-1)

    def scaled(self, beta: Tensor | None) -> Tensor:
        """The logits (β None), or β times their distance from the top; hidden ones at what no visible one reaches.

        Distances are at most 0, so no β can make them overflow.
        """
        x = self.values
        if beta is not None:
            x = (x - self.top[..., None]) * as_beta(beta, x.dtype)[..., None].to(x.dtype)
        return x if self.hidden is None else x.masked_fill(self.hidden, torch.finfo(x.dtype).min / 8)

    def statistics(self, needs: frozenset[str], heads: Tensor | None) -> tuple[RowStats, Remeasure | None]:
        """As `sharpmax.hf.logits.Logits.statistics`."""
        if not needs:
            return any_row(self.values.device), None
        hidden = None if self.hidden is None else of_heads(self.hidden, heads)
        chosen = self if heads is None else DenseLogits(of_heads(self.values, heads), hidden)
        return chosen._measure(None, "var" in needs), lambda beta: chosen._measure(beta, "var" in needs)

    def _measure(self, beta: Tensor | None, with_var: bool) -> RowStats:
        """A handful of operations, because a generated token can afford no more."""
        x = self.scaled(beta)
        x = x.to(floats_at_least_32(x.dtype))
        top = self.top.to(x.dtype)
        if beta is None:
            x = x - top[..., None]
        else:
            x, top = x.clamp_min(-1e4), top * as_beta(beta, x.dtype)
        if self.hidden is None:
            count = x.new_full((1, 1, 1), x.shape[-1], dtype=torch.int64)
        else:
            x = x.clamp_min(-1e4)  # what is hidden weighs nothing, and can be squared
            count = (~self.hidden).expand(*self.hidden.shape[:-1], x.shape[-1]).sum(-1)
        weight = x.exp()
        mass = weight.sum(-1)
        shortfall = -(weight * x).sum(-1) / mass
        var = (weight * (x + shortfall[..., None]).square()).sum(-1) / mass if with_var else None
        return RowStats.anchored(count.expand(top.shape), top, mass.log(), shortfall, max=top, var=var)


def single_query_logits(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> DenseLogits:
    """The logits of one query `[B, H, 1, D]` per head; each key is read once for all heads that share it."""
    batch, key_heads, keys, width = key.shape
    q = query * (width**-0.5 if scaling is None else scaling)
    s = torch.bmm(q.reshape(batch * key_heads, -1, width), key.flatten(0, 1).transpose(1, 2))
    return DenseLogits.masked(s.view(batch, -1, 1, keys), mask)


def single_query_attention(logits: DenseLogits, beta: Tensor, value: Tensor) -> Tensor:
    """The output `[B, 1, H, Dv]` from logits that were measured before: reading every key twice would cost more."""
    batch, key_heads, keys, width = value.shape
    weights = logits.scaled(beta).softmax(-1)
    return torch.bmm(weights.view(batch * key_heads, -1, keys), value.flatten(0, 1)).view(batch, 1, -1, width)
