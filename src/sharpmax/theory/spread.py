"""Bounds on the spread of a head's logits, from its weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from sharpmax.errors import reject
from sharpmax.theory.bounds import Number, check, check_at_least, check_broadcast, give, read


def spread_from_weights(Q: Number, K: Number, query_norm: Number, key_norm: Number, scale: Number = 1.0) -> Any:
    """Return the bound 2·scale·σ_max(Q)·σ_max(K)·‖y‖·max‖x‖ on the spread, in nats; Q `[..., D, Dy]`, K `[..., D, Dx]`.

    `query_norm` is ‖y‖ and `key_norm` the largest ‖x_i‖, before the projections. `scale` multiplies the logits, usually
    β·D^−½. Leading axes (heads) broadcast with the norms. The bound also holds with rotary positions.

    >>> spread_from_weights([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 3.0]], query_norm=1.0, key_norm=1.0)
    12.0
    """
    xp, Q, K, query_norm, key_norm, scale = _read_head(Q, K, query_norm, key_norm, scale)
    with np.errstate(over="ignore", under="ignore"):
        query, key = (xp.linalg.norm(matrix, 2, (-2, -1)) for matrix in (Q, K))
        return give(2 * scale * (query * query_norm) * (key * key_norm))


def spread_from_product(Q: Number, K: Number, query_norm: Number, key_norm: Number, scale: Number = 1.0) -> Any:
    """Return the bound 2·scale·σ_max(QᵀK)·‖y‖·max‖x‖ on the spread, in nats; Q `[..., D, Dy]`, K `[..., D, Dx]`.

    Arguments are those of `spread_from_weights`. This bound is never larger, up to rounding, because it takes the
    alignment of Q and K into account. It does not hold with rotary positions, which rotate between Q and K.

    >>> round(spread_from_product([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 3.0]], 1.0, 1.0), 12)
    6.0
    """
    xp, Q, K, query_norm, key_norm, scale = _read_head(Q, K, query_norm, key_norm, scale)
    with np.errstate(over="ignore", under="ignore"):
        # Divide by the largest entries, so that products neither overflow nor underflow.
        peaks = [xp.amax(xp.abs(matrix), (-2, -1)) for matrix in (Q, K)]
        query_peak, key_peak = (xp.where(peak > 0, peak, 1.0) for peak in peaks)
        # QᵀK is [Dy, Dx], usually far larger than [D, D]. Orthogonal factors do not change its singular values.
        query_core = xp.linalg.qr((Q / query_peak[..., None, None]).swapaxes(-1, -2), "reduced")[1]
        key_core = xp.linalg.qr((K / key_peak[..., None, None]).swapaxes(-1, -2), "reduced")[1]
        aligned = xp.linalg.norm(query_core @ key_core.swapaxes(-1, -2), 2, (-2, -1))
        return give(2 * scale * aligned * (query_peak * query_norm) * (key_peak * key_norm))


def _read_head(Q: Number, K: Number, query_norm: Number, key_norm: Number, scale: Number) -> tuple[Any, ...]:
    """Return numpy or torch and the arguments of a bound in float64, checked."""
    xp, (Q, K, query_norm, key_norm, scale) = read(Q=Q, K=K, query_norm=query_norm, key_norm=key_norm, scale=scale)
    for name, matrix in (("Q", Q), ("K", K)):
        if matrix.ndim < 2 or 0 in matrix.shape:
            reject(name, f"shape {tuple(matrix.shape)}", "a matrix [..., D, inputs] that is not empty")
        check(name, matrix, xp.isfinite(matrix), "finite numbers")
    if Q.shape[-2] != K.shape[-2]:
        given = f"shapes {tuple(Q.shape)} and {tuple(K.shape)}"
        reject("Q, K", given, "[..., D, Dy] and [..., D, Dx] with the same D", "transpose them if D comes last")
    for name, number in (("query_norm", query_norm), ("key_norm", key_norm), ("scale", scale)):
        check_at_least(name, number, 0.0)
    check_broadcast(
        Q=Q.shape[:-2], K=K.shape[:-2], query_norm=query_norm.shape, key_norm=key_norm.shape, scale=scale.shape
    )
    return xp, Q, K, query_norm, key_norm, scale
