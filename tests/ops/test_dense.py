"""`sm.entropy` and `sm.softmax`: exact arithmetic, invariances, gradients, edges, and known ways to get them wrong."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import sharpmax as sm
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial

COEFFICIENTS = (-0.037, 0.481, -2.3, 4.917, -1.791)
WIDE = st.lists(st.floats(-700, 700), min_size=1, max_size=40)
NARROW = st.lists(st.floats(-3, 3), min_size=1, max_size=40)
ONE_UP = st.builds(lambda gap, rest: [gap + max(rest), *rest], st.floats(0, 60), NARROW)

POLICIES: dict[str, Policy | None] = {
    "none": None,
    "paper": PAPER,
    "constant": Constant(1.7),
    "clamped": Polynomial((0.2, 0.9), fitted_on=(0.2, 5.0), threshold=0.1),
    "log-length": LogLength(3),
    "target": EntropyTarget(0.6),
    "curve": Curve((0.1, 0.9, 4.0), (1.0, 1.3, 3.0)),
    "log-linear": LogLinear(0.1, 0.2, 0.3, -0.2, 0.5, -0.3, 0.2, 0.1, 0.2, reference=2.0),
    "per-head": PerHead(((Constant(1.5), EntropyTarget(0.8)),)),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
low_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
# Rows outside a policy's range are met on purpose in many of these tests; the warning has tests of its own.
anywhere = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")


def double(row: Any) -> Tensor:
    return torch.as_tensor(row, dtype=torch.float64)


def exact(row: list[float], paper: bool = False) -> tuple[list[float], float]:
    """Weights and entropy (before sharpening) by definition, to fifty digits."""
    with mpmath.workdps(50):
        top = max(row)
        x = [mpmath.mpf(v) - mpmath.mpf(top) for v in row]
        weights = [mpmath.exp(v) for v in x]
        total = mpmath.fsum(weights)
        at = row.index(top)
        rest = mpmath.fsum(w for i, w in enumerate(weights) if i != at)
        entropy = mpmath.log1p(rest) - mpmath.fsum(w * v for w, v in zip(weights, x, strict=True)) / total
        if paper and entropy > mpmath.mpf("0.5"):
            beta = max(mpmath.mpf(1), mpmath.polyval([mpmath.mpf(c) for c in COEFFICIENTS], entropy))
            weights = [mpmath.exp(beta * v) for v in x]
            total = mpmath.fsum(weights)
        return [float(w / total) for w in weights], float(entropy)


def entropy_of_weights(p: Tensor) -> Any:
    return -torch.special.xlogy(p, p).sum(-1)


class TestAgainstFiftyDigits:
    @given(WIDE | NARROW | ONE_UP)
    @settings(max_examples=120)
    @example([0.0, -46.0])
    def test_plain_softmax_and_entropy(self, row):
        weights, entropy = exact(row)
        assert sm.softmax(double(row), policy=None).tolist() == pytest.approx(weights, rel=1e-13, abs=1e-300)
        assert sm.entropy(double(row)).item() == pytest.approx(entropy, rel=1e-12, abs=1e-300)

    @given(NARROW | ONE_UP | st.lists(st.floats(-60, 60), min_size=1, max_size=40))
    @settings(max_examples=120)
    @example([0.0] * 40)
    @example([0.0, 0.0])
    def test_the_papers_rule(self, row):
        weights, _ = exact(row, paper=True)
        assert sm.softmax(double(row), policy="paper").tolist() == pytest.approx(weights, rel=1e-11, abs=1e-300)


class TestLowPrecision:
    """The error is at most twice that of the plain computation in the same dtype, both against float64."""

    def rows(self, dtype: torch.dtype) -> Tensor:
        return (torch.randn(200, 80, dtype=torch.float64) * 3).to(dtype)

    def worst(self, got: Tensor, want: Tensor) -> float:
        return float((got.double() - want).abs().max())

    @low_dtype
    def test_plain_softmax(self, dtype):
        rows = self.rows(dtype)
        want = rows.double().softmax(-1)
        got = sm.softmax(rows, policy=None)
        assert got.dtype == dtype
        assert self.worst(got, want) <= 2 * self.worst(rows.softmax(-1), want)

    @low_dtype
    def test_entropy(self, dtype):
        rows = self.rows(dtype)
        want = sm.entropy(rows.double())
        plain = rows.logsumexp(-1) - (rows.softmax(-1) * rows).sum(-1)
        got = sm.entropy(rows)
        assert got.dtype == torch.float32
        assert self.worst(got, want) <= 2 * self.worst(plain, want)

    @low_dtype
    def test_the_papers_rule(self, dtype):
        rows = self.rows(dtype)
        want = sm.softmax(rows.double(), policy="paper")
        entropy = rows.logsumexp(-1, keepdim=True) - (rows.softmax(-1) * rows).sum(-1, keepdim=True)
        beta = torch.zeros_like(entropy)
        for c in COEFFICIENTS:
            beta = beta * entropy + c
        plain = (rows * torch.where(entropy > 0.5, beta.clamp_min(1.0), 1.0)).softmax(-1)
        assert self.worst(sm.softmax(rows, policy="paper"), want) <= 2 * self.worst(plain, want)


class TestInvariances:
    @settings(max_examples=40)
    @given(st.lists(st.integers(-(2**14), 2**14), min_size=1, max_size=40), st.integers(-(2**20), 2**20))
    def test_a_shift_changes_no_bit(self, parts, shift):
        """Multiples of 2⁻¹⁰ add without rounding, so there is nothing to forgive."""
        row = double(parts) / 1024
        for policy in (None, "paper", EntropyTarget(0.3)):
            assert torch.equal(sm.softmax(row + shift, policy=policy), sm.softmax(row, policy=policy))
        assert torch.equal(sm.entropy(row + shift), sm.entropy(row))

    @given(
        st.lists(st.floats(-8, 8), min_size=1, max_size=40),
        st.one_of(
            st.just(PAPER),
            st.builds(Constant, st.floats(1, 50)),
            st.builds(LogLength, st.floats(1.1, 100)),
            st.builds(EntropyTarget, st.floats(0, 4)),
            st.builds(
                lambda c, thr: Polynomial(tuple(c), (0.0, 5.0), thr),
                st.lists(st.floats(-5, 5), min_size=1, max_size=5),
                st.floats(0, 1),
            ),
            st.builds(lambda a, b: Curve((0.5, 2.0), (min(a, b), max(a, b))), st.floats(1, 9), st.floats(1, 9)),
        ),
    )
    @settings(max_examples=200)
    @anywhere
    def test_a_policy_with_beta_of_at_least_1_never_raises_entropy(self, row, policy):
        after = entropy_of_weights(sm.softmax(double(row), policy=policy))
        assert after <= sm.entropy(double(row)) + 1e-12


class TestGradients:
    def logits(self) -> Tensor:
        return (torch.randn(2, 3, 7, dtype=torch.float64) * 1.5).requires_grad_()

    def test_entropy(self):
        visible = torch.rand(2, 3, 7) < 0.8
        assert torch.autograd.gradcheck(lambda x: sm.entropy(x), (self.logits(),))
        assert torch.autograd.gradcheck(lambda x: sm.entropy(x, mask=visible), (self.logits(),))
        assert torch.autograd.gradcheck(lambda x: sm.entropy(x, dim=1), (self.logits(),))

    @every_policy
    def test_softmax(self, policy):
        x = self.logits()
        assert torch.autograd.gradcheck(lambda x: sm.softmax(x, policy=policy), (x,))
        assert torch.autograd.gradgradcheck(lambda x: sm.softmax(x, policy=policy), (x,), fast_mode=True)
        if policy is not None:
            # The gradient through β is part of it: with β held fixed the result is another one.
            def gradient(through_beta: bool) -> Tensor:
                p = sm.softmax(x, policy=policy)
                if not through_beta:
                    low = x.detach().argmin(-1, keepdim=True)
                    shift = x.detach() - x.detach().gather(-1, low)
                    slope = (p.log() - p.log().gather(-1, low)).detach()
                    beta = slope.sum(-1, keepdim=True) / shift.sum(-1, keepdim=True)
                    p = (beta * x).softmax(-1)
                return torch.autograd.grad(p[..., 0].sum(), x)[0]

            same = torch.allclose(gradient(True), gradient(False), rtol=1e-6)
            assert same == isinstance(policy, (Constant, LogLength))

    @every_policy
    def test_masked_rows_and_masked_nans(self, policy):
        x = self.logits().detach()
        visible = torch.ones(2, 3, 7, dtype=torch.bool)
        visible[0, 1] = False
        visible[1, 1, 3:] = False
        clean = x.clone().requires_grad_()
        poisoned = x.masked_fill(~visible, math.nan).requires_grad_()
        for logits in (clean, poisoned):
            (
                sm.softmax(logits, policy=policy, mask=visible).square().sum() + sm.entropy(logits, mask=visible).sum()
            ).backward()
        assert clean.grad is not None
        assert poisoned.grad is not None
        assert torch.equal(clean.grad, poisoned.grad)
        assert (clean.grad[~visible] == 0).all()
        assert clean.grad[0, 0].abs().max() > 0

    @every_policy
    @anywhere
    def test_finite_for_logits_further_apart_than_float32_reaches(self, policy):
        x = torch.tensor([3e38, -1e38, 3e38, 3e38]).repeat(2, 1, 1).requires_grad_()
        p = sm.softmax(x, policy=policy)
        assert p[0, 0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
        p[..., 0].sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()


class TestShapesAndMasks:
    @every_policy
    @pytest.mark.parametrize("dim", [0, 1, 2, -2, -3])
    @anywhere
    def test_any_dim(self, policy, dim):
        if isinstance(policy, PerHead):
            pytest.skip("heads are the axis before the rows")
        x = torch.randn(3, 4, 5, dtype=torch.float64)
        mask = torch.rand(3, 4, 5) < 0.7
        moved = sm.softmax(x.movedim(dim, -1), policy=policy, mask=mask.movedim(dim, -1)).movedim(-1, dim)
        assert torch.equal(sm.softmax(x, policy=policy, dim=dim, mask=mask), moved)
        expected = sm.entropy(x.movedim(dim, -1), mask=mask.movedim(dim, -1))
        assert torch.equal(sm.entropy(x, dim=dim, mask=mask), expected)

    @every_policy
    @every_dtype
    def test_hidden_logits_are_the_same_as_a_mask(self, policy, dtype):
        x = torch.randn(2, 2, 8).to(dtype)
        mask = torch.rand(2, 2, 8) < 0.7
        mask[..., 0] = True
        want, entropy = sm.softmax(x, policy=policy, mask=mask), sm.entropy(x, mask=mask)
        for filler in (-math.inf, torch.finfo(dtype).min):
            hidden = x.masked_fill(~mask, filler)
            assert torch.equal(sm.softmax(hidden, policy=policy), want)
            assert torch.equal(sm.entropy(hidden), entropy)

    @pytest.mark.parametrize("policy", [None, PAPER, POLICIES["target"]], ids=["none", "paper", "target"])
    @anywhere
    def test_a_row_of_131072_keys(self, policy):
        x = torch.randn(2, 1, 131072)
        p = sm.softmax(x, policy=policy)
        assert p.isfinite().all()
        torch.testing.assert_close(p.double().sum(-1), torch.ones(2, 1, dtype=torch.float64), rtol=0, atol=1e-4)
        assert sm.entropy(torch.zeros(131072)).item() == pytest.approx(math.log(131072), abs=1e-5)
        torch.testing.assert_close(sm.entropy(x).double(), sm.entropy(x.double()), rtol=1e-6, atol=0)
