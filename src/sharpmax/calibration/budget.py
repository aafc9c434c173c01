"""The budget: how much a policy may raise perplexity on text and on the model's own answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.calibration.data import FOLDABLE, RegularisationData, policy_from
from sharpmax.calibration.replication import judge_replicated
from sharpmax.errors import reject
from sharpmax.integrations.transformers.application import applied
from sharpmax.models.scoring import Reply, judge, window_losses
from sharpmax.policies.per_head import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHAT = "chat"
"""The name of the model's own answers among the lengths of text."""

MAX_BUDGET = 0.5

_HALVINGS = 5
_BEYOND = (1.15, 1.3)

Losses = Mapping[str, Sequence[float]]
"""By name of the data (a length of text, or `CHAT`): the loss of each window per token, of each answer as a sum."""


def check_budget(budget: float) -> float:
    """Return the budget as a share. 1 is refused: it is more likely meant as 1% than as 100%."""
    if not 0.0 < budget <= MAX_BUDGET:
        hint = f"write {budget / 100:g} for {budget:g}%" if MAX_BUDGET < budget < math.inf else ""
        reject("budget", budget, f"a rise of perplexity above 0 and up to {MAX_BUDGET:g}, as 0.01 for 1%", hint)
    return budget


def percent(rise: float) -> float:
    """Convert a rise of the loss in nats to a rise of perplexity in percent."""
    return 100.0 * math.expm1(rise)


def item_losses(model: PreTrainedModel, data: RegularisationData) -> dict[str, list[float]]:
    """The losses of every item of regularisation data."""
    with torch.no_grad():
        losses = {str(n): [float(window_losses(model, [one])) for one in pieces] for n, pieces in data.text.items()}
    losses[CHAT] = [one.nll for one in judge(model, data.answers)]
    return losses


@dataclass(frozen=True)
class Budget:
    """Baseline losses on held-out regularisation data, and the rise of perplexity that is allowed, as a share."""

    data: RegularisationData
    limit: float
    baseline: Losses

    @classmethod
    def of(cls, model: PreTrainedModel, data: RegularisationData, limit: float) -> Budget:
        """Measure the model as it is now as the baseline."""
        baseline = item_losses(model, data)
        for name, losses in baseline.items():
            if not all(map(math.isfinite, losses)):
                reject("model", f"a loss on {name} that is not finite", "a model with finite losses", "try float32")
        return cls(data, check_budget(limit), baseline)

    @property
    def nats(self) -> float:
        """The allowed rise of the loss, in nats per token."""
        return math.log1p(self.limit)

    def rises(self, model: PreTrainedModel) -> dict[str, float]:
        """The rise of each loss over the baseline, in nats per token."""
        now = item_losses(model, self.data)
        rises = {name: (sum(now[name]) - sum(losses)) / len(losses) for name, losses in self.baseline.items()}
        rises[CHAT] *= len(self.data.answers) / sum(one.tokens for one in self.data.answers)
        return rises

    def holds(self, rises: Mapping[str, float]) -> bool:
        """Whether no loss rises by more than is allowed; NaN exceeds the budget."""
        return all(rise <= self.nats for rise in rises.values())


@dataclass(frozen=True)
class Candidate:
    """A policy of one kind that stays within the budget, with its loss and accuracy on the test set."""

    kind: str
    policy: PerHead
    strength: float
    rises: Mapping[str, float]
    """Rise of the loss on each part of the held-out regularisation data, in nats per token."""

    nll: float
    accuracy: float

    @property
    def foldable(self) -> bool:
        """Whether the policy can be folded into the weights."""
        return self.kind == FOLDABLE

    @property
    def modified_heads(self) -> int:
        """How many heads have a temperature of their own."""
        return self.policy.modified_heads

    def __repr__(self) -> str:
        return f"Candidate({self.kind!r}, accuracy={self.accuracy:.3f}, modified_heads={self.modified_heads})"


def select_best(
    model: PreTrainedModel, kind: str, coefficients: Tensor, budget: Budget, test_set: Sequence[Reply]
) -> Candidate | None:
    """Return the policy at the strength with the lowest test loss within the budget, or None if none is within it.

    A policy that exceeds the budget is weakened by bisection. One within it is strengthened while the loss falls.
    """

    def at(strength: float) -> Candidate | None:
        policy = policy_from(kind, coefficients, strength)
        if policy.is_identity:  # too weak to survive the rounding of the coefficients
            return None
        with applied(model, policy, skip_unsupported=True):
            rises = budget.rises(model)
            if not budget.holds(rises):
                return None
            nll, accuracy = evaluate_replies(model, test_set)
        return Candidate(kind, policy, strength, rises, nll, accuracy) if math.isfinite(nll) else None

    best = at(1.0)
    if best is None:
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            candidate = at(middle)
            low, high, best = (low, middle, best) if candidate is None else (middle, high, candidate)
        return best
    for strength in _BEYOND:
        candidate = at(strength)
        if candidate is None or not candidate.nll < best.nll:
            break
        best = candidate
    return best


def evaluate_replies(model: PreTrainedModel, replies: Sequence[Reply]) -> tuple[float, float]:
    """The mean loss of replies and the accuracy: the share that greedy decoding would give."""
    judged = judge_replicated(model, replies)
    return sum(one.nll for one in judged) / len(judged), sum(one.right for one in judged) / len(judged)
