"""The oracle: the whole matrix of logits in float64, by definition and differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpmax.stats.call import Problem, hidden_by
from sharpmax.stats.dense import dense_stats
from sharpmax.stats.statistics import RowStats


def reference_stats(problem: Problem) -> RowStats:
    """Statistics in float64 from the dense logits; memory grows with Lq · Lk."""
    q, k = problem.q.double(), problem.k.double()[:, :, None]
    # A product with NaN is marked rather than computed: autograd would multiply it by the 0 of a hidden pair.
    broken = ~q.isfinite().all(-1)[..., None] | ~k.isfinite().all(-1)[..., None, :]
    logits = problem.scale * (_finite(q) @ _finite(k).transpose(-1, -2))
    logits = logits.masked_fill(broken, torch.nan)
    live = torch.ones_like(logits, dtype=torch.bool)
    if problem.mask is not None:
        hidden = hidden_by(problem.mask)
        live = live & ~hidden
        if problem.mask.is_floating_point():
            bias = problem.mask.double().masked_fill(hidden, 0.0)
            logits = logits + (bias if problem.gain is None else bias * problem.gain[..., None])
    j = torch.arange(problem.keys, device=q.device)
    if problem.offset is not None:
        i = torch.arange(q.shape[-2], device=q.device)[:, None]
        live = live & (j <= i + problem.offset)
    if problem.spans is not None:
        low, high = problem.spans[:, None, None, :, :, None].unbind(3)
        live = live & (low <= j) & (j < high)
    return dense_stats(logits, live).map(lambda part: part.reshape(problem.rows))


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), 0.0)
