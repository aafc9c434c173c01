"""The last word of the leash: how much of a learned policy may be used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sharpmax.calibrate.crowd import judge_crowded
from sharpmax.calibrate.kinds import FOLDABLE, policy_from
from sharpmax.calibrate.leash import Leash
from sharpmax.hf import applied
from sharpmax.models.scoring import Reply
from sharpmax.policies import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Candidate", "examined", "strongest"]

_HALVINGS = 5
_BEYOND = (1.15, 1.3)


@dataclass(frozen=True)
class Candidate:
    """A policy of one kind that keeps to the leash, and how well it does on prompts that no step has seen."""

    kind: str
    policy: PerHead
    strength: float
    rises: Mapping[str, float]
    """Rise of the loss of each piece of held-out everyday material, in nats per token."""

    nll: float
    right: float
    """The share of right answers."""

    @property
    def foldable(self) -> bool:
        """Whether the policy can go into the weights."""
        return self.kind == FOLDABLE

    @property
    def touched(self) -> int:
        """How many heads have a temperature of their own."""
        return self.policy.touched


def strongest(
    model: PreTrainedModel, kind: str, coefficients: Tensor, leash: Leash, exam: Sequence[Reply]
) -> Candidate | None:
    """The policy at the strength that answers best among those that keep to the leash; None if hardly any does.

    A policy that breaks it is weakened by halving an interval. One that keeps to it may be strengthened for as long
    as answers become better.
    """
    full = _tried(model, kind, coefficients, 1.0, leash, exam)
    if full is None:
        low, high, best = 0.0, 1.0, None
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            tried = _tried(model, kind, coefficients, middle, leash, exam)
            low, high, best = (low, middle, best) if tried is None else (middle, high, tried)
        return best
    best = full
    for strength in _BEYOND:
        tried = _tried(model, kind, coefficients, strength, leash, exam)
        if tried is None or not tried.nll < best.nll:
            break
        best = tried
    return best


def _tried(
    model: PreTrainedModel, kind: str, coefficients: Tensor, strength: float, leash: Leash, exam: Sequence[Reply]
) -> Candidate | None:
    policy = policy_from(kind, coefficients, strength)
    if policy.is_identity:  # too little of it to be written down
        return None
    with applied(model, policy, skip_unsupported=True):
        rises = leash.rises(model)
        if not leash.holds(rises):
            return None
        nll, right = examined(model, exam)
    if not math.isfinite(nll):
        return None
    return Candidate(kind, policy, strength, rises, nll, right)


def examined(model: PreTrainedModel, exam: Sequence[Reply]) -> tuple[float, float]:
    """The mean loss of the replies of an exam, and the share of right ones."""
    judged = judge_crowded(model, exam)
    return sum(one.nll for one in judged) / len(judged), sum(one.right for one in judged) / len(judged)
