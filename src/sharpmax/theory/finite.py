"""The spread of a head whose inputs are known one by one: the tokens of a vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from sharpmax.errors import reject
from sharpmax.theory._numbers import Number, check, check_at_least, read

__all__ = ["spread_over_inputs"]

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
    if isinstance(pairs, bool) or not isinstance(pairs, int) or not 0 <= 2 * pairs <= width:
        reject("pairs", repr(pairs), f"a whole number from 0 to {width // 2}, half of D")
    check_at_least("scale", scale, 0.0)
    still = [inputs[:, 2 * pairs :] for inputs in (queries, keys)]
    # What all keys share moves a row as a whole.
    still[1] = still[1] - still[1].mean(0)
    turned = [_lengths(inputs, pairs) for inputs in (queries, keys)]
    return float(scale) * _widest(xp, still, turned)


def _lengths(inputs: Any, pairs: int) -> Any:
    return (inputs[:, :pairs] ** 2 + inputs[:, pairs : 2 * pairs] ** 2) ** 0.5


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
