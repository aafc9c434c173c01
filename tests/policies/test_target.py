"""β solved per row: against bisection, at the ends of its range, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.stats.statistics import dense_stats
from tests.policies.rows import beta_of


def entropy(rows: Tensor) -> Tensor:
    """Σ −p·ln p, which shares nothing with the package."""
    log_p = rows.double().log_softmax(-1)
    return -(log_p.exp() * log_p.clamp_min(-1e6)).sum(-1)


def bisect(rows: Tensor, target: float, floor: float = 1.0, ceiling: float = 1e4) -> Tensor:
    """β by eighty halvings of the whole range, without a derivative."""
    x = rows.double() - rows.double().amax(-1, keepdim=True)
    low = torch.full(x.shape[:-1], math.log(floor), dtype=torch.float64)
    high = torch.full(x.shape[:-1], math.log(ceiling), dtype=torch.float64)
    for _ in range(80):
        middle = (low + high) / 2
        above = entropy(x * middle.exp()[..., None]) > target
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return ((low + high) / 2).exp()


def wild(n: int) -> dict[str, Tensor]:
    """Rows that have little in common."""
    steps = torch.arange(n, dtype=torch.float64)
    return {
        "normal": torch.randn(n, dtype=torch.float64),
        "uniform ±1000": (torch.rand(n, dtype=torch.float64) * 2 - 1) * 1e3,
        "almost uniform": torch.randn(n, dtype=torch.float64) * 1e-3,
        "barely uniform": torch.randn(n, dtype=torch.float64) * 0.03,
        "a straight line": -steps * 0.01,
        "heavy tail": torch.randn(n, dtype=torch.float64).exp(),
        "two crowds": torch.randn(n, dtype=torch.float64) * 0.05 - 20 * (steps > 9),
        "two crowds, far": torch.randn(n, dtype=torch.float64) * 0.05 - 900 * (steps > 30),
        "one up": 0.1 * (steps == 3),
        "two tied at the top": torch.where(steps < 2, 3.0, torch.randn(n, dtype=torch.float64)),
        "all tied": torch.zeros(n, dtype=torch.float64),
        "ties in levels": -(steps // 4),
        "large and shifted": torch.randn(n, dtype=torch.float64) + 1e6,
        "sharp already": -40.0 * steps,
    }


class TestSolution:
    @pytest.mark.parametrize("n", [2, 3, 50, 4096])
    @pytest.mark.parametrize("target", [0.05, 0.5, 1.0, 3.0])
    def test_against_bisection(self, n, target):
        rows = torch.stack(list(wild(n).values()))
        beta, want = beta_of(EntropyTarget(target), rows), bisect(rows, target)
        x = rows - rows.amax(-1, keepdim=True)
        reached = entropy(x * beta[..., None])
        inside = (want > 1 + 1e-9) & (want < 1e4 * (1 - 1e-9))
        assert ((reached - target).abs() < 1e-5)[inside].all()
        # Where entropy hardly changes with β, β itself is not determined; everywhere else it has to be the same one.
        slope = entropy(x * want[..., None] * 0.99) - entropy(x * want[..., None] * 1.01)
        steep = inside & (slope > 1e-4)
        assert ((beta / want - 1).abs() < 1e-5)[steep | ~inside].all()
        if n > 50:
            assert steep.sum() >= 4

    @given(
        st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30)
        | st.lists(st.floats(-3, 3), min_size=2, max_size=30)
        | st.lists(st.integers(0, 3).map(float), min_size=2, max_size=30),
        st.floats(0.01, 3.5),
    )
    @settings(max_examples=100)
    def test_any_row(self, row, target):
        rows = torch.tensor(row, dtype=torch.float64)
        beta = beta_of(EntropyTarget(target), rows)
        reached = entropy((rows - rows.max()) * beta)
        assert 1.0 <= beta <= 1e4 * (1 + 1e-12)
        if entropy(rows) <= target:
            assert beta == 1.0 or abs(float(reached) - target) < 1e-5
        elif entropy((rows - rows.max()) * 1e4) >= target:
            assert beta == pytest.approx(1e4, rel=1e-5) or abs(float(reached) - target) < 1e-5
        else:
            assert abs(float(reached) - target) < 1e-5


class TestEnds:
    def test_a_target_above_ln_n_ends_at_the_floor(self):
        rows = torch.tensor([[3.0, 0.0, 1.0]], dtype=torch.float64)
        assert beta_of(EntropyTarget(2.0, floor=0.25), rows).item() == pytest.approx(0.25, rel=1e-5)
        assert beta_of(EntropyTarget(2.0), rows).item() == 1.0

    @pytest.mark.parametrize("ceiling", [3.0, 100.0, 1e4])
    def test_exact_ties_end_at_the_ceiling(self, ceiling):
        rows = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
        beta = beta_of(EntropyTarget(0.5, ceiling=ceiling), rows)
        assert beta.tolist() == pytest.approx([ceiling] * 2, rel=1e-5)
        assert (beta <= ceiling * (1 + 1e-12)).all()

    @pytest.mark.parametrize(("floor", "ceiling"), [(2.0, 5.0), (0.1, 0.5), (1.0, 1.5)])
    def test_a_range_that_does_not_hold_1_or_the_solution(self, floor, ceiling):
        rows = torch.randn(20, 30, dtype=torch.float64) * torch.linspace(0.3, 4, 20).double()[:, None]
        beta = beta_of(EntropyTarget(0.9, floor=floor, ceiling=ceiling), rows)
        torch.testing.assert_close(beta, bisect(rows, 0.9, floor, ceiling), rtol=1e-5, atol=0)


class TestGradient:
    """dβ/ds = −(∂H/∂s)/(∂H/∂β), against finite differences of the solution."""

    @pytest.mark.parametrize("policy", [EntropyTarget(0.6), EntropyTarget(1.9, floor=0.1), EntropyTarget(0.6, 1, 1.5)])
    def test_second_derivatives(self, policy):
        """Of rows that are solved, and of those that an end of the range holds."""
        rows = (torch.randn(4, 6, dtype=torch.float64) * torch.linspace(0.5, 3, 4)[:, None]).requires_grad_()
        for function in (lambda x: beta_of(policy, x), lambda x: sm.softmax(x, policy=policy)):
            assert torch.autograd.gradgradcheck(function, (rows,), atol=1e-6, rtol=1e-5, fast_mode=True)

    @pytest.mark.parametrize("masked", [False, True])
    def test_second_derivatives_of_attention(self, masked):
        """The reference has them, float mask included; what measures rows in parts says that it has none."""
        inputs = [torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 5, 5)]
        if masked:
            inputs.append(torch.randn(3, 5, dtype=torch.float64, requires_grad=True))

        def attend(impl: Any) -> Any:
            def out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
                found: Tensor = sm.attention(2 * q, k, v, attn_mask=mask, policy=EntropyTarget(0.5), impl=impl)
                return found

            return out

        with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels have first derivatives only, and say so
            assert torch.autograd.gradgradcheck(attend("reference"), inputs, fast_mode=True)
            first = torch.autograd.grad(attend("streaming")(*inputs).square().sum(), inputs[0], create_graph=True)[0]
            with pytest.raises(UnsupportedError, match="use impl='reference'"):
                first.sum().backward()


class TestStepsOfEntropyTarget:
    """How often rows are measured again: every time costs as much as the attention itself."""

    def measured(self, policy, rows):
        visible, calls = torch.ones_like(rows, dtype=torch.bool), []

        def remeasure(beta):
            calls.append(beta)
            return dense_stats(rows * beta[..., None], visible)

        policy.beta(dense_stats(rows, visible), remeasure)
        return len(calls)

    @pytest.mark.parametrize("target", [0.1, 0.5, 1.0, 2.0])
    def test_newton_needs_few_steps(self, target):
        rows = torch.randn(30, 200, dtype=torch.float64) * torch.linspace(0.5, 4, 30, dtype=torch.float64)[:, None]
        assert self.measured(EntropyTarget(target), rows) <= 14

    def test_a_row_just_under_its_target_stays_at_the_floor(self):
        """So close that one more Newton step would be taken, were it not for the end."""
        row = torch.randn(1, 20, dtype=torch.float64, requires_grad=True)
        here = float(dense_stats(row, torch.ones_like(row, dtype=torch.bool)).entropy.detach())
        beta = beta_of(EntropyTarget(here + 1e-4), row)
        assert beta.item() == 1.0
        (gradient,) = torch.autograd.grad(beta.sum(), row)
        assert gradient.abs().max() == 0.0

    def test_a_row_whose_target_is_just_beyond_the_ceiling_stays_under_it(self):
        torch.manual_seed(0)
        row = torch.randn(1, 20, dtype=torch.float64)
        there = float(dense_stats(2.0 * row, torch.ones_like(row, dtype=torch.bool)).entropy)
        assert beta_of(EntropyTarget(there - 1e-4, ceiling=2.0), row).item() == pytest.approx(2.0, abs=1e-12)
