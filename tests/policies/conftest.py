"""What the tests of policies share: β of given logits, and rows of a given entropy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sharpmax.policies.base import Policy
from sharpmax.stats.dense import centred, dense_stats
from sharpmax.stats.statistics import RowStats


def _beta_of(policy: Policy, logits: Tensor, visible: Tensor | None = None) -> Tensor:
    if visible is None:
        visible = torch.ones_like(logits, dtype=torch.bool)
    visible = visible.expand(logits.shape)
    x, _ = centred(logits, visible)
    beta: Tensor = policy.beta(
        dense_stats(logits, visible), lambda b: dense_stats(x * b.to(x.dtype)[..., None], visible)
    )
    return beta


def _rows_with(entropy: Tensor | float, count: int = 10**6) -> RowStats:
    h = torch.as_tensor(entropy, dtype=torch.float64)
    zero = torch.zeros_like(h)
    return RowStats(torch.full(h.shape, count), max=zero, lse=h, mean=zero, var=zero)


@pytest.fixture(scope="session")
def beta_of() -> Callable[..., Tensor]:
    """β of every row of logits, as `sm.softmax` finds it."""
    return _beta_of


@pytest.fixture(scope="session")
def rows_with() -> Callable[..., RowStats]:
    """Rows that have the given entropies, for policies that read nothing else."""
    return _rows_with
