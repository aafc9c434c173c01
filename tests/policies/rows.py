"""What the tests of policies share: β of given logits, and rows of a given entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sharpmax.policies.base import Policy
from sharpmax.stats.statistics import RowStats, centred, dense_stats


def beta_of(policy: Policy, logits: Tensor, visible: Tensor | None = None) -> Tensor:
    """β of every row of logits, as `sm.softmax` finds it."""
    visible = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible.expand(logits.shape)
    x, _ = centred(logits, visible)

    def remeasure(beta: Tensor) -> RowStats:
        return dense_stats(x * beta.to(x.dtype)[..., None], visible)

    found: Tensor = policy.beta(dense_stats(logits, visible), remeasure)
    return found


def rows_with(entropy: Any, count: int = 10**6) -> RowStats:
    """Rows that have the given entropies, for policies that read nothing else."""
    h = torch.as_tensor(entropy, dtype=torch.float64)
    zero = torch.zeros_like(h)
    return RowStats(torch.full(h.shape, count), max=zero, lse=h, mean=zero, var=zero)
