"""Entropy and sharpened softmax of dense logits, for torch and for JAX."""

from __future__ import annotations

from typing import TypeVar

from sharpmax.arrays import Array, is_array, ops_for
from sharpmax.errors import reject, reject_type
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import resolve_policy
from sharpmax.stats.statistics import RowStats, centred, dense_stats

A = TypeVar("A")


def entropy(logits: A, *, dim: int = -1, mask: A | None = None) -> A:
    """Shannon entropy, in nats, of softmax(logits) along `dim`; float32, or float64 for float64 logits.

    Logits of −inf (or `finfo.min`) and positions where the boolean `mask` is False do not count. The entropy of a row
    without any other logit is 0.

    >>> import torch
    >>> entropy(torch.tensor([0.0, 0.0, float("-inf")]))
    tensor(0.6931)
    """
    rows, visible = rows_of(logits, dim, mask)
    return dense_stats(rows, visible).entropy  # type: ignore[no-any-return]


def softmax(logits: A, policy: Policy | str | None = None, *, dim: int = -1, mask: A | None = None) -> A:
    """softmax(β·logits) along `dim`, with β from `policy` and the row's own statistics; dtype of the logits.

    Masked positions have weight 0, also in rows that are masked completely. `policy=None` is the plain softmax. First
    and second derivatives flow through β.

    >>> import torch
    >>> logits = torch.tensor([2.0, 1.0, 0.0, 0.0])
    >>> softmax(logits, policy=None).max() < softmax(logits, policy="paper").max()
    tensor(True)
    """
    xp = ops_for(logits)
    rows, visible = rows_of(logits, dim, mask)
    weights, _ = sharpen(rows, visible, resolve_policy(policy))
    return xp.moveaxis(xp.cast(weights, logits.dtype), -1, dim)  # type: ignore[no-any-return, attr-defined]


def sharpen(rows: Array, visible: Array, policy: Policy) -> tuple[Array, RowStats | None]:
    """Weights along the last axis, and the statistics that gave β (None if nothing was measured)."""
    xp = ops_for(rows)
    x, _ = centred(rows, visible)
    stats = None
    if not policy.is_identity:
        stats = dense_stats(rows, visible)
        # Centred logits are at most 0, so no β makes them overflow. Hidden ones are 0 here, and masked below.
        beta = policy.beta(stats, lambda b: dense_stats(x * _column(b, x), visible))
        x = x * _column(beta, x)
    weights = xp.where(visible, xp.exp(x), 0.0)
    total = xp.sum(weights)
    return weights / xp.where(xp.sum(visible) == 0, 1.0, total)[..., None], stats


def _column(beta: Array, like: Array) -> Array:
    """β `[..., 1]` in the dtype of `like`, capped at its largest number, as 0 · inf would be NaN."""
    xp = ops_for(like)
    return xp.cast(xp.at_most(beta, -xp.lowest(like.dtype)), like.dtype)[..., None]


def rows_of(logits: Array, dim: int, mask: Array | None, *, name: str = "dim") -> tuple[Array, Array]:
    """The logits with `dim` last, in float32 or float64, and which of them are visible.

    `name` is the caller's name for `dim`, for errors.
    """
    if not is_array(logits):
        reject_type("logits", type(logits).__name__, "a torch tensor or a JAX array")
    xp = ops_for(logits)
    if not xp.is_floating(logits):
        reject_type("logits", f"dtype {logits.dtype}", "a floating dtype")
    if logits.ndim == 0:
        reject("logits", "shape ()", "one or more dimensions")
    if isinstance(dim, bool) or not isinstance(dim, int):
        reject_type(name, type(dim).__name__, "an integer")
    if not -logits.ndim <= dim < logits.ndim:
        reject(name, dim, f"{-logits.ndim} … {logits.ndim - 1} for logits of shape {tuple(logits.shape)}")
    visible = ~(logits <= xp.lowest(logits.dtype) / 2)
    if mask is not None:
        visible = visible & xp.broadcast_mask(mask, tuple(logits.shape))
    return xp.cast(xp.moveaxis(logits, dim, -1), xp.statistics_dtype(logits)), xp.moveaxis(visible, dim, -1)
