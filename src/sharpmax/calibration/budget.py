"""The budget: how far a policy may move a model's predictions, as KL divergence in nats per token on every domain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sharpmax.calibration.data import FOLDABLE, Domain, policy_from
from sharpmax.calibration.replication import judge_replicated
from sharpmax.errors import reject
from sharpmax.integrations.transformers.application import applied
from sharpmax.models.scoring import Places, Reply, batches
from sharpmax.policies.per_head import PerHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_BUDGET = 1.0

HELD_OUT_FACTOR = 1.3
"""A domain that is not trained on may diverge by so much more."""

_ROWS = 1024
"""Predictions of each text that are measured at most: whole logits of a long text would not fit into memory."""

_TRIES = 6
_AIM = 0.97
_BEYOND = 1.4


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
    """How a policy changes the predictions on a domain, in nats per token."""

    kl: float
    rise: float
    """Of the loss, which is the logarithm of perplexity."""


@dataclass(frozen=True)
class Budget:
    """The domains, and the divergence that is allowed on each."""

    domains: Sequence[Domain]
    limit: float
    most_tokens: int  # to read at once

    def changes(self, model: PreTrainedModel, policy: PerHead) -> dict[str, Change]:
        """What a policy changes on the validation part of each domain."""
        return {domain.name: self._change(model, policy, domain) for domain in self.domains}

    def _change(self, model: PreTrainedModel, policy: PerHead, domain: Domain) -> Change:
        kl = rise = count = 0.0
        with torch.no_grad():
            for batch in batches(domain.validation, self.most_tokens, most_rows=_ROWS):
                replies = [domain.validation[i] for i in batch]
                places = Places.of(replies, model.device, _ROWS, f"{domain.name}/{batch[0]}")
                before = places.logits(model)
                with applied(model, policy, skip_unsupported=True):
                    after = places.logits(model)
                kl += float(places.divergences(before, after).sum())
                rise += float((places.losses(after) - places.losses(before)).sum())
                count += places.count
        return Change(kl / count, rise / count)

    def used(self, changes: Mapping[str, Change]) -> float:
        """The largest divergence as a share of what is allowed there; infinite if one is not a number."""
        shares = [changes[one.name].kl / (self.limit * (1 if one.trained else HELD_OUT_FACTOR)) for one in self.domains]
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
        """How many heads have a temperature of their own."""
        return self.policy.modified_heads

    def __repr__(self) -> str:
        return f"Candidate({self.kind!r}, accuracy={self.accuracy:.3f}, modified_heads={self.modified_heads})"


def select_best(
    model: PreTrainedModel, kind: str, coefficients: Tensor, budget: Budget, prompts: Sequence[Reply]
) -> Candidate | None:
    """Return the policy at the strength that uses the budget, or None if none is within it.

    Divergence grows with about the square of the strength, so a few measurements find where it meets the budget. A
    policy within the budget is strengthened only if that lowers the loss of the validation prompts.
    """
    found: dict[float, Candidate] = {}
    strength = 1.0
    for _ in range(_TRIES):
        policy = policy_from(kind, coefficients, strength)
        if policy.is_identity:  # too weak to survive the rounding of the coefficients
            break
        changes = budget.changes(model, policy)
        used = budget.used(changes)
        if used <= 1.0:
            with applied(model, policy, skip_unsupported=True):
                nll, accuracy = evaluate_replies(model, prompts)
            if math.isfinite(nll):
                found[strength] = Candidate(kind, policy, strength, changes, nll, accuracy)
            if strength != 1.0 or used > _AIM**4:
                break
        step = _AIM * math.sqrt(1.0 / used) if math.isfinite(used) and used > 0 else 0.5
        strength = min(strength * step, _BEYOND)
    return min(found.values(), key=lambda one: one.nll, default=None)


def evaluate_replies(model: PreTrainedModel, replies: Sequence[Reply]) -> tuple[float, float]:
    """The mean loss of replies and the accuracy: the share that greedy decoding would give."""
    judged = judge_replicated(model, replies)
    return sum(one.nll for one in judged) / len(judged), sum(one.right for one in judged) / len(judged)
