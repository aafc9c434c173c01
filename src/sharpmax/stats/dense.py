"""Row statistics of logits that are already there, exact to the last digits of their dtype."""

from __future__ import annotations

from sharpmax.arrays import Array, ops_for
from sharpmax.stats.statistics import RowStats


def centred(logits: Array, visible: Array) -> tuple[Array, Array]:
    """Logits minus their row's largest visible one (0 where masked), and that maximum, −inf without visible keys.

    Masked logits are replaced before any arithmetic, so NaN, ±inf and finfo.min there reach neither the result
    nor its gradient.
    """
    xp = ops_for(logits)
    if logits.shape[-1] == 0:
        return logits, xp.sum(logits) - xp.inf
    peak = xp.stop_gradient(xp.max(xp.where(visible, logits, -xp.inf)))
    base = xp.where(xp.isnan(peak) | (peak > -xp.inf), peak, 0.0)[..., None]
    # Two logits may lie further apart than their dtype reaches, and −inf would meet a weight of 0 in the gradient.
    return xp.at_least(xp.where(visible, logits, base) - base, xp.lowest(logits.dtype)), peak


def dense_stats(logits: Array, visible: Array) -> RowStats:
    """Statistics of each row (last axis) of `logits` over the entries where `visible` (same shape) is True."""
    xp = ops_for(logits)
    count = xp.sum(visible)
    x, peak = centred(logits, visible)
    # The weight of anything this far down is 0 in every dtype; left where it is, its square could overflow.
    x = xp.at_least(x, -1000.0)
    weight = xp.where(visible, xp.exp(x), 0.0)
    if logits.shape[-1] == 0:
        top, rest = visible, xp.sum(weight)
    else:
        # The top item's own weight is 1 exactly. Summed apart, as expm1, it leaves ln(1 + rest) accurate
        # however small the rest is, so the entropy of an almost one-hot row keeps its relative accuracy.
        top = (xp.positions(x.shape[-1], x) == xp.argmax(xp.where(visible, x, -xp.inf))[..., None]) & visible
        rest = xp.sum(xp.where(top, xp.expm1(x), weight))
    share = weight / (1.0 + rest)[..., None]
    shortfall = -xp.sum(share * x)
    var = xp.sum(share * (x + shortfall[..., None]) ** 2)
    top_weight = xp.sum(xp.where(top, share, 0.0))
    return RowStats.anchored(count, peak, xp.log1p(rest), shortfall, max=peak, var=var, top=top_weight)
