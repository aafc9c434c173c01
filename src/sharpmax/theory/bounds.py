"""The dispersion lemma: bounds on the weights and the entropy of n items whose logits are bounded.

The lemma is from "Softmax is not Enough (for Sharp Size Generalisation)", arXiv 2410.01104. All functions broadcast.
Results are float64: floats, arrays, or tensors on the same device if any argument is a tensor.

`top_weight_limit` is about the largest weight as n grows, for independent, identically distributed, bounded logits. By
the law of large numbers (Σ e^βs)/n → E[e^βs], while the largest logit tends to the least upper bound M of the
distribution. Hence n·max p → e^βM/E[e^βs]: the top item keeps that multiple of the uniform weight 1/n.

`spread_from_weights` and `spread_from_product` bound the spread of a head's logits by its weights.
"""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import numpy as np

from sharpmax.errors import reject, reject_type


def weight_bounds(spread: Number, n: Number) -> tuple[Any, Any]:
    """Return the smallest and the largest softmax weight of one of n items within a spread δ in nats; both attained.

    The largest, e^δ/(e^δ + n − 1), is that of one item at the top with all others at the bottom. The smallest,
    1/(1 + (n − 1)·e^δ), is that of one item at the bottom with all others at the top.

    >>> low, high = weight_bounds(2.0, 16)
    >>> round(low, 4), round(high, 4)
    (0.0089, 0.33)
    """
    xp, spread, n = _numbers(spread=spread, n=n)
    with np.errstate(over="ignore", under="ignore"):
        high = 1 / (1 + _times_exp(xp, n - 1, -spread))
        others = xp.where(n > 1, n - 1, 1.0)
        low = xp.where(n > 1, _times_exp(xp, 1 / (xp.exp(-spread) + others), -spread), 1.0)
    return give(low), give(high)


def loose_weight_bounds(spread: Number, n: Number) -> tuple[Any, Any]:
    """Return the bounds as the paper states them, (e^−δ/n, e^δ/n): true, but attained at a spread of 0 only.

    The upper bound exceeds 1 if n < e^δ, and is infinite if it overflows float64.

    >>> low, high = loose_weight_bounds(2.0, 16)
    >>> round(low, 4), round(high, 4)
    (0.0085, 0.4618)
    """
    xp, spread, n = _numbers(spread=spread, n=n)
    with np.errstate(over="ignore", under="ignore"):
        return give(_times_exp(xp, 1 / n, -spread)), give(_times_exp(xp, 1 / n, spread))


def horizon(spread: Number, mass: Number = 0.5) -> Any:
    """Return the number of items up to which one of them can hold the weight `mass` within a spread δ in nats.

    It is the real number 1 + e^δ·(1 − p)/p, or infinity if that overflows float64. `int` of it is the largest number of
    items among which one can hold the mass.

    >>> int(horizon(4.0))
    55
    """
    xp, spread, mass = _numbers(spread=spread, mass=mass)
    with np.errstate(over="ignore", under="ignore"):
        return give(1 + _times_exp(xp, (1 - mass) / mass, spread))


def whole(horizon: float) -> int:
    """Return the largest number of items within a horizon, rounded down up to rounding errors of float64."""
    return math.floor(float(horizon) * (1.0 + 1e-12))


def required_spread(n: Number, mass: Number = 0.5) -> Any:
    """Return the smallest spread, in nats, at which one of n items can hold `mass`: ln((n − 1)·p/(1 − p)), at least 0.

    >>> round(required_spread(1024, mass=0.9), 3)
    9.128
    """
    xp, n, mass = _numbers(n=n, mass=mass)
    others = xp.where(n > 1, n - 1, 1.0)
    # (n − 1)·p/(1 − p) can overflow although its logarithm is small.
    spread = xp.log(others) + xp.log(mass) - xp.log1p(-mass)
    return give(xp.where((n > 1) & (spread > 0), spread, 0.0))


