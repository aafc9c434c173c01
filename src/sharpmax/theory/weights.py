"""Sharpness is bought with weight norm: bounds on the spread of a head's logits from its matrices.

The proposition is that of "Softmax is not Enough (for Sharp Size Generalisation)", arXiv 2410.01104.

Both bounds speak of logits s_i = scale·(Q y)·(K x_i). A bias on the keys moves all logits of a row alike and
so changes no spread; a bias on the queries is a column of Q that meets an input which is always 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sharpmax.errors import reject
from sharpmax.theory._numbers import Number, broadcast, check, check_at_least, give, read

__all__ = ["read_head", "spread_from_product", "spread_from_weights", "triangular_factor"]


def spread_from_weights(Q: Number, K: Number, query_norm: Number, key_norm: Number, scale: Number = 1.0) -> Any:
    """Largest spread, 2·scale·σ_max(Q)·σ_max(K)·‖y‖·max‖x‖ nats, of Q `[..., D, Dy]`, K `[..., D, Dx]`.

    `query_norm` is ‖y‖ and `key_norm` the largest ‖x_i‖, before the matrices; `scale` multiplies the logits
    (usually D^−½, times β). Leading axes (heads) broadcast with the norms. Holds under rotary positions too.

    >>> spread_from_weights([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 3.0]], query_norm=1.0, key_norm=1.0)
    12.0
    """
    xp, Q, K, query_norm, key_norm, scale = read_head(Q, K, query_norm, key_norm, scale)
    with np.errstate(over="ignore", under="ignore"):
        query, key = _largest_singular_value(xp, Q) * query_norm, _largest_singular_value(xp, K) * key_norm
        return give(2 * scale * query * key)


def spread_from_product(Q: Number, K: Number, query_norm: Number, key_norm: Number, scale: Number = 1.0) -> Any:
    """Largest spread, 2·scale·σ_max(QᵀK)·‖y‖·max‖x‖ nats, of Q `[..., D, Dy]` and K `[..., D, Dx]`.

    Arguments are those of `spread_from_weights`, which it never exceeds (up to rounding), as it also knows
    how Q and K are aligned. Not for rotary positions: a rotation between Q and K changes the product.

    >>> round(spread_from_product([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 3.0]], 1.0, 1.0), 12)
    6.0
    """
    xp, Q, K, query_norm, key_norm, scale = read_head(Q, K, query_norm, key_norm, scale)
    with np.errstate(over="ignore", under="ignore"):
        query_peak, key_peak = _largest_entry(xp, Q), _largest_entry(xp, K)
        # QᵀK is [Dy, Dx], usually far larger than D; orthogonal factors do not change its singular values.
        query_core = triangular_factor(xp, Q / query_peak[..., None, None])
        key_core = triangular_factor(xp, K / key_peak[..., None, None])
        aligned = _largest_singular_value(xp, query_core @ key_core.swapaxes(-1, -2))
        return give(2 * scale * aligned * (query_peak * query_norm) * (key_peak * key_norm))


def read_head(Q: Number, K: Number, query_norm: Number, key_norm: Number, scale: Number) -> tuple[Any, ...]:
    """The library to compute with and the arguments of a bound in float64, checked."""
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
    broadcast(
        Q=Q.shape[:-2],
        K=K.shape[:-2],
        query_norm=query_norm.shape,
        key_norm=key_norm.shape,
        scale=scale.shape,
    )
    return xp, Q, K, query_norm, key_norm, scale


def _largest_singular_value(xp: Any, matrix: Any) -> Any:
    return xp.linalg.norm(matrix, 2, (-2, -1))


def _largest_entry(xp: Any, matrix: Any) -> Any:
    """Largest absolute entry of each matrix, or 1 for a matrix of zeros, to divide by before multiplying."""
    peak = xp.amax(xp.abs(matrix), (-2, -1))
    return xp.where(peak > 0, peak, 1.0)


def triangular_factor(xp: Any, matrix: Any) -> Any:
    """R of matrixᵀ = U·R with orthonormal columns in U: `[..., min(D, inputs), D]`."""
    return xp.linalg.qr(matrix.swapaxes(-1, -2), "reduced")[1]
