"""The oracle: row statistics by definition, dense and in float64. No fast path imports it."""

from __future__ import annotations

import torch

from sharpmax.stats.call import AttentionCall, hidden_by
from sharpmax.stats.statistics import RowStats, dense_stats


def reference_stats(call: AttentionCall) -> RowStats:
    """Measure the rows of the whole matrix of logits in float64; differentiable any number of times."""
    q, k = call.q.double(), call.k.double()[:, :, None]
    # A product with NaN is marked rather than computed: autograd would multiply it by the 0 of a hidden pair.
    invalid = ~q.isfinite().all(-1)[..., None] | ~k.isfinite().all(-1)[..., None, :]
    q, k = (x.masked_fill(~x.isfinite(), 0.0) for x in (q, k))
    logits = call.scale * (q @ k.transpose(-1, -2))
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