def entropy_floor(spread: Number, n: Number) -> Any:
    """Return the smallest Shannon entropy, in nats, of a softmax over n logits within a spread δ in nats.

    It is attained by j items at the top and n − j at the bottom, where j is next to n·e^−δ·(δ − u)/u² with
    u = 1 − e^−δ. That is one item if e^δ is large compared to n·δ, and about half of the items at a small spread. For
    any n, the floor is within δ/u − 1 − ln(δ/u) of ln n.

    >>> round(entropy_floor(3.0, 100), 4)
    3.5978
    """
    xp, spread, n = _numbers(spread=spread, n=n)
    check("n", n, n == xp.floor(n), "whole numbers", "round the number of items")
    with np.errstate(over="ignore", under="ignore"):
        # As a function of real j, the entropy falls and then rises, so the best whole j is next to its minimum. For
        # tiny spreads δ − u loses digits, but the entropy then hardly depends on j.
        u = -xp.expm1(-spread)
        u = xp.where(u > 0, u, 1.0)
        below = xp.floor(xp.minimum(_times_exp(xp, n, -spread) * ((spread - u) / u / u), n / 2))
        below = xp.where(below > 1, below, 1.0)
        above = xp.where(n > below, below + 1, below)
        entropy = xp.minimum(_two_level_entropy(xp, spread, n, below), _two_level_entropy(xp, spread, n, above))
    # Rounding must not lift the floor over the ceiling.
    ceiling = xp.log(n)
    return give(xp.where(spread > 0, xp.minimum(entropy, ceiling), ceiling))


def entropy_ceiling(n: Number) -> Any:
    """Return the largest Shannon entropy of n items, ln n nats, attained by equal logits."""
    xp, n = _numbers(n=n)
    return give(xp.log(n))


def _numbers(**given: Number) -> tuple[Any, ...]:
    """Return numpy or torch and the arguments in float64; check spread, n and mass."""
    xp, values = read(**given)
    check_broadcast(**{name: value.shape for name, value in zip(given, values, strict=True)})
    for name, value in zip(given, values, strict=True):
        if name == "spread":
            check_at_least(name, value, 0.0, "pass β·(largest − smallest logit) over the items that are not masked")
        elif name == "n":
            check_at_least(name, value, 1.0)
        elif name == "mass":
            check(name, value, (value > 0) & (value < 1), "numbers strictly between 0 and 1")
    return xp, *values


def _times_exp(xp: Any, factor: Any, exponent: Any) -> Any:
    """Return factor·e^exponent, which may fit into float64 although e^exponent does not."""
    half = xp.exp(exponent / 2)
    return factor * half * half


def _two_level_entropy(xp: Any, spread: Any, n: Any, top_count: Any) -> Any:
    """Entropy of `top_count` logits at δ and the rest at 0, as a sum without cancellation."""
    odds_of_bottom = _times_exp(xp, (n - top_count) / top_count, -spread)
    return xp.log(top_count) + xp.log1p(odds_of_bottom) + spread * odds_of_bottom / (1 + odds_of_bottom)


_ROUNDING = 1e-9
"""Relative tolerance for ln E[e^βs] above βM, which rounding can cause."""


def top_weight_limit(top: Number, log_mean_exp: Number) -> Any:
    """Return the limit of n·max p, at least 1, from `top` βM and `log_mean_exp` ln E[e^βs], both in nats.

    M must be the least upper bound of the distribution of the logits, not just any bound.

    >>> import math  # logits uniform on [0, 1] at β = 2: E[e^βs] = (e² − 1)/2
    >>> round(top_weight_limit(2.0, math.log(math.expm1(2.0) / 2.0)), 4)
    2.313
    """
    xp, top, log_mean_exp = _numbers(top=top, log_mean_exp=log_mean_exp)
    check("top", top, xp.isfinite(top), "finite numbers", "the limit exists for bounded logits only")
    check("log_mean_exp", log_mean_exp, xp.isfinite(log_mean_exp), "finite numbers")
    with np.errstate(over="ignore"):
        excess = top - log_mean_exp
    if not bool((excess >= -_ROUNDING * (1 + xp.abs(top))).all()):
        worst = -float(excess.min())
        reject("log_mean_exp", f"a value {worst:g} above top", "at most top", "pass β·M and ln E[e^(β·s)] of one β")
    with np.errstate(over="ignore", under="ignore"):
        return give(xp.exp(xp.where(excess > 0, excess, 0.0)))


