"""A policy of your own, and a small attention head trained with it on max retrieval among 5 to 16 items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import sharpmax as sm
from sharpmax.policies.base import Policy
from sharpmax.tasks.sized import CLASSES, FEATURES, draw


@dataclass(frozen=True)
class TopWeight(Policy):
    """β = 1 + strength·(1 − largest weight): the less weight the best item has, the sharper."""

    kind: ClassVar[str] = "example-top-weight"
    needs: ClassVar[frozenset[str]] = frozenset({"max", "lse"})
    strength: float = 4.0

    def describe(self) -> str:
        return f"β = 1 + {self.strength:g}·(1 − largest weight)"

    def rule(self, xp: Any, stats: Any, remeasure: Any) -> Any:
        return 1.0 + self.strength * (1.0 - xp.exp(stats.max - stats.lse))


class Head(nn.Module):
    """One attention head over a set: a logit and a value for each item."""

    def __init__(self, policy: Policy | None, width: int = 64) -> None:
        super().__init__()
        self.items = nn.Sequential(nn.Linear(FEATURES, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.score, self.classes = nn.Linear(width, 1), nn.Linear(width, CLASSES)
        self.policy = policy

    def forward(self, items: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        h = self.items(items)
        weights = sm.softmax(self.score(h)[..., 0], policy=self.policy, mask=visible)  # gradients flow through β
        found: torch.Tensor = self.classes((weights[..., None] * h).sum(-2))
        return found


def trained(policy: Policy | None, steps: int = 250) -> Head:
    torch.manual_seed(0)
    head, generator = Head(policy), torch.Generator().manual_seed(0)
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(steps):
        sets = draw((128,), (5, 16), generator)
        loss = nn.functional.cross_entropy(head(sets.items, sets.visible), sets.answer)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head


print("a policy is a value, and a file:", TopWeight().to_json().replace("\n", " "))
print("accuracy in percent\nitems           16     64    256   1024")
for label, policy in (("plain", None), ("top weight", TopWeight()), ("paper", sm.load_policy("paper"))):
    head = trained(policy)
    right = []
    for n in (16, 64, 256, 1024):
        sets = draw((256,), n, torch.Generator().manual_seed(n))
        with torch.no_grad():
            right.append(float((head(sets.items, sets.visible).argmax(-1) == sets.answer).float().mean()))
    print(f"{label:11s}", *(f"{100 * share:6.1f}" for share in right))
