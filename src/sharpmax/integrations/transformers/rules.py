"""From a policy to the rules of a layer: which heads, which statistics, which β."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import reject
from sharpmax.policies.base import Policy, Remeasure, Said
from sharpmax.policies.per_head import PerHead, side_by_side
from sharpmax.stats.statistics import RowStats

T = TypeVar("T")


class Rule(Protocol):
    """What decides β in some heads of one layer: what `interface.install` puts into a layer."""

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads this rule speaks for, ascending; None for every head of the layer."""

    @property
    def needs(self) -> frozenset[str]:
        """The statistics `beta` reads; without any, β depends on the head alone and nothing is measured."""

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """β that broadcasts to `[B, heads, Lq]`.

        `stats` holds at least what `needs` names, in shapes that broadcast to `[B, heads, Lq]`, on the device of the
        queries; without needs it is one row of two keys, standing for any. `remeasure` (statistics at another β per
        row) comes with every need beyond the count.
        """


class PolicyRule:
    """Policies of one kind, one per head or one for all, as a `Rule`; what they hold is laid side by side once."""

    def __init__(self, policies: Sequence[Policy], heads: tuple[int, ...] | None, said: Said | None = None) -> None:
        alike = all(policy == policies[0] for policy in policies)
        self.policies = (policies[0],) if alike else tuple(policies)
        self.heads = heads
        self.said = Said() if said is None else said
        self.needs = self.policies[0].needs
        self._joined = _Kept[Policy]()
        self._constant = _Kept[Tensor]()

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """What the policies say of the rows."""
        device = stats.count.device
        if not self.needs:
            return self._constant.on(device, lambda: self._beta(stats, None))
        return self._beta(stats, remeasure)

    def _beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        count = stats.count
        policy = self.policies[0]
        if len(self.policies) > 1:
            policy = self._joined.on(count.device, lambda: self._side_by_side(count))
        if count.shape[-1] > 1:
            self._warn_outside(policy, stats)
        beta: Tensor = policy.rule(ops_for(count), stats, remeasure)
        return beta.masked_fill(count <= 1, 1.0)

    def _side_by_side(self, count: Tensor) -> Policy:
        xp = ops_for(count)
        joined = side_by_side(xp, self.policies, torch.empty(0, dtype=xp.widest, device=count.device))
        if joined is None:
            reject("policy", f"heads of different shapes: {self.policies}", "policies of one kind and shape")
        return joined

    def _warn_outside(self, policy: Policy, stats: RowStats) -> None:
        """Rows outside the fitted range are reported where a prompt is read, not at every generated token."""
        if not policy.reads or policy.fitted_range is None:
            return
        values = getattr(stats, policy.reads)
        if ops_for(values).concrete(values) and bool(policy.outside(values, stats).any()):
            for place, one in enumerate(self.policies):
                one.warn_outside(stats if len(self.policies) == 1 else stats.map(_head_at(place)), self.said)


class _Kept(dict[torch.device, T]):
    """Values made once per device, and outside of any mode that would keep them from being used again."""

    def on(self, device: torch.device, make: Callable[[], T]) -> T:
        if torch.compiler.is_compiling():
            return self[device] if device in self else make()
        if device not in self:
            with torch.inference_mode(False):
                self[device] = make()
        return self[device]


def _head_at(place: int) -> Callable[[Tensor], Tensor]:
    return lambda array: array[..., min(place, array.shape[-2] - 1), :]


def check_shape(policy: Policy, layers: Sequence[int], model: str) -> None:
    """Refuse a grid of policies made for another architecture; `layers` holds each layer's number of heads."""
    if not isinstance(policy, PerHead):
        return
    if policy.layers != len(layers) or any(heads != policy.heads for heads in layers):
        found = f"{len(layers)} × {'/'.join(str(h) for h in sorted(set(layers)))}"
        reject(
            "policy",
            f"{policy.layers} layers × {policy.heads} heads",
            f"{found}, the attention layers × heads of {model}",
            "calibrate a policy for this model",
        )


def rules_of(policy: Policy, layer: int, said: Said | None = None) -> tuple[Rule, ...]:
    """The rules of one layer; none where the policy leaves all of it alone. `said` is shared by those of a model."""
    if not isinstance(policy, PerHead):
        return () if policy.is_identity else (PolicyRule([policy], None, said),)
    heads = policy.policies[layer]
    if all(one.is_identity for one in heads):
        return ()
    groups: dict[Any, list[int]] = {}
    # Where every head is constant, those left alone are constants of 1: one product then serves the whole layer.
    whole = len({type(one) for one in heads}) == 1 and not any(one.needs for one in heads)
    for head, one in enumerate(heads):
        if whole or not one.is_identity:
            groups.setdefault(_shape_of(one), []).append(head)
    return tuple(
        PolicyRule([heads[h] for h in group], None if len(group) == len(heads) else tuple(group), said)
        for group in groups.values()
    )


def _shape_of(policy: Policy) -> tuple[Any, ...]:
    """What two policies must share to be computed together: their kind, what they read, everything but numbers."""
    values = (getattr(policy, field.name) for field in dataclasses.fields(policy))
    return (
        type(policy),
        policy.needs,
        *(float if isinstance(value, float) else len(value) if isinstance(value, tuple) else value for value in values),
    )
