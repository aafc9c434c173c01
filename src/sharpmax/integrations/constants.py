"""What model files can hold of a policy: constants as factors of weights, or the length rule of Ministral 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharpmax.errors import UnsupportedError, reject, reject_type
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogScale, PerFrequency, constant_factors
from sharpmax.policies.per_head import PerHead, check_shape


def nearest_constant(policy: Policy, length: int) -> Policy:
    """The constant policy with the β that `policy` gives a row of `length` visible keys.

    `policy` may depend on the number of visible keys only; for any other, calibrate a constant policy.

    >>> from sharpmax.policies import LogLength
    >>> nearest_constant(LogLength(reference=16), 256)
    Constant(value=2.0)
    """
    if isinstance(length, bool) or not isinstance(length, int):
        reject_type("length", type(length).__name__, "a number of visible keys")
    if length < 1:
        reject("length", length, "1 or more visible keys")
    if isinstance(policy, PerHead):
        return PerHead(tuple(tuple(nearest_constant(one, length) for one in layer) for layer in policy.policies))
    if isinstance(policy, (Constant, PerFrequency)):
        return policy
    if policy.needs - {"count"}:
        raise UnsupportedError(
            f"policy: {policy.describe()} depends on {', '.join(sorted(policy.needs - {'count'}))}, not on the length "
            "alone; calibrate a constant policy for this model with `sharpmax calibrate --foldable`"
        )
    # Constants do not need torch, and importing it takes longer than folding a GGUF file.
    import torch

    from sharpmax.arrays import ops_for
    from sharpmax.stats.statistics import RowStats

    stats = RowStats.anchored(torch.tensor([length]))
    return Constant(float(policy.rule(ops_for(stats.count), stats, None)))


def engine_rule(policy: Policy) -> tuple[float, int] | None:
    """The numbers b and N of 1 + b·ln(1 + ⌊position/N⌋), which engines read from a file; None for another policy.

    >>> from sharpmax.policies import load_policy
    >>> engine_rule(load_policy("ministral3:4096"))
    (0.1, 4096)
    """
    if not isinstance(policy, LogScale) or policy.is_identity or not policy.steps:
        return None
    plain = (policy.bias, policy.shift) == (1.0, 1.0) and policy.reference.is_integer() and policy.reference < 2**32
    return (policy.scale, int(policy.reference)) if plain else None


def weight_factors(policy: Policy, heads: Sequence[int], model: str, longest: Any) -> dict[int, list[list[float]]]:
    """β of every layer that changes, `[heads][1]` or `[heads][D]`; `heads` is the number of heads of each layer.

    Raises an ArgumentError for a policy of another shape, and an UnsupportedError for one that depends on the row,
    with the nearest constants at `longest` visible keys.
    """
    check_shape(policy, heads, model)
    grid = policy.policies if isinstance(policy, PerHead) else [(policy,) * count for count in heads]
    flat = [one for row in grid for one in row]
    needs = frozenset[str]().union(*(one.needs for one in flat))
    if needs:
        nearest = "calibrate a constant policy with `sharpmax calibrate --foldable`"
        if needs == {"count"}:
            nearest = "the nearest foldable one is sharpmax.integrations.transformers.nearest_constant(policy, length)"
            if isinstance(longest, int):
                values = sorted(nearest_constant(one, longest).to_dict()["value"] for one in flat)
                span = f"{values[0]:.4g}" + (f" … {values[-1]:.4g}" if values[-1] > values[0] else "")
                nearest += f", β = {span} at length {longest}"
        raise UnsupportedError(
            f"policy: {policy.describe()} depends on the row ({', '.join(sorted(needs))}), and a weight does not; "
            f"{nearest}"
        )
    return {
        layer: constant_factors([nearest_constant(one, 2) for one in row])
        for layer, row in enumerate(grid)
        if not all(one.is_identity for one in row)
    }
