"""The leash: how much worse a model may become at what it does every day."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sharpmax.calibrate.material import Everyday
from sharpmax.errors import reject
from sharpmax.models.scoring import judge, window_losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CHAT", "MOST", "Leash", "Losses", "check_leash", "item_losses", "percent"]

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
