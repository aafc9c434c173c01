"""The budget: how much worse a policy may make a model on text and on its own answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.calibration.data import FOLDABLE, Everyday, policy_from
from sharpmax.calibration.replication import judge_crowded
from sharpmax.errors import reject
from sharpmax.integrations.transformers.application import applied
from sharpmax.models.scoring import Reply, judge, window_losses
from sharpmax.policies.per_head import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHAT = "chat"
"""The name of the answers among the lengths of text."""

MOST = 0.5
"""The longest leash, as a share."""


def check_leash(leash: float) -> float:
    """A leash as a share, or an error: 1 is more likely meant as 1% than as 100%."""
    if not 0.0 < leash <= MOST:
        todo = f"write {leash / 100:g} for {leash:g}%" if MOST < leash < math.inf else ""
        reject("leash", leash, f"a rise of perplexity above 0 and up to {MOST:g}, as 0.01 for 1%", todo)
    return leash


def percent(rise: float) -> float:
    """A rise of the loss in nats as a rise of perplexity in percent."""
    return 100.0 * math.expm1(rise)


Losses = Mapping[str, Sequence[float]]
"""For each piece of everyday material the losses of its items: a window's per token, an answer's as a sum."""


@dataclass(frozen=True)
class Leash:
    """The losses of a model as it comes on everyday material, and the rise that is allowed."""

    material: Everyday
    limit: float
    base: Losses

    @classmethod
    def of(cls, model: PreTrainedModel, material: Everyday, limit: float) -> Leash:
        """Measure the model as it is now: the one to compare with."""
        base = item_losses(model, material)
        for name, losses in base.items():
            if not all(map(math.isfinite, losses)):
                reject("model", f"a loss on {name} that is not finite", "a model with finite losses", "try float32")
        return cls(material, check_leash(limit), base)

    @property
    def room(self) -> float:
        """The rise allowed, in nats per token."""
        return math.log1p(self.limit)

    def rises(self, model: PreTrainedModel) -> dict[str, float]:
        """By how much the loss of each piece is above that of the model as it comes, in nats per token."""
        now = item_losses(model, self.material)
        rises = {name: (sum(now[name]) - sum(losses)) / len(losses) for name, losses in self.base.items()}
        rises[CHAT] *= len(self.material.answers) / sum(one.tokens for one in self.material.answers)
        return rises

    def holds(self, rises: Mapping[str, float]) -> bool:
        """Whether no piece rises by more than is allowed; NaN is a rise."""
        return all(rise <= self.room for rise in rises.values())


def item_losses(model: PreTrainedModel, material: Everyday) -> dict[str, list[float]]:
    """The losses of every item of everyday material."""
    with torch.no_grad():
        losses = {str(n): [float(window_losses(model, [one])) for one in pieces] for n, pieces in material.text.items()}
    losses[CHAT] = [one.nll for one in judge(model, material.answers)]
    return losses


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
