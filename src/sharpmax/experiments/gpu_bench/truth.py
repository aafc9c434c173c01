"""What the outputs have to be, in float64: some rows of every head, never the whole matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sharpmax.attention.dense import softmax
from sharpmax.experiments.gpu_bench.inputs import Inputs
from sharpmax.policies import PAPER
from sharpmax.rows.dense import dense_stats

__all__ = ["Rows", "distance", "rows_in_float64", "spread"]


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
