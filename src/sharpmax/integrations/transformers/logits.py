"""The logits behind one attention call of a transformers model, and their row statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.ops.attention import scaled_mask
from sharpmax.policies.base import Remeasure
from sharpmax.stats.call import Problem, as_beta, floats_at_least_32, hidden_by, room_for
from sharpmax.stats.dispatch import measure, problem_of
from sharpmax.stats.statistics import RowStats

COUNT = frozenset({"count"})
"""What a mask alone tells of a row."""


@dataclass(frozen=True, eq=False)
class Logits:
    """Logits scaling·q·kᵀ + mask: q `[B, H, Lq, D]`, k `[B, Hkv, Lk, D]`, and what transformers hands over with them.

    `mask` is None, boolean (True = visible) or float (added), `[B or 1, H or 1, Lq, Lk]`. `causal` holds without a
    mask only, aligned upper-left: with a static cache the first Lq of the Lk keys are the prompt, and the rest is
    not written yet.
    """

    q: Tensor
    k: Tensor
    mask: Tensor | None
    causal: bool
    scaling: float | None

    @property
    def rows(self) -> torch.Size:
        """The shape of the rows, `[B, H, Lq]`."""
        return self.q.shape[:-1]

    @property
    def like(self) -> Tensor:
        """A tensor of the device and dtype of the logits."""
        return self.q

    def statistics(self, needs: frozenset[str], heads: Tensor | None) -> tuple[RowStats, Remeasure | None]:
        """At least the statistics in `needs` of some heads (None: all), and a way to measure them at another β."""
        if not needs:
            return any_row(self.q.device), None
        if needs <= COUNT:
            return RowStats.anchored(of_heads(self.counts(), heads)), None
        problem = self._chosen(heads).problem()
        return measure(problem, "auto", needs), lambda beta: measure(problem.scaled(beta), "auto", needs)

    def counts(self) -> Tensor:
        """Visible keys per row, broadcasting to `[B, H, Lq]`; without a mask memory is O(Lq)."""
        rows, keys = self.q.shape[-2], self.k.shape[-2]
        if self.mask is not None:
            visible = self.mask if self.mask.dtype == torch.bool else ~hidden_by(self.mask)
            return visible.sum(-1)
        if self.causal:
            return torch.arange(1, rows + 1, device=self.q.device).clamp_max(keys).view(1, 1, rows)
        return self.q.new_full((1, 1, 1), keys, dtype=torch.int64)

    def _chosen(self, heads: Tensor | None) -> Logits:
        """The same rows of some heads alone, each with the keys it reads."""
        if heads is None:
            return self
        group = self.q.shape[1] // self.k.shape[1]
        mask = None if self.mask is None else of_heads(self.mask, heads)
        return replace(self, q=self.q[:, heads], k=self.k[:, heads // group], mask=mask)

    def problem(self) -> Problem:
        """The rows in canonical form."""
        k = self.k
        if self.causal and k.shape[-2] > self.q.shape[-2]:
            k = k[:, :, : self.q.shape[-2]]
        return problem_of(self.q, k, self.mask, "upper-left" if self.causal else None, self.scaling, enable_gqa=True)


def any_row(device: torch.device) -> RowStats:
    """One row of two keys, for rules that read nothing of it."""
    return _any_row(device) if not torch.compiler.is_compiling() else RowStats.anchored(_two(device))


@functools.cache
def _any_row(device: torch.device) -> RowStats:
    """Made once: a generated token can afford little."""
    with torch.inference_mode(False):
        return RowStats.anchored(_two(device))


def _two(device: torch.device) -> Tensor:
    return torch.full((1, 1), 2, dtype=torch.int64, device=device)


def of_heads(array: Tensor, heads: Tensor | None) -> Tensor:
    """Some heads of an array `[B, H, ...]`, or all of one that broadcasts along them."""
    return array if heads is None or array.shape[1] == 1 else array.index_select(1, heads)


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
        """As `sharpmax.integrations.transformers.logits.Logits.statistics`."""
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


def capped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    beta_of: Callable[[DenseLogits], Tensor],
    *,
    softcap: float,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The eager attention of Gemma 2, step by step, with β between the cap and the mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    s = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * scale / softcap) * softcap
    beta = beta_of(DenseLogits.masked(s, attention_mask))
    s = s * beta.clamp_max(room_for(s.dtype) / softcap)[..., None].to(s.dtype)
    mask = scaled_mask(attention_mask, beta)
    if mask is not None:
        s = s + mask
    weights = F.softmax(s, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
