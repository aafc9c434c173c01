"""What gradients have to be, in float64: all rows of a few heads, a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sharpmax.attention.dense import softmax
from sharpmax.experiments.gpu_bench.inputs import Inputs
from sharpmax.policies import PAPER
from sharpmax.rows.dense import dense_stats

__all__ = ["Gradients", "Heads", "chosen_heads"]

_BLOCK = 1 << 25
"""Pairs of a query and a key at a time: 256 MiB of logits in float64."""


class Gradients(NamedTuple):
    """Gradients of q `[N, G, L, D]`, and of k and v `[N, L, D]`, of N key heads."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Heads:
    """N key heads and the G query heads of each, with the gradient that arrives at their outputs."""

    where: tuple[tuple[int, int], ...]
    group: int
    causal: bool
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> Gradients:
        """The part of whole gradients that belongs to these heads."""
        return Gradients(_queries(q, self.where, self.group), _keys(k, self.where), _keys(v, self.where))

    def exact(self, policy: str | None) -> Gradients:
        """Gradients of dense attention in float64."""

        def output(logits: Tensor, v: Tensor, live: Tensor) -> Tensor:
            return softmax(logits, policy=policy, mask=live) @ v

        return self._summed(output, self.upstream)

    def beta(self) -> Tensor:
        """β of every row `[N, G, L]`, in float64."""
        found = torch.empty(self.q.shape[:-1], dtype=torch.float64, device=self.q.device)
        for n, rows in self._blocks():
            found[n, :, rows] = PAPER.beta(dense_stats(*self._logits(self.q[n][:, rows].double(), self.k[n], rows)))
        return found

    def through_beta(self, weight: Tensor) -> Gradients:
        """Gradients of Σ weight·β in float64, with weights `[N, G, L]`."""
        return self._summed(lambda logits, v, live: PAPER.beta(dense_stats(logits, live)), weight)

    def _summed(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], upstream: Tensor) -> Gradients:
        q, k, v = (torch.zeros_like(x, dtype=torch.float64) for x in (self.q, self.k, self.v))
        with torch.enable_grad():
            for n, rows in self._blocks():
                inputs = [x.double().requires_grad_() for x in (self.q[n][:, rows], self.k[n], self.v[n])]
                logits, live = self._logits(inputs[0], inputs[1], rows)
                value = function(logits, inputs[2], live)
                arriving = upstream[n][:, rows].double()
                into_q, into_k, into_v = torch.autograd.grad(value, inputs, arriving, materialize_grads=True)
                q[n, :, rows] = into_q
                k[n] += into_k
                v[n] += into_v
        return Gradients(q, k, v)

    def _logits(self, q: Tensor, k: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = q @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
        live = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device)
        if self.causal:
            live = live.tril(rows.start)
        return logits, live.expand_as(logits)

    def _blocks(self) -> Iterator[tuple[int, slice]]:
        length = self.q.shape[-2]
        step = max(1, _BLOCK // (self.group * self.k.shape[-2]))
        for n in range(len(self.where)):
            for start in range(0, length, step):
                yield n, slice(start, min(length, start + step))


def chosen_heads(x: Inputs) -> Heads:
    """The first key head of the first sequence and the last of the last."""
    shape = x.shape
    where = tuple(dict.fromkeys(((0, 0), (shape.batch - 1, shape.kv_heads - 1))))
    q, k, v, upstream = (y.detach() for y in (x.q, x.k, x.v, x.upstream))
    queries = (_queries(y, where, shape.group) for y in (q, upstream))
    return Heads(where, shape.group, shape.causal, next(queries), _keys(k, where), _keys(v, where), next(queries))


def _queries(x: Tensor, where: tuple[tuple[int, int], ...], group: int) -> Tensor:
    return torch.stack([x[b, h * group : (h + 1) * group] for b, h in where])


def _keys(x: Tensor, where: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.stack([x[b, h] for b, h in where])
