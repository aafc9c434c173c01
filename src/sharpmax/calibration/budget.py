"""The budget: the largest KL divergence of a model's predictions under a policy, in nats per token on every domain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.calibration.data import Domain, TrainingPrompts, judge_replicated
from sharpmax.calibration.learnable import FOLDABLE, policy_from
from sharpmax.errors import reject
from sharpmax.integrations.transformers.application import applied
from sharpmax.models.scoring import Places, Reply, batches
from sharpmax.policies.per_head import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_BUDGET = 1.0

HELD_OUT_FACTOR = 1.3
"""The budget of a domain that is not trained on, as a multiple of `budget`."""

MAX_ROWS = 1024
"""The number of predictions whose logits are in memory at once."""

_MAX_TRIES = 6
_TARGET_SHARE = 0.97
_MAX_STRENGTH = 1.4


def check_budget(budget: float) -> float:
    """Return the budget in nats per token, or refuse it."""
    if not 0.0 < budget <= MAX_BUDGET:
        reject("budget", budget, f"a KL divergence above 0 and up to {MAX_BUDGET:g} nats per token, as 0.01")
    return budget


def percent(rise: float) -> float:
    """Convert a rise of the loss in nats to a rise of perplexity in percent."""
    return 100.0 * math.expm1(rise)


@dataclass(frozen=True)
class Change:
    """The change of the predictions on a domain, in nats per token: KL divergence, and the rise of the loss."""

    kl: float
    rise: float


@dataclass(frozen=True)
class TrainingSetup:
    """The frozen model, the prompts and domains of a calibration, and its budget."""

    model: PreTrainedModel
    prompts: TrainingPrompts
    domains: Sequence[Domain]
    budget: float  # in nats per token
    most_tokens: int  # to read at once

    def changes(self, policy: PerHead) -> dict[str, Change]:
        """The change on the validation part of each domain."""
        return {domain.name: self._change(policy, domain) for domain in self.domains}

    def _change(self, policy: PerHead, domain: Domain) -> Change:
        kl = rise = count = 0.0
        with torch.no_grad():
            for batch in batches(domain.validation, self.most_tokens, most_rows=MAX_ROWS):
                replies = [domain.validation[i] for i in batch]
                places = Places.of(replies, self.model.device, MAX_ROWS, f"{domain.name}/{batch[0]}")
                before = places.logits(self.model)
                with applied(self.model, policy, skip_unsupported=True):
                    after = places.logits(self.model)
                kl += float(places.divergences(before, after).sum())
                rise += float((places.losses(after) - places.losses(before)).sum())
                count += places.count
        return Change(kl / count, rise / count)

    def used(self, changes: Mapping[str, Change]) -> float:
        """The largest divergence as a share of the budget of its domain; infinite if a divergence is not finite."""
        limits = {one.name: self.budget * (1 if one.trained else HELD_OUT_FACTOR) for one in self.domains}
        shares = [changes[name].kl / limit for name, limit in limits.items()]
        return max(share if math.isfinite(share) else math.inf for share in shares)


@dataclass(frozen=True)
class Candidate:
    """A policy of one kind that stays within the budget, with its loss and accuracy on the validation prompts."""

    kind: str
    policy: PerHead
    strength: float
    changes: Mapping[str, Change]
    """By domain, on text that was not trained on."""

    nll: float
    accuracy: float

    @property
    def foldable(self) -> bool:
        """Whether the policy can be folded into the weights."""
        return self.kind in FOLDABLE

    @property
    def modified_heads(self) -> int:
        """The number of heads whose temperature changes."""
        return self.policy.modified_heads

    def __repr__(self) -> str:
        return f"Candidate({self.kind!r}, accuracy={self.accuracy:.3f}, modified_heads={self.modified_heads})"


def select_best(setup: TrainingSetup, kind: str, coefficients: Tensor, validation: Sequence[Reply]) -> Candidate | None:
    """Return the policy at the strength that uses the budget, or None if none is within it.

    Divergence grows with about the square of the strength, so a few measurements find where it meets the budget. A
    policy within the budget is strengthened only if that lowers the loss of the validation prompts.
    """
    found: list[Candidate] = []
    strength = 1.0
    for _ in range(_MAX_TRIES):
        policy = policy_from(kind, coefficients, strength)
        if policy.is_identity:  # too weak to survive the rounding of the coefficients
            break
        changes = setup.changes(policy)
        used = setup.used(changes)
        if used <= 1.0:
            with applied(setup.model, policy, skip_unsupported=True):
                nll, accuracy = evaluate_replies(setup.model, validation)
            if math.isfinite(nll):
                found.append(Candidate(kind, policy, strength, changes, nll, accuracy))
            if strength != 1.0 or used > _TARGET_SHARE**4:
                break
        step = _TARGET_SHARE * math.sqrt(1.0 / used) if math.isfinite(used) and used > 0 else 0.5
        strength = min(strength * step, _MAX_STRENGTH)
    return min(found, key=lambda one: one.nll, default=None)


def evaluate_replies(model: PreTrainedModel, replies: Sequence[Reply]) -> tuple[float, float]:
    """The mean loss of replies, and the share of them that greedy decoding gives."""
    judged = judge_replicated(model, replies)
    return sum(one.nll for one in judged) / len(judged), sum(one.right for one in judged) / len(judged)