def top_weight_limit_from_sample(logits: Number, beta: Number = 1.0, top: Number | None = None) -> Any:
    """Estimate the limit of n·max p `[...]` from rows of independent logits `[..., N]`.

    `top` is the least upper bound M of the distribution, before scaling by `beta`. Without it the largest logit of the
    row is used. The estimate is then N·max p of that row, which is too low, particularly if values near M are rare.

    >>> round(top_weight_limit_from_sample([0.0, 0.0, 0.0, 1.0]), 4)
    1.9015
    """
    given = {"logits": logits, "beta": beta} | ({} if top is None else {"top": top})
    xp, (logits, beta, *tops) = read(**given)
    if logits.ndim < 1 or 0 in logits.shape:
        reject("logits", f"shape {tuple(logits.shape)}", "an array [..., N] that is not empty")
    check("logits", logits, xp.isfinite(logits), "finite numbers", "leave masked items out")
    check_at_least("beta", beta, 0.0)
    largest = xp.amax(logits, -1)
    upper = tops[0] if tops else largest
    check_broadcast(logits=logits.shape[:-1], beta=beta.shape, top=upper.shape)
    check("top", upper, xp.isfinite(upper), "finite numbers")
    if not bool((upper >= largest).all()):
        short = f"a value {float((largest - upper).max()):g} under the largest logit"
        reject("top", short, "at least every logit of its row", "pass it before scaling by beta")
    with np.errstate(over="ignore", under="ignore"):
        # Relative to the largest logit, so that no term overflows and at least one does not underflow.
        mean = xp.exp(beta[..., None] * (logits - largest[..., None])).mean(-1)
        return give(xp.exp(beta * (upper - largest)) / mean)


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


Number = Any
"""A Python number, a (nested) sequence of them, a `numpy.ndarray` or a `torch.Tensor`."""


def read(**given: Number) -> tuple[Any, list[Any]]:
    """Return torch if an argument is a tensor, else numpy, and the values in float64."""
    # A caller with a tensor has imported torch already; others do not need it.
    torch = sys.modules.get("torch")
    tensors = [] if torch is None else [v for v in given.values() if isinstance(v, torch.Tensor)]
    if torch is None or not tensors:
        return np, [_from_numbers(name, value) for name, value in given.items()]
    values = []
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            values.append(torch.as_tensor(_from_numbers(name, value), device=tensors[0].device))
        elif value.dtype == torch.bool or value.is_complex():
            reject_type(name, f"a tensor of {value.dtype}", "a tensor of real numbers")
        else:
            values.append(value.to(torch.float64))
    return torch, values


def _from_numbers(name: str, value: Number) -> Any:
    try:
        array = np.asarray(value)
        # An integer beyond 64 bits becomes an object, and so does None, which numpy would turn into NaN.
        real = (isinstance(one, numbers.Real) and not isinstance(one, bool) for one in array.flat)
        if array.dtype.kind in "iuf" or (array.dtype.kind == "O" and all(real)):
            return array.astype(np.float64)
    except OverflowError:
        reject(name, "an integer too large for float64", f"at most {sys.float_info.max:.3g}")
    except (TypeError, ValueError):
        pass
    reject_type(name, repr(value), "a real number, a numpy array or a torch tensor of real numbers")


def check_broadcast(**shapes: Any) -> None:
    """Raise ArgumentError if shapes do not broadcast."""
    try:
        np.broadcast_shapes(*(tuple(shape) for shape in shapes.values()))
    except ValueError:
        given = " and ".join(str(tuple(shape)) for shape in shapes.values())
        reject(", ".join(shapes), f"shapes {given}", "shapes that broadcast")


def check(argument: str, value: Any, fine: Any, allowed: str, todo: str = "") -> None:
    """Raise ArgumentError unless `fine` is True everywhere, with the first value where it is not."""
    if not bool(fine.all()):
        reject(argument, repr(float(value[~fine].reshape(-1)[0])), allowed, todo)


def check_at_least(argument: str, value: Any, least: float, todo: str = "") -> None:
    """Raise ArgumentError unless every value is finite and at least `least`."""
    check(argument, value, (value >= least) & (value < math.inf), f"finite numbers of at least {least:g}", todo)


def give(value: Any) -> Any:
    """Return a single numpy value as a float, tensors and arrays unchanged."""
    return float(value) if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 else value
