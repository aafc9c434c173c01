"""Softmax, and softmax at a temperature that depends on the row."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from sharpmax.attention.normalisers.base import Normaliser, live_softmax
from sharpmax.policies import Policy, resolve_policy
from sharpmax.policies.base import check_number
from sharpmax.rows.dense import centred, dense_stats

__all__ = ["Adaptive", "ScalableSoftmax", "Softmax"]


class Softmax(Normaliser):
    """exp(s)/Σ exp(s) over the visible keys.

    >>> Softmax()(torch.zeros(1, 4), torch.zeros(2, 4))
    tensor([[0.5000, 0.5000]])
    """

    name: ClassVar[str] = "softmax"
    disperses: ClassVar[str] = "yes: with logits of spread δ no key among n gets more than e^δ/(e^δ + n − 1)"
    can_disperse: ClassVar[bool] = True

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Softmax over the live keys."""
        return live_softmax(logits, live)


class Adaptive(Normaliser):
    """softmax(β·s) with β from the row's own statistics by a policy; gradients go through β too.

    Per-head policies take the third axis from the end for the heads, `[..., H, Lq, Lk]`.

    >>> q, k = torch.tensor([[1.0]]), torch.tensor([[0.5], [-0.5], [-0.5], [-0.5]])
    >>> Adaptive("none")(q, k)
    tensor([[0.4754, 0.1749, 0.1749, 0.1749]])
    >>> Adaptive("paper")(q, k)
    tensor([[0.6301, 0.1233, 0.1233, 0.1233]])
    """

    name: ClassVar[str] = "adaptive"
    disperses: ClassVar[str] = (
        "yes with the paper's polynomial: β ≤ 2.42, and 1 beyond H = 5.94; not if a policy holds the entropy"
    )
    can_disperse: ClassVar[bool] = True

    policy: Policy

    def __init__(self, policy: Policy | str | None = "paper") -> None:
        super().__init__()
        self.policy = resolve_policy(policy)

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """β from the dense statistics of each row, then softmax of the scaled row."""
        # Relative to the row's maximum, so that β does not multiply a common offset into the rounding.
        relative, _ = centred(logits, live)
        beta = self.policy.beta(dense_stats(logits, live), lambda at: dense_stats(at[..., None] * relative, live))
        return live_softmax(beta[..., None] * relative, live)

    def extra_repr(self) -> str:
        """The policy in one line."""
        return self.policy.describe()


class ScalableSoftmax(Normaliser):
    """softmax(s·ln n·logits): n is the number of keys the row sees, s a learnable scalar (Nakanishi, 2025).

    It starts at s = 1/ln 16, where a row of 16 keys is plain softmax.

    >>> k = torch.tensor([[2.0], [1.0]])
    >>> ScalableSoftmax(s=1 / math.log(2))(torch.tensor([[1.0]]), k).detach()
    tensor([[0.7311, 0.2689]])
    """

    name: ClassVar[str] = "ssmax"
    disperses: ClassVar[str] = (
        "yes while s·δ < 1: a leader by δ has weight about n^(s·δ − 1); no beyond, where it goes to 1"
    )
    can_disperse: ClassVar[bool] = True

    def __init__(self, s: float = 1.0 / math.log(16)) -> None:
        super().__init__()
        # In float64, so that logits of float64 meet all digits of it; `.to(dtype)` rounds it like any parameter.
        self.s = nn.Parameter(torch.tensor(check_number("s", s), dtype=torch.float64))

    def normalise(self, logits: Tensor, live: Tensor) -> Tensor:
        """Softmax at β = s·ln n, n counted over the live keys."""
        log_n = live.sum(-1, keepdim=True).to(logits.dtype).log()
        return live_softmax(self.s.to(logits.dtype) * log_n * logits, live)
