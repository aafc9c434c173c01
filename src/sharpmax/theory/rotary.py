"""The spread of a head whose queries and keys are turned by their positions, over every input and every position.

Let q = Q y + q₀ and k = K x + k₀, and let position turn pairs b of their entries: a logit is scale·Σ_b q_b·R_b k_b with
rotations R_b that depend on where y and x stand. Whatever these are, and for any weights w_b > 0,

    |Σ_b q_b·R_b k_b| ≤ Σ_b ‖q_b‖·‖k_b‖ ≤ (Σ_b w_b·‖q_b‖²)^½ · (Σ_b ‖k_b‖²/w_b)^½        (Cauchy–Schwarz, twice)

and over inputs of bounded norm each factor is at most a largest singular value. The product of the two bounds the logit
for every w; its logarithm is convex in ln w, and descent makes it small. Where descent stops decides how tight the
bound is, not whether it holds. Three more facts complete it.

- Entries that are not turned contribute yᵀ(QᵀK)x, which stays the same if Q is multiplied by a matrix and K by its
  transposed inverse: they are put into the basis of the singular vectors of QᵀK, where each is a block of its own.
- A constant: Q y + q₀ = [√(1+t)·ρ·Q, √(1+1/t)·q₀]·z with ‖z‖² ≤ 1/(1+t) + t/(1+t) = 1 if ‖y‖ ≤ ρ, for any t > 0.
- The part of k₀ that is not turned moves all logits of a row alike, so it does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpmax.errors import reject
from sharpmax.theory.bounds import Number, check, give, read
from sharpmax.theory.spread import check_pairs, read_head, triangular_factor

_STEPS, _RATE, _MOMENTUM = 60, 2.0, 0.8
_POWERS = (16.0, 1024.0)
"""How sharply the largest eigenvalue is separated from the next, at the first step and at the last."""

_TINY = 1e-40


def spread_from_rotary(
    Q: Number,
    K: Number,
    query_norm: Number,
    key_norm: Number,
    scale: Number = 1.0,
    *,
    pairs: int,
    query_bias: Number | None = None,
    key_bias: Number | None = None,
) -> Any:
    """A bound, in nats, on the spread of Q `[..., D, Dy]` and K `[..., D, Dx]` under rotary positions.

    Rows i and i + `pairs` turn together, for i < `pairs`; rows from 2·`pairs` on do not turn. Biases `[..., D]` are
    added to Q y and K x; the other arguments are those of `spread_from_weights`. Where all rows turn it never exceeds
    that bound (up to rounding), and without pairs and biases it is `spread_from_product`.

    >>> spread = spread_from_rotary([[2.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [3.0, 0.0]], 1.0, 1.0, pairs=1)
    >>> round(spread, 9)  # turned by a right angle, the 2 meets the 3
    12.0
    """
    xp, Q, K, query_norm, key_norm, scale = read_head(Q, K, query_norm, key_norm, scale)
    width = Q.shape[-2]
    check_pairs(pairs, width)
    query = _side(xp, Q, query_norm, query_bias, "query_bias", width)
    key = _side(xp, K, key_norm, key_bias, "key_bias", 2 * pairs)
    if 2 * pairs < width:
        query, key = _balanced(xp, query, key, 2 * pairs)
    return give(2 * scale * query.length * key.length * _least(xp, query, key, pairs))


@dataclass(frozen=True)
class _Side:
    """Queries or keys: rows `[..., D, r]` for inputs of norm 1 and constants `[..., D, 1]`, divided by their length."""

    rows: Any
    constant: Any
    length: Any

    def changed(self, xp: Any, start: int, change: Any) -> _Side:
        """The same with everything from row `start` on multiplied by a matrix."""

        def through(part: Any) -> Any:
            below = change @ part[..., start:, :]
            return xp.concatenate((part[..., :start, :] + 0.0 * below[..., :1, :], below), -2)

        return _Side(through(self.rows), through(self.constant), self.length)


def _side(xp: Any, matrix: Any, norm: Any, bias: Number | None, name: str, counted: int) -> _Side:
    """One side from its arguments; constants count in the first `counted` rows."""
    # Orthogonal factors on the side of the inputs change no length, and what is left without them is far smaller.
    rows = triangular_factor(xp, matrix).swapaxes(-1, -2) * norm[..., None, None]
    width = rows.shape[-2]
    _, (_, constant) = read(matrix=matrix, **{name: np.zeros(width) if bias is None else bias})
    if constant.ndim < 1 or constant.shape[-1] != width:
        reject(name, f"shape {tuple(constant.shape)}", f"[..., {width}], a number for each row of its matrix")
    check(name, constant, xp.isfinite(constant), "finite numbers")
    constant = xp.concatenate((constant[..., :counted], 0.0 * constant[..., counted:]), -1)[..., None]
    length = ((rows**2).sum((-2, -1)) + (constant**2).sum((-2, -1))) ** 0.5
    length = xp.where(length > 0, length, 1.0)
    return _Side(rows / length[..., None, None], constant / length[..., None, None], length)


def _balanced(xp: Any, query: _Side, key: _Side, start: int) -> tuple[_Side, _Side]:
    """Both sides with the rows from `start` on in the basis of the singular vectors of their product."""
    left = xp.concatenate((query.rows, query.constant + 0.0 * query.rows[..., :1]), -1)[..., start:, :]
    right = key.rows[..., start:, :]
    u, sizes, v = xp.linalg.svd(left.swapaxes(-1, -2) @ right, full_matrices=False)
    # A direction in which nothing meets is left out.
    met = sizes > 1e-15 * sizes[..., :1]
    share = (xp.where(met, sizes, 1.0) ** -0.5 * met)[..., None]
    of_query, of_key = share * (v @ right.swapaxes(-1, -2)), share * (left @ u).swapaxes(-1, -2)
    return query.changed(xp, start, of_query), key.changed(xp, start, of_key)


def _least(xp: Any, query: _Side, key: _Side, pairs: int) -> Any:
    """The smallest product of the two largest singular values that descent in ln w and in each ln t finds."""
    sides = [(_square(side.rows), _square(side.constant)) for side in (query, key)]
    flat = 0.0 * (sides[0][0] + sides[1][0])[..., 0]
    place = [flat, *(_first_share(xp, *side) + flat[..., :1] for side in sides)]
    speed = [0.0 * part for part in place]
    best = flat[..., 0] + np.inf
    for step in range(_STEPS + 1):
        sharper = (_POWERS[1] / _POWERS[0]) ** (step / _STEPS)
        log_w, *log_t = place
        tops, shares, slopes = zip(
            *(
                _top(xp, side, xp.exp(t), xp.exp(sign * log_w), sharper * _POWERS[0])
                for side, t, sign in zip(sides, log_t, (0.5, -0.5), strict=True)
            ),
            strict=True,
        )
        best = xp.minimum(best, (tops[0] * tops[1]) ** 0.5)
        slope = [_paired(xp, shares[0] - shares[1], pairs), *slopes]
        speed = [_MOMENTUM * old + 0.5 * new for old, new in zip(speed, slope, strict=True)]
        place = [old - _RATE / sharper**0.5 * new for old, new in zip(place, speed, strict=True)]
    return best


def _top(xp: Any, side: tuple[Any, Any], t: Any, weights: Any, power: float) -> tuple[Any, Any, Any]:
    """The largest eigenvalue λ of a weighted side, and how ln λ changes with the ln of each weight (squared) and of t.

    The slopes are those of (ln Σ λᵢ^power)/power, which has one where λ is that of several vectors.
    """
    square, constant = (part * weights[..., :, None] * weights[..., None, :] for part in side)
    values, vectors = xp.linalg.eigh((1 + t)[..., None] * square + (1 + 1 / t)[..., None] * constant)
    values = xp.where(values > 0, values, 0.0)
    top = values[..., -1:]
    relative = values / xp.where(top > 0, top, 1.0)
    share = relative**power
    share = (share / (share.sum(-1)[..., None] + _TINY))[..., None, :]
    moved = t[..., None] * (square @ vectors) - (constant @ vectors) / t[..., None]
    rise = (vectors * moved).sum(-2)[..., None, :] * share / xp.where(values > 0, values, 1.0)[..., None, :]
    return top[..., 0], (vectors**2 * share).sum(-1), rise.sum(-1)


def _square(matrix: Any) -> Any:
    return matrix @ matrix.swapaxes(-1, -2)


def _first_share(xp: Any, square: Any, constant: Any) -> Any:
    """ln t `[..., 1]` to begin with: the length of the constant over that of the rows."""
    sizes = [part.diagonal(0, -2, -1).sum(-1)[..., None] + _TINY for part in (constant, square)]
    return 0.5 * (xp.log(sizes[0]) - xp.log(sizes[1]))


def _paired(xp: Any, values: Any, pairs: int) -> Any:
    """Values of rows that turn together, added up."""
    both = values[..., :pairs] + values[..., pairs : 2 * pairs]
    return xp.concatenate((both, both, values[..., 2 * pairs :]), -1)
