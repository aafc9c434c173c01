"""ln β as a weighted sum: against numpy, within its bounds, head by head, with gradients, and in JAX."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.policies.base import with_columns
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.stats.statistics import RowStats, dense_stats
from tests.policies.rows import beta_of

NAMES = LogLinear.COEFFICIENTS


def by_numpy(row: np.ndarray, policy: LogLinear) -> float:
    """β of one row of float64 logits, written down from the definition and sharing nothing with the package."""
    n = len(row)
    if n < 2:
        return 1.0
    p = np.exp(row - row.max())
    p /= p.sum()
    h = -(p * np.log(np.where(p > 0, p, 1.0))).sum() / math.log(n)
    v = (p * row**2).sum() - (p * row).sum() ** 2
    longer, top = max(0.0, math.log(n / policy.reference)), p.max()
    features = {
        "level": 1.0, "length": longer, "entropy": h, "entropy2": h * h, "top": top, "top2": top * top,
        "var": math.log1p(v), "entropy_length": h * longer, "top_length": top * longer,
    }  # fmt: skip
    total = sum(getattr(policy, name) * feature for name, feature in features.items())
    return min(max(math.exp(total), policy.floor), policy.ceiling)


def random_policy(seed: int, **more: Any) -> LogLinear:
    values = np.random.default_rng(seed).normal(size=len(NAMES)) * 0.4
    return LogLinear(**dict(zip(NAMES, values.tolist(), strict=True)), **more)


def stats_of(logits: Tensor, visible: Tensor | None = None) -> RowStats:
    return dense_stats(logits, torch.ones_like(logits, dtype=torch.bool) if visible is None else visible)


@pytest.mark.parametrize("n", [1, 2, 3, 31, 32, 33, 700])
def test_against_numpy(n):
    for seed in range(6):
        policy = random_policy(seed, reference=[32.0, 2.0, 500.0][seed % 3])
        rows = torch.randn(4, n, dtype=torch.float64) * torch.tensor([[0.1], [1.0], [3.0], [9.0]])
        want = [by_numpy(row, policy) for row in rows.numpy()]
        np.testing.assert_allclose(beta_of(policy, rows).numpy(), want, rtol=1e-9)


class TestNeeds:
    @pytest.mark.parametrize("name", NAMES)
    def test_are_enough(self, name):
        """Whatever else is left unmeasured, β is the same."""
        rows = torch.randn(3, 20)
        whole, policy = stats_of(rows), LogLinear(**{name: 0.3}, reference=2.0)
        anchored = policy.needs & {"entropy", "max", "lse"}
        part = RowStats.anchored(
            whole.count,
            whole.max if anchored else None,
            whole.lse - whole.max if anchored else None,
            whole.max - whole.mean if "entropy" in policy.needs else None,
            max=whole.max if "max" in policy.needs else None,
            var=whole.var if "var" in policy.needs else None,
        )
        torch.testing.assert_close(policy.beta(part), policy.beta(whole), rtol=1e-6, atol=0)

    def test_identity_only_without_coefficients(self):
        assert LogLinear(reference=7.0, floor=0.5).is_identity
        assert LogLinear().needs == frozenset()
        assert torch.equal(beta_of(LogLinear(), torch.randn(3, 9)), torch.ones(3))
        for name in NAMES:
            assert not LogLinear(**{name: 1e-9}).is_identity


class TestValue:
    def test_json_says_no_more_than_it_has_to(self):
        """A model has hundreds of heads, and most coefficients are 0."""
        assert LogLinear(level=0.5).to_dict() == {"schema": 1, "kind": "log-linear", "level": 0.5}

    @pytest.mark.parametrize("strength", [0.0, 0.3, 1.0, 1.7])
    def test_strengthened_is_a_power_of_beta(self, strength):
        rows = torch.randn(6, 80, dtype=torch.float64) * 1.5
        for seed in range(4):
            policy = random_policy(seed, floor=1e-9, ceiling=1e9)
            power = beta_of(policy, rows) ** strength
            torch.testing.assert_close(beta_of(policy.strengthened(strength), rows), power, rtol=1e-10, atol=0)
            # A power of a β that was cut is not it: the bounds come after the power.
            bounded = dataclasses.replace(policy, floor=0.8, ceiling=1.25)
            within = power.clamp(0.8, 1.25)
            torch.testing.assert_close(beta_of(bounded.strengthened(strength), rows), within, rtol=1e-10, atol=0)


def test_a_coefficient_of_0_in_one_head_is_not_read_from_the_first():
    """Columns are laid side by side from the first head's fields: a 0 there must not switch the others off."""
    logits = torch.randn(1, 2, 3, 40, dtype=torch.float64)
    for name in NAMES:
        other = LogLinear(**{name: 0.5}, reference=2.0)
        beta = beta_of(PerHead(((LogLinear(reference=2.0), other),)), logits)
        assert torch.equal(beta[:, 0], torch.ones(1, 3, dtype=torch.float64)), name
        torch.testing.assert_close(beta[:, 1], beta_of(other, logits[:, 1]), rtol=1e-12, atol=0)
        assert (beta[:, 1] != 1.0).all(), name


def test_gradients_reach_the_columns():
    stats = stats_of(torch.randn(2, 3, 4, 25, dtype=torch.float64))
    columns = (0.2 * torch.randn(3, len(NAMES), dtype=torch.float64)).requires_grad_()

    def beta(numbers: Tensor) -> Tensor:
        fields = {name: numbers[:, i, None] for i, name in enumerate(NAMES)}
        found: Tensor = with_columns(LogLinear(reference=4.0), fields).rule(ops_for(stats.count), stats, None)
        return found

    assert torch.autograd.gradcheck(beta, (columns,))
    (gradient,) = torch.autograd.grad(beta(columns).sum(), columns)
    assert (gradient != 0).all()
