"""The rows of logits behind one call of the attention interface, measured no further than asked for."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sharpmax.policies.base import Remeasure
from sharpmax.rows.api import measure, problem_of
from sharpmax.rows.layout import Problem, hidden_by
from sharpmax.rows.stats import RowStats

__all__ = ["COUNT", "Logits", "any_row", "of_heads"]

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
