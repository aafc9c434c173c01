"""The dispersion lemma: what n items can weigh, and how sharp they can be, when their logits are bounded.

The lemma is that of "Softmax is not Enough (for Sharp Size Generalisation)", arXiv 2410.01104. All functions
broadcast; results are float64, and tensors on the same device once any argument is a tensor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sharpmax.theory._numbers import Number, broadcast, check, check_at_least, give, read


def weight_bounds(spread: Number, n: Number) -> tuple[Any, Any]:
    """Least and largest softmax weight that one of n items can have within a spread δ in nats; both attained.

    The largest, e^δ/(e^δ + n − 1), is that of one item at the top with all others at the bottom; the least,
    1/(1 + (n − 1)·e^δ), that of one item at the bottom with all others at the top.

    >>> low, high = weight_bounds(2.0, 16)
    >>> round(low, 4), round(high, 4)
    (0.0089, 0.33)
    """
    xp, spread, n = _read_spread_and_n(spread, n)
    with np.errstate(over="ignore", under="ignore"):
        high = 1 / (1 + _times_exp(xp, n - 1, -spread))
        others = xp.where(n > 1, n - 1, 1.0)
        low = xp.where(n > 1, _times_exp(xp, 1 / (xp.exp(-spread) + others), -spread), 1.0)
    return give(low), give(high)


def loose_weight_bounds(spread: Number, n: Number) -> tuple[Any, Any]:
    """The lemma as the paper states it, (e^−δ/n, e^δ/n): always true, but attained at a spread of 0 only.

    The upper bound exceeds 1 once n < e^δ, and is infinite where it leaves float64.

    >>> low, high = loose_weight_bounds(2.0, 16)
    >>> round(low, 4), round(high, 4)
    (0.0085, 0.4618)
    """
    xp, spread, n = _read_spread_and_n(spread, n)
    with np.errstate(over="ignore", under="ignore"):
        return give(_times_exp(xp, 1 / n, -spread)), give(_times_exp(xp, 1 / n, spread))


def horizon(spread: Number, mass: Number = 0.5) -> Any:
    """The number of items up to which one of them can still hold the given mass within a spread δ in nats.

    It is the real number 1 + e^δ·(1 − p)/p; infinity where that leaves float64. `int` of it is the largest number of
    items among which one can hold the mass.

    >>> int(horizon(4.0))
    55
    >>> round(horizon(5.0, mass=0.9), 2)
    17.49
    """
    xp, (spread, mass) = read(spread=spread, mass=mass)
    broadcast(spread=spread.shape, mass=mass.shape)
    _check_spread(spread)
    _check_mass(mass)
    with np.errstate(over="ignore", under="ignore"):
        return give(1 + _times_exp(xp, (1 - mass) / mass, spread))


def whole(horizon: float) -> int:
    """The largest number of items within a horizon: it is never rounded up, but for the noise of float64.

    >>> whole(horizon(4.0)), whole(300.0 - 1e-12)
    (55, 300)
    """
    return math.floor(float(horizon) * (1.0 + 1e-12))


def required_spread(n: Number, mass: Number = 0.5) -> Any:
    """The least spread, in nats, at which one of n items can hold the given mass: ln((n − 1)·p/(1 − p)) or 0.

    It is 0 wherever the mass is at most 1/n, as equal logits already give that much.

    >>> round(required_spread(1024, mass=0.9), 3)
    9.128
    """
    xp, (n, mass) = read(n=n, mass=mass)
    broadcast(n=n.shape, mass=mass.shape)
    check_at_least("n", n, 1.0)
    _check_mass(mass)
    others = xp.where(n > 1, n - 1, 1.0)
    # (n − 1)·p/(1 − p) itself can leave float64 although its logarithm is small.
    spread = xp.log(others) + xp.log(mass) - xp.log1p(-mass)
    return give(xp.where((n > 1) & (spread > 0), spread, 0.0))


def entropy_floor(spread: Number, n: Number) -> Any:
    """The least Shannon entropy, in nats, of a softmax over n logits that lie within a spread δ, in nats.

    It is attained by j items at the top and n − j at the bottom, j being next to n·e^−δ·(δ − u)/u² with
    u = 1 − e^−δ. A single item at the top is best only while e^δ is large against n·δ; at a small spread it
    is about half of the items. Whatever n is, the floor stays within δ/u − 1 − ln(δ/u) of ln n.

    >>> round(entropy_floor(3.0, 100), 4)
    3.5978
    """
    xp, spread, n = _read_spread_and_n(spread, n)
    check("n", n, n == xp.floor(n), "whole numbers", "round the number of items")
    with np.errstate(over="ignore", under="ignore"):
        # Over real j the entropy falls and then rises, so the best whole j is next to its minimum.
        below = xp.floor(_best_top_count(xp, spread, n))
        below = xp.where(below > 1, below, 1.0)
        above = xp.where(n > below, below + 1, below)
        entropy = xp.minimum(_two_level_entropy(xp, spread, n, below), _two_level_entropy(xp, spread, n, above))
    # Rounding must not lift the floor over the ceiling.
    ceiling = xp.log(n)
    return give(xp.where(spread > 0, xp.minimum(entropy, ceiling), ceiling))


def entropy_ceiling(n: Number) -> Any:
    """The largest Shannon entropy of n items, ln n nats, attained by equal logits whatever the spread.

    >>> entropy_ceiling(1)
    0.0
    """
    xp, (n,) = read(n=n)
    check_at_least("n", n, 1.0)
    return give(xp.log(n))


def _read_spread_and_n(spread: Number, n: Number) -> tuple[Any, Any, Any]:
    xp, (spread, n) = read(spread=spread, n=n)
    broadcast(spread=spread.shape, n=n.shape)
    _check_spread(spread)
    check_at_least("n", n, 1.0)
    return xp, spread, n


def _check_spread(spread: Any) -> None:
    check_at_least("spread", spread, 0.0, "pass β·(largest − smallest logit) over the items that are not masked")


def _check_mass(mass: Any) -> None:
    check("mass", mass, (mass > 0) & (mass < 1), "numbers strictly between 0 and 1")


def _times_exp(xp: Any, factor: Any, exponent: Any) -> Any:
    """factor·e^exponent, which may fit into float64 although e^exponent alone does not."""
    half = xp.exp(exponent / 2)
    return factor * half * half


def _best_top_count(xp: Any, spread: Any, n: Any) -> Any:
    """The real number of items at the top for which the entropy of a two-level row is least: 0 … n/2."""
    # For tiny spreads δ − u loses digits; the entropy is then flat in j, so that any j is as good.
    u = -xp.expm1(-spread)
    u = xp.where(u > 0, u, 1.0)
    return xp.minimum(_times_exp(xp, n, -spread) * ((spread - u) / u / u), n / 2)


def _two_level_entropy(xp: Any, spread: Any, n: Any, top_count: Any) -> Any:
    """Entropy of `top_count` logits at δ and the rest at 0, as a sum without cancellation."""
    odds_of_bottom = _times_exp(xp, (n - top_count) / top_count, -spread)
    return xp.log(top_count) + xp.log1p(odds_of_bottom) + spread * odds_of_bottom / (1 + odds_of_bottom)
