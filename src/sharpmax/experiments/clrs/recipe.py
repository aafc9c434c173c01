"""How a model is fine-tuned: everything that two arms have in common, and the policy in which they differ."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sharpmax.calibrate.kinds import KINDS
from sharpmax.errors import reject
from sharpmax.policies import Policy
from sharpmax.provenance import check_seed

__all__ = ["NONE", "WEIGHED", "Recipe"]

WEIGHED = ("tokens", "answers")

NONE = "none"
"""What stands for no policy."""


@dataclass(frozen=True)
class Recipe:
    """The settings of a fine-tuning."""

    policy: Policy | None = None
    """In every attention row of training and, beside the saved model, of evaluation; None is the model as it comes."""

    policy_name: str = NONE
    learn: str | None = None
    """The kind of policy whose numbers are learned with the weights, one per head, from β = 1 on."""

    steps: int | None = None
    epochs: float = 1.0
    """Passes over the data where `steps` does not say how long."""

    batch_tokens: int = 65_536
    """Tokens of one step, on all devices together."""

    row_tokens: int = 512
    """Tokens of a packed row; longer documents have rows of twice the room, or four times, and so on."""

    tokens_at_once: int = 16_384
    """Tokens that a device reads at once: of a larger batch, gradients are added up."""

    rate: float = 5e-4
    policy_rate: float = 1e-2
    warm_up: float = 0.05
    """The share of the steps in which the rate rises; then it falls along a cosine."""

    weight_decay: float = 0.01
    clip: float = 1.0
    weigh: str = "tokens"
    """What counts alike in the loss: tokens, or answers, of which a long one would otherwise count for many."""

    checkpointing: bool = False
    """Keep activations of whole layers only and compute the rest again: less memory, a third more work."""

    compiled: bool = False
    save_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for name, value, least in (
            ("--steps", self.steps, 1), ("--batch-tokens", self.batch_tokens, 1), ("--row-tokens", self.row_tokens, 2),
            ("--tokens-at-once", self.tokens_at_once, 1), ("--save-every", self.save_every, 1),
        ):  # fmt: skip
            if value is not None and value < least:
                reject(name, value, f"{least} or more")
        for name, number in (("--epochs", self.epochs), ("--lr", self.rate), ("--policy-lr", self.policy_rate)):
            if not 0.0 < number < float("inf"):
                reject(name, number, "a number above 0")
        if self.weigh not in WEIGHED:
            reject("--weigh", repr(self.weigh), f"one of {list(WEIGHED)}")
        if self.learn is not None and self.learn not in KINDS:
            reject("--learn-policy", repr(self.learn), f"one of {list(KINDS)}")
        if self.learn is not None and self.policy is not None:
            reject("--learn-policy", self.learn, "together with --policy none", "what is learned starts at β = 1")

    @property
    def group_tokens(self) -> int:
        """Tokens of a group, which a device reads at once."""
        return min(self.tokens_at_once, self.batch_tokens)

    @property
    def together(self) -> int:
        """Groups of one step, on all devices."""
        return round(self.batch_tokens / self.group_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"policy": None if self.policy is None else self.policy.to_dict()}
