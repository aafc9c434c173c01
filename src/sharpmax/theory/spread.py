"""Bounds on the spread of a head's logits, from its weights or from a finite set of inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from sharpmax.errors import reject
from sharpmax.theory.bounds import Number, broadcast, check, check_at_least, give, read


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
    broadcast(Q=Q.shape[:-2], K=K.shape[:-2], query_norm=query_norm.shape, key_norm=key_norm.shape, scale=scale.shape)
    return xp, Q, K, query_norm, key_norm, scale


def check_pairs(pairs: object, width: int) -> None:
    """Refuse a number of pairs that do not fit into `width` entries."""
    if isinstance(pairs, bool) or not isinstance(pairs, int) or not 0 <= 2 * pairs <= width:
        reject("pairs", repr(pairs), f"a whole number from 0 to {width // 2}, half of D")


def _largest_singular_value(xp: Any, matrix: Any) -> Any:
    return xp.linalg.norm(matrix, 2, (-2, -1))


def _largest_entry(xp: Any, matrix: Any) -> Any:
    """Largest absolute entry of each matrix, or 1 for a matrix of zeros, to divide by before multiplying."""
    peak = xp.amax(xp.abs(matrix), (-2, -1))
    return xp.where(peak > 0, peak, 1.0)


def triangular_factor(xp: Any, matrix: Any) -> Any:
    """R of matrixᵀ = U·R with orthonormal columns in U: `[..., min(D, inputs), D]`."""
    return xp.linalg.qr(matrix.swapaxes(-1, -2), "reduced")[1]


_AT_ONCE = 1 << 24
"""Logits that are held at a time."""


def spread_over_inputs(queries: Number, keys: Number, scale: Number = 1.0, *, pairs: int = 0) -> float:
    """A bound, in nats, on the spread of any row of logits scale·q·k over queries `[T, D]` and keys `[S, D]`.

    Entries i and i + `pairs` are turned together by positions, for i < `pairs`, and may be so by any angle: such a pair
    adds between −‖q_b‖·‖k_b‖ and ‖q_b‖·‖k_b‖ to a logit. The rest is exact, and so is the whole without pairs.

    Every query meets every key, but for the queries that cannot spread as far as the best so far. Logits are computed
    in float32, and what that may round away is added.

    >>> round(spread_over_inputs([[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]]), 3)
    3.0
    """
    xp, (queries, keys, scale) = read(queries=queries, keys=keys, scale=scale)
    for name, inputs in (("queries", queries), ("keys", keys)):
        if inputs.ndim != 2 or 0 in inputs.shape:
            reject(name, f"shape {tuple(inputs.shape)}", "an array [inputs, D] that is not empty")
        check(name, inputs, xp.isfinite(inputs), "finite numbers")
    width = queries.shape[1]
    if width != keys.shape[1]:
        given = f"shapes {tuple(queries.shape)} and {tuple(keys.shape)}"
        reject("queries, keys", given, "[T, D] and [S, D] with the same D")
    check_pairs(pairs, width)
    check_at_least("scale", scale, 0.0)
    still = [inputs[:, 2 * pairs :] for inputs in (queries, keys)]
    # What all keys share moves a row as a whole.
    still[1] = still[1] - still[1].mean(0)
    turned = [(side[:, :pairs] ** 2 + side[:, pairs : 2 * pairs] ** 2) ** 0.5 for side in (queries, keys)]
    return float(scale) * _widest(xp, still, turned)


def _widest(xp: Any, still: list[Any], turned: list[Any]) -> float:
    """The largest spread of a row: its top with every pair at its best, less its bottom with each at its worst."""
    (query_still, key_still), (query_turned, key_turned) = still, turned
    tops = xp.concatenate((query_still, query_turned), 1)
    bottoms = xp.concatenate((query_still, -query_turned), 1)
    keys = xp.concatenate((key_still, key_turned), 1)
    lengths = (tops**2).sum(1) ** 0.5 * float((keys**2).sum(1).max()) ** 0.5
    most = 2 * xp.minimum(lengths, xp.abs(tops) @ xp.amax(xp.abs(keys), 0))
    # A sum of n products in float32 is off by less than (n + 4)·2⁻²³ times the product of the lengths.
    slack = 2 * (tops.shape[1] + 4) * 2.0**-23 * lengths
    order = xp.argsort(-most)
    small = xp.float32
    tops, bottoms, keys = (_cast(array, small) for array in (tops[order], bottoms[order], keys.swapaxes(0, 1)))
    most, slack = most[order], slack[order]
    step, best = max(1, _AT_ONCE // keys.shape[1]), 0.0
    for start in range(0, len(most), step):
        if float(most[start]) <= best:
            break
        rows = slice(start, start + step)
        top = xp.amax(tops[rows] @ keys, 1)
        bottom = -top if not query_still.shape[1] else xp.amin(bottoms[rows] @ keys, 1)
        best = max(best, float((_cast(top - bottom, xp.float64) + slack[rows]).max()))
    return best


def _cast(array: Any, dtype: Any) -> Any:
    return array.astype(dtype) if isinstance(array, np.ndarray) else array.to(dtype)
