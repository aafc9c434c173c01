"""The oracle: the whole matrix of logits in float64, by definition and differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from sharpmax.stats.call import AttentionCall, hidden_by
from sharpmax.stats.dense import dense_stats
from sharpmax.stats.statistics import RowStats


def reference_stats(call: AttentionCall) -> RowStats:
    """Statistics in float64 from the dense logits; memory grows with Lq · Lk."""
    q, k = call.q.double(), call.k.double()[:, :, None]
    # A product with NaN is marked rather than computed: autograd would multiply it by the 0 of a hidden pair.
    invalid = ~q.isfinite().all(-1)[..., None] | ~k.isfinite().all(-1)[..., None, :]
    logits = call.scale * (_finite(q) @ _finite(k).transpose(-1, -2))
    logits = logits.masked_fill(invalid, torch.nan)
    visible = torch.ones_like(logits, dtype=torch.bool)
    if call.mask is not None:
        hidden = hidden_by(call.mask)
        visible = visible & ~hidden
        if call.mask.is_floating_point():
            bias = call.mask.double().masked_fill(hidden, 0.0)
            logits = logits + (bias if call.gain is None else bias * call.gain[..., None])
    j = torch.arange(call.keys, device=q.device)
    if call.offset is not None:
        i = torch.arange(q.shape[-2], device=q.device)[:, None]
        visible = visible & (j <= i + call.offset)
    if call.spans is not None:
        low, high = call.spans[:, None, None, :, :, None].unbind(3)
        visible = visible & (low <= j) & (j < high)
    return dense_stats(logits, visible).map(lambda part: part.reshape(call.rows))


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(~x.isfinite(), 0.0)
