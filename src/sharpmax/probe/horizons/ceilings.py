"""The largest β a policy can give, whatever the row."""

from __future__ import annotations

import math

import numpy as np

from sharpmax.errors import UnsupportedError
from sharpmax.policies import Constant, Curve, EntropyTarget, LogLinear, PerHead, Policy, Polynomial

__all__ = ["beta_ceiling", "ceilings_of"]


def ceilings_of(policy: Policy | None, layer: int, heads: int) -> list[float]:
    """The largest β in each head of a layer."""
    if policy is None:
        return [1.0] * heads
    if isinstance(policy, PerHead):
        return [beta_ceiling(one) for one in policy.policies[layer]]
    return [beta_ceiling(policy)] * heads


def beta_ceiling(policy: Policy) -> float:
    """The largest β of a policy for one head; a constant's own value, though it may be under 1.

    >>> from sharpmax.policies import PAPER
    >>> beta_ceiling(Constant(0.5)), round(beta_ceiling(PAPER), 3)
    (0.5, 2.421)
    """
    if isinstance(policy, Constant):
        return policy.value
    if isinstance(policy, Curve):
        return max(policy.values)
    if isinstance(policy, LogLinear):
        level = math.exp(min(max(policy.level, math.log(policy.floor)), math.log(policy.ceiling)))
        return policy.ceiling if policy.needs else level
    if isinstance(policy, EntropyTarget):
        return policy.ceiling
    if isinstance(policy, Polynomial):
        return _highest(policy)
    raise UnsupportedError(
        f"policy: {policy.describe()} has no largest β, so that no number of tokens can be certified; "
        "allowed: policies with a ceiling"
    )


def _highest(policy: Polynomial) -> float:
    low, high = policy.fitted_on if policy.outside_is == "clamp" else (policy.threshold, math.inf)
    slopes = np.polynomial.Polynomial(policy.coefficients[::-1]).deriv()
    if math.isinf(high) and slopes(1e9) > 0:
        raise UnsupportedError(
            f"policy: {policy.describe()} grows with the entropy and so with the number of tokens, so that none can be "
            "certified; allowed: policies with a ceiling"
        )
    turns = slopes.roots()
    where = [low, *(end for end in (high,) if math.isfinite(end)), *turns[np.isreal(turns)].real]
    inside = [h for h in where if low <= h <= high]
    return max(1.0, *(float(np.polyval(policy.coefficients, h)) for h in inside))
