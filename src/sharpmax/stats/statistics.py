"""`RowStats`: statistics of rows of attention logits, and how dense logits give them."""

from __future__ import annotations

from typing import Any

from sharpmax.arrays import Array, ops_for
from sharpmax.errors import NotMeasuredError, reject_type

FIELDS = ("count", "max", "lse", "mean", "var")
"""The statistics of a row. Everything else derives from them."""

_PARTS = ("count", "_anchor", "_log_mass", "_shortfall", "_max", "_var", "_top")


class RowStats:
    """Statistics of softmax rows: visible keys `count`, and `max`, `lse`, `mean`, `var` of their scaled logits.

    Every field has the shape of the rows, `[..., H, Lq]`; `mean` and `var` are under the softmax. A row that
    sees no key has count 0, max = lse = mean = −inf, var = entropy = 0, and is the identity of `merge`.

    Internally a row is stored relative to an anchor (its maximum, if measured): `log_mass = lse − anchor` and
    `shortfall = anchor − mean`. Both lie between 0 and ln n however large the logits are, so their sum, the entropy,
    loses no digits to cancellation. lse, mean, var and entropy carry gradients; the anchor and the maximum do not. The
    top weight carries one if it was computed from dense logits (`top`).

    Reading a statistic that was not measured raises `NotMeasuredError`. (An attention kernel with v := k, for example,
    gives neither max nor var.)

    >>> import torch
    >>> RowStats(count=torch.tensor([2]), max=torch.tensor([0.0]), lse=torch.tensor([0.6931472]),
    ...          mean=torch.tensor([0.0]), var=torch.tensor([0.0])).entropy
    tensor([0.6931])
    """

    __slots__ = _PARTS

    count: Array
    _anchor: Array  # this and the following are None where not measured
    _log_mass: Array
    _shortfall: Array
    _max: Array
    _var: Array
    _top: Array

    def __init__(self, count: Array, max: Array, lse: Array, mean: Array, var: Array) -> None:
        xp = ops_for(lse)
        empty = count == 0
        log_mass = xp.where(empty, 0.0, lse - xp.where(empty, 0.0, max))
        shortfall = xp.where(empty, 0.0, xp.where(empty, 0.0, max) - mean)
        self._set(count, max, log_mass, shortfall, max, var)

    @classmethod
    def anchored(
        cls,
        count: Array,
        anchor: Array | None = None,
        log_mass: Array | None = None,
        shortfall: Array | None = None,
        *,
        max: Array | None = None,
        var: Array | None = None,
        top: Array | None = None,
    ) -> RowStats:
        """Rows relative to an anchor: lse = anchor + log_mass, mean = anchor − shortfall.

        `top` is the largest weight with its gradient. Without it the weight is computed from the others as a constant.
        """
        self = object.__new__(cls)
        self._set(count, anchor, log_mass, shortfall, max, var, top)
        return self

    def _set(self, count: Any, anchor: Any, log_mass: Any, shortfall: Any, max: Any, var: Any, top: Any = None) -> None:
        for name, value in zip(_PARTS, (count, anchor, log_mass, shortfall, max, var, top), strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"RowStats is immutable: {name!r} cannot be set")

    def __reduce__(self) -> tuple[Any, ...]:
        # Copying sets attributes one by one by default, which this class does not allow.
        arrays, measured = self.flatten()
        return RowStats.unflatten, (measured, arrays)

    def _measured(self, value: Array | None, name: str) -> Array:
        if value is None:
            raise NotMeasuredError(
                f"{name!r} was not measured for these rows; measured: {', '.join(self.measured)}; "
                "use impl='streaming', which measures every statistic"
            )
        return value

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of `FIELDS` that these rows carry."""
        have = {"count": self.count, "max": self._max, "lse": self._anchor, "mean": self._shortfall, "var": self._var}
        return tuple(name for name in FIELDS if have[name] is not None)

    @property
    def max(self) -> Array:
        """The largest visible logit; carries no gradient."""
        return self._measured(self._max, "max")

    @property
    def lse(self) -> Array:
        """ln Σ exp(s) over the visible keys."""
        return self._measured(self._anchor, "lse") + self._log_mass

    @property
    def mean(self) -> Array:
        """E[s] under the softmax."""
        return self._measured(self._anchor, "mean") - self._measured(self._shortfall, "mean")

    @property
    def var(self) -> Array:
        """Var[s] under the softmax; −var is the slope of entropy against ln β at β = 1."""
        return self._measured(self._var, "var")

    @property
    def entropy(self) -> Array:
        """Shannon entropy of the softmax in nats, between 0 and ln(count)."""
        raw = self._measured(self._log_mass, "entropy") + self._measured(self._shortfall, "entropy")
        xp = ops_for(raw)
        ceiling = xp.log(xp.cast(xp.at_least(self.count, 1), raw.dtype))
        return xp.at_most(xp.at_least(raw, 0.0), ceiling)

    @property
    def top_weight(self) -> Array:
        """The largest softmax weight of the row; 0 for a row without keys.

        It carries a gradient if it was computed from dense logits (`softmax`, JAX, impl='reference').
        """
        self._measured(self._max, "max")
        if self._top is not None:
            return self._top
        xp = ops_for(self._log_mass)
        log_mass = xp.stop_gradient(self._log_mass)
        shift = xp.where(self.count == 0, 0.0, xp.stop_gradient(self._max - self._anchor))
        return xp.where(self.count == 0, 0.0, xp.exp(shift - log_mass))

    def merge(self, other: RowStats) -> RowStats:
        """Statistics of the rows over the keys of both; associative and commutative to rounding.

        >>> import torch, sharpmax as sm
        >>> q, k = torch.randn(1, 4, 8), torch.randn(1, 10, 8)
        >>> parts = sm.row_stats(q, k[:, :3]).merge(sm.row_stats(q, k[:, 3:]))
        >>> torch.allclose(parts.entropy, sm.row_stats(q, k).entropy, atol=1e-6)
        True
        """
        if not isinstance(other, RowStats):
            reject_type("other", type(other).__name__, "RowStats")
        count = self.count + other.count
        if self._anchor is None or other._anchor is None:
            return RowStats.anchored(count)
        xp = ops_for(self._anchor)
        anchor = xp.where(self._anchor < other._anchor, other._anchor, self._anchor)
        # NaN in either part must reach the result, and comparisons with NaN are False.
        anchor = xp.where(xp.isnan(other._anchor), other._anchor, anchor)
        lead, other_lead = self._lead(anchor), other._lead(anchor)
        mass, other_mass = xp.exp(lead), xp.exp(other_lead)
        total = mass + other_mass
        empty = count == 0
        total = xp.where(empty, 1.0, total)
        w, v = mass / total, other_mass / total
        log_mass = xp.where(empty, 0.0, xp.log(total))
        drop, other_drop = self._drop(anchor), other._drop(anchor)
        shortfall = w * drop + v * other_drop
        # Each weight multiplies the gap first: gap² may overflow, and 0 · inf is NaN.
        gap = drop - other_drop
        both_max = self._max is not None and other._max is not None
        both_var = self._var is not None and other._var is not None
        return RowStats.anchored(
            count,
            anchor,
            log_mass,
            shortfall,
            max=xp.where(xp.isnan(other._max) | (self._max < other._max), other._max, self._max) if both_max else None,
            var=w * self._var + v * other._var + (w * gap) * (v * gap) if both_var else None,
        )

    def _lead(self, anchor: Array) -> Array:
        """lse relative to another anchor; −inf for a row without keys."""
        xp = ops_for(anchor)
        empty = self.count == 0
        shift = xp.where(empty, 0.0, self._anchor) - xp.where(empty, 0.0, anchor)
        return xp.where(empty, -xp.inf, shift + self._log_mass)

    def _drop(self, anchor: Array) -> Array:
        """Another anchor minus the mean; 0 for a row without keys."""
        xp = ops_for(anchor)
        empty = self.count == 0
        shift = xp.where(empty, 0.0, anchor) - xp.where(empty, 0.0, self._anchor)
        return xp.where(empty, 0.0, shift + self._shortfall)

    def map(self, function: Any) -> RowStats:
        """The same statistics with `function` applied to every array in them (indexing, moving, averaging)."""
        arrays, measured = self.flatten()
        return RowStats.unflatten(measured, [function(a) for a in arrays])

    def flatten(self) -> tuple[list[Array], tuple[bool, ...]]:
        """The arrays inside and which parts they are, for tree libraries."""
        parts = [getattr(self, name) for name in _PARTS]
        return [p for p in parts if p is not None], tuple(p is not None for p in parts)

    @classmethod
    def unflatten(cls, measured: tuple[bool, ...], arrays: Any) -> RowStats:
        """The inverse of `flatten`."""
        rest = iter(arrays)
        self = object.__new__(cls)
        self._set(*[next(rest) if there else None for there in measured])
        return self

    def __repr__(self) -> str:
        return f"RowStats(rows={tuple(self.count.shape)}, measured={self.measured})"


def centred(logits: Array, visible: Array) -> tuple[Array, Array]:
    """Logits minus the largest visible one of their row (0 where masked), and that maximum (−inf without keys).

    Masked logits are replaced before any arithmetic, so NaN, ±inf and finfo.min there reach neither the result nor its
    gradient.
    """
    xp = ops_for(logits)
    if logits.shape[-1] == 0:
        return logits, xp.sum(logits) - xp.inf
    peak = xp.stop_gradient(xp.max(xp.where(visible, logits, -xp.inf)))
    base = xp.where(xp.isnan(peak) | (peak > -xp.inf), peak, 0.0)[..., None]
    # The difference of two logits may overflow to −inf, which times a weight of 0 is NaN in the gradient.
    return xp.at_least(xp.where(visible, logits, base) - base, xp.lowest(logits.dtype)), peak


def dense_stats(logits: Array, visible: Array) -> RowStats:
    """Statistics of each row (last axis) of `logits` over the entries where `visible` (same shape) is True."""
    xp = ops_for(logits)
    count = xp.sum(visible)
    x, peak = centred(logits, visible)
    # At −1000 a weight is 0 in every dtype. Further down the square could overflow.
    x = xp.at_least(x, -1000.0)
    weight = xp.where(visible, xp.exp(x), 0.0)
    if logits.shape[-1] == 0:
        top, rest = visible, xp.sum(weight)
    else:
        # The weight of the top item is exactly 1. Summing the rest alone keeps ln(1 + rest) accurate however small the
        # rest is, and with it the relative accuracy of the entropy of an almost one-hot row.
        top = (xp.positions(x.shape[-1], x) == xp.argmax(xp.where(visible, x, -xp.inf))[..., None]) & visible
        rest = xp.sum(xp.where(top, xp.expm1(x), weight))
    share = weight / (1.0 + rest)[..., None]
    shortfall = -xp.sum(share * x)
    var = xp.sum(share * (x + shortfall[..., None]) ** 2)
    top_weight = xp.sum(xp.where(top, share, 0.0))
    return RowStats.anchored(count, peak, xp.log1p(rest), shortfall, max=peak, var=var, top=top_weight)
