"""Float64 references for outputs and gradients, a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sharpmax.experiments.benchmarks.gpu_inputs import Inputs
from sharpmax.ops.softmax import softmax
from sharpmax.policies.polynomial import PAPER
from sharpmax.stats.dense import dense_stats


@dataclass(frozen=True)
class Rows:
    """Sampled rows of every head: their statistics `[B, H, S]`, and plain and sharp outputs `[B, H, S, D]`."""

    rows: Tensor
    stats: dict[str, Tensor]
    beta: Tensor
    plain: Tensor
    sharp: Tensor


def rows_in_float64(x: Inputs, rows: Tensor) -> Rows:
    """Dense attention of the rows, one sequence at a time."""
    each = [_sequence(x, rows, b) for b in range(x.shape.batch)]
    names = each[0].keys()
    found = {name: torch.stack([one[name] for one in each]) for name in names}
    beta, plain, sharp = (found.pop(name) for name in ("beta", "plain", "sharp"))
    return Rows(rows, found, beta, plain, sharp)


def _sequence(x: Inputs, rows: Tensor, b: int) -> dict[str, Tensor]:
    shape = x.shape
    q = x.q[b][:, rows].double().view(shape.kv_heads, shape.group * len(rows), shape.width)
    logits = (q @ x.k[b].double().transpose(-1, -2) / math.sqrt(shape.width)).view(shape.heads, len(rows), shape.keys)
    seen = torch.ones(len(rows), shape.keys, dtype=torch.bool, device=rows.device)
    if shape.causal:
        seen = torch.arange(shape.keys, device=rows.device) <= rows[:, None]
    live = seen.expand_as(logits)
    stats = dense_stats(logits, live)
    v = x.v[b].double()

    def output(policy: str | None) -> Tensor:
        weights = softmax(logits, policy=policy, mask=live)
        return (weights.view(shape.kv_heads, -1, shape.keys) @ v).view(shape.heads, len(rows), shape.width)

    return {
        "entropy": stats.entropy,
        "lse": stats.lse,
        "mean": stats.mean,
        "var": stats.var,
        "beta": PAPER.beta(stats),
        "plain": output(None),
        "sharp": output("paper"),
    }


def distance(given: Tensor, wanted: Tensor) -> float:
    """Largest error, relative where the wanted value exceeds 1; NaN, which no limit allows, if any is NaN."""
    return float(((given.double() - wanted).abs() / wanted.abs().clamp_min(1.0)).max())


def spread(name: str, given: Tensor, wanted: Tensor) -> dict[str, float]:
    """Largest and root mean square error of a tensor, under its name."""
    error = given.double() - wanted
    return {name: float(error.abs().max()), f"{name} rms": float(error.square().mean().sqrt())}


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
