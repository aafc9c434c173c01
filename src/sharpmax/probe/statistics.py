"""What one row of attention says about itself: how spread out it is, and where it rests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.rows.layout import floats_at_least_32

if TYPE_CHECKING:
    from sharpmax.hf.dense import DenseLogits

__all__ = ["LOCAL", "STATISTICS", "row_statistics"]

STATISTICS = ("entropy", "top", "sink", "spread", "local", "count")
"""Names of what is measured of a row, in nats, weights, logits and numbers of keys."""

LOCAL = 16
"""How many of the last visible keys count as near."""

_FAR = -1e4


def row_statistics(logits: DenseLogits) -> dict[str, Tensor]:
    """Statistics of every row of logits `[B, H, R, Lk]`, each `[B, H, R]` in float32 (see `STATISTICS`).

    entropy of the softmax in nats; top, its largest weight; sink, the weight of the first visible key; spread, the
    largest minus the smallest visible logit; local, the weight of the last `LOCAL` visible keys; count, how many keys
    are visible. A row without any gives zeros, and NaN where a row sees one makes all but its count NaN.
    """
    values, hidden = logits.values, logits.hidden
    if values.numel() == 0:
        return {name: values.new_zeros(values.shape[:-1], dtype=torch.float32) for name in STATISTICS}
    x = logits.scaled(None).to(floats_at_least_32(values.dtype))
    peak = x.amax(-1)
    weights = x.softmax(-1)
    top = weights.amax(-1)
    # −Σ p·ln p, for ln p = x − peak + ln top: two sums that nothing cancels in. No weight is left as far down as that.
    entropy = -(weights * (x - peak[..., None]).clamp_min(_FAR)).sum(-1) - top.log()
    if hidden is None:
        count = peak.new_full(peak.shape, x.shape[-1])
        # A view would keep all of the weights alive for as long as somebody keeps the statistics.
        low, sink, local = x.amin(-1), weights[..., 0].contiguous(), weights[..., -LOCAL:].sum(-1)
    else:
        visible = ~hidden.expand(*hidden.shape[:-1], x.shape[-1])
        count = visible.sum(-1).to(x.dtype).expand(peak.shape)
        low = x.masked_fill(hidden, torch.inf).amin(-1)
        first = visible.to(torch.uint8).argmax(-1, keepdim=True)
        sink = weights.gather(-1, first.expand(*peak.shape, 1)).squeeze(-1)
        # Counted from the end, over the mask's own shape: most masks are shared by all heads.
        near = visible.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1) <= LOCAL
        local = (weights * near).sum(-1)
    found = {
        # A sum of roundings may exceed what so many keys can have.
        "entropy": torch.minimum(entropy.clamp_min(0.0), count.clamp_min(1.0).log()),
        "top": top,
        "sink": sink,
        "spread": peak - low,
        "local": local,
        "count": count,
    }
    if hidden is not None:
        found = {name: value.masked_fill(count == 0, 0.0) for name, value in found.items()}
    return {name: value.to(torch.float32) for name, value in found.items()}
