"""The kinds of policy that calibration can learn, and the grid of numbers behind each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from sharpmax.policies import Constant, LogLinear, PerHead, Policy

__all__ = ["FOLDABLE", "KINDS", "NOT_NEGATIVE", "policy_from"]

KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "constant": ("level",),
        "length": ("level", "length"),
        "entropy": ("level", "length", "entropy", "entropy2", "entropy_length"),
        "rows": LogLinear.COEFFICIENTS,
    }
)
"""Each kind with the coefficients of `LogLinear` that it learns in every head."""

FOLDABLE = "constant"
"""The kind that can be folded into the weights."""

NOT_NEGATIVE = "length"
"""The coefficient kept from falling below 0: a leash on long text would teach it to flatten long inputs instead."""

_DIGITS = 5


def policy_from(kind: str, coefficients: Tensor, strength: float = 1.0) -> PerHead:
    """The policy of coefficients `[layers, heads, those of the kind]`; ln β is multiplied by `strength`.

    Numbers are rounded here, so that what is measured afterwards is what a file will hold.
    """
    grid = (coefficients.detach().cpu().double() * strength).tolist()
    return PerHead(tuple(tuple(_of_head(kind, head) for head in layer) for layer in grid))


def _of_head(kind: str, values: list[float]) -> Policy:
    policy = LogLinear(**{name: round(value, _DIGITS) for name, value in zip(KINDS[kind], values, strict=True)})
    if kind != FOLDABLE:
        return policy
    level = min(max(policy.level, math.log(policy.floor)), math.log(policy.ceiling))
    return Constant(round(math.exp(level), _DIGITS))
