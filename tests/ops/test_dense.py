"""Dense logits (`sm.entropy`, `sm.softmax`, `dense_stats`): exact arithmetic, invariances, gradients, edges."""

from __future__ import annotations

import functools
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
from sharpmax.stats.statistics import RowStats, dense_stats
from tests.numerics import DTYPES, paper_beta, worst

# Wide rows are nearly one-hot, narrow ones nearly uniform, and a few far keys above a crowd are in between. Half of a
# subnormal logit has no digits left, so a mean of them has no relative accuracy.
floats = functools.partial(st.floats, allow_subnormal=False)
WIDE = st.lists(floats(-700, 700), min_size=1, max_size=40)
NARROW = st.lists(floats(-3, 3), min_size=1, max_size=40)
ONE_UP = st.builds(lambda gap, rest: [gap + max(rest), *rest], floats(0, 300), NARROW)

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
# Rows outside a policy's range are met on purpose in many of these tests; the warning has tests of its own.
anywhere = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")


def double(row: Any) -> Tensor:
    return torch.as_tensor(row, dtype=torch.float64)


def stats_of(row: Any, dtype: torch.dtype = torch.float64) -> RowStats:
    logits = torch.as_tensor(row, dtype=dtype)
    return dense_stats(logits, torch.ones_like(logits, dtype=torch.bool))


def exact(row: list[float], paper: bool = False) -> tuple[list[float], dict[str, float]]:
    """Weights, and the statistics before sharpening, by definition and to fifty digits."""
    with mpmath.workdps(50):
        top = row.index(max(row))
        x = [mpmath.mpf(v) - mpmath.mpf(row[top]) for v in row]
        weights = [mpmath.exp(v) for v in x]
        total = mpmath.fsum(weights)
        below = -mpmath.fsum(w * v for w, v in zip(weights, x, strict=True)) / total
        # log1p, because 1 + 1e-100 has more than fifty digits.
        log_mass = mpmath.log1p(mpmath.fsum(w for i, w in enumerate(weights) if i != top))
        stats = {
            "max": row[top],
            "lse": float(row[top] + log_mass),
            "mean": float(row[top] - below),
            "var": float(mpmath.fsum(w * (v + below) ** 2 for w, v in zip(weights, x, strict=True)) / total),
            "entropy": float(log_mass + below),
            "top_weight": float(1 / total),
        }
        if paper and log_mass + below > mpmath.mpf("0.5"):
            coefficients = [mpmath.mpf(c) for c in PAPER.coefficients]
            beta = max(mpmath.mpf(1), mpmath.polyval(coefficients, log_mass + below))
            weights = [mpmath.exp(beta * v) for v in x]
            total = mpmath.fsum(weights)
        return [float(w / total) for w in weights], stats


class TestAgainstFiftyDigits:
    @given(WIDE | NARROW | ONE_UP)
    @settings(max_examples=150)
    @example([0.0, -46.0])  # entropy 5e-19
    @example([0.0] + [-690.0] * 39)
    @example([690.0, 0.0, 0.0, -1.0])
    @example([700.0, -700.0])
    def test_weights_and_statistics(self, row):
        got, (weights, want) = stats_of(row), exact(row)
        assert sm.softmax(double(row)).tolist() == pytest.approx(weights, rel=1e-13, abs=1e-300)
        assert sm.entropy(double(row)).item() == pytest.approx(want["entropy"], rel=1e-12, abs=1e-300)
        assert got.entropy == pytest.approx(want["entropy"], rel=1e-12, abs=1e-300)
        assert (got.count, got.max) == (len(row), want["max"])
        assert got.var == pytest.approx(want["var"], rel=1e-11, abs=1e-300)
        assert got.top_weight == pytest.approx(want["top_weight"], rel=1e-13)
        # lse and mean are of the size of the logits, and so is their rounding.
        size = 1e-15 * max(map(abs, row))
        assert got.lse == pytest.approx(want["lse"], rel=1e-14, abs=size)
        assert got.mean == pytest.approx(want["mean"], rel=1e-14, abs=size)

    @pytest.mark.parametrize("gap", [30.0, 50.0, 100.0, 300.0, 690.0])
    def test_entropies_far_below_one_unit_in_the_last_place_of_1(self, gap):
        """The textbook formula lse − mean gives exactly 0 here; the relative error must not care."""
        row = [gap, 0.0, 0.0, -1.0]
        got, want = float(stats_of(row).entropy), exact(row)[1]["entropy"]
        assert 0 < want < 1e-10
        assert got == pytest.approx(want, rel=1e-13)

    @given(NARROW | ONE_UP | st.lists(st.floats(-60, 60), min_size=1, max_size=40))
    @settings(max_examples=120)
    @example([0.0] * 40)
    @example([0.0, 0.0])
    @anywhere
    def test_the_papers_rule(self, row):
        weights, _ = exact(row, paper=True)
        assert sm.softmax(double(row), policy="paper").tolist() == pytest.approx(weights, rel=1e-11, abs=1e-300)

    @given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40))
    def test_float32_is_accurate_to_its_own_rounding(self, row):
        got, (_, want) = stats_of(row, torch.float32), exact(row)
        # exp(x) carries |x| rounding errors of x, and weights count up to |x| ≈ 17 here.
        assert got.entropy == pytest.approx(want["entropy"], rel=1e-5, abs=1e-37)
        assert got.top_weight == pytest.approx(want["top_weight"], rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_low_precision(dtype: torch.dtype) -> None:
    """The error is at most twice that of the plain computation in the same dtype, both against float64."""
    rows = (torch.randn(200, 80, dtype=torch.float64) * 3).to(dtype)
    entropy = rows.logsumexp(-1) - (rows.softmax(-1) * rows).sum(-1)
    by_hand = (rows * paper_beta(entropy)[..., None]).softmax(-1)
    cases = (
        (rows.softmax(-1), sm.softmax(rows), rows.double().softmax(-1), dtype),
        (entropy, sm.entropy(rows), sm.entropy(rows.double()), torch.float32),
        (by_hand, sm.softmax(rows, "paper"), sm.softmax(rows.double(), "paper"), dtype),
    )
    for plain, got, want, kind in cases:
        assert got.dtype == kind
        assert worst(got, want) <= 2 * worst(plain, want)


@settings(max_examples=40)
@given(st.lists(st.integers(-(2**14), 2**14), min_size=1, max_size=40), st.integers(-(2**20), 2**20))
def test_a_shift_changes_no_bit(parts, shift):
    """Multiples of 2⁻¹⁰ add without rounding, so there is nothing to forgive."""
    row = double(parts) / 1024
    for policy in (None, "paper", EntropyTarget(0.3)):
        assert torch.equal(sm.softmax(row + shift, policy=policy), sm.softmax(row, policy=policy))
    assert torch.equal(sm.entropy(row + shift), sm.entropy(row))


class TestGradients:
    def logits(self) -> Tensor:
        return (torch.randn(2, 3, 7, dtype=torch.float64) * 1.5).requires_grad_()

    def test_entropy(self):
        visible = torch.rand(2, 3, 7) < 0.8
        assert torch.autograd.gradcheck(lambda x: sm.entropy(x, mask=visible), (self.logits(),))
        assert torch.autograd.gradcheck(lambda x: sm.entropy(x, dim=1), (self.logits(),))
        assert torch.autograd.gradgradcheck(sm.entropy, (self.logits(),), fast_mode=True)

    @every_policy
    def test_softmax(self, policy):
        """Against finite differences, in which β changes with the logits."""
        x = self.logits()
        assert torch.autograd.gradcheck(lambda x: sm.softmax(x, policy=policy), (x,))
        assert torch.autograd.gradgradcheck(lambda x: sm.softmax(x, policy=policy), (x,), fast_mode=True)

    @every_policy
    def test_masked_rows_and_masked_nans(self, policy):
        x = self.logits().detach()
        visible = torch.ones(2, 3, 7, dtype=torch.bool)
        visible[0, 1] = False
        visible[1, 1, 3:] = False
        grads: list[Tensor] = []
        for logits in (x.clone().requires_grad_(), x.masked_fill(~visible, math.nan).requires_grad_()):
            p, entropy = sm.softmax(logits, policy=policy, mask=visible), sm.entropy(logits, mask=visible)
            grads += torch.autograd.grad(p.square().sum() + entropy.sum(), logits)
        clean, poisoned = grads
        assert torch.equal(clean, poisoned)
        assert (clean[~visible] == 0).all()
        assert clean[0, 0].abs().max() > 0

    @every_policy
    @anywhere
    def test_finite_for_logits_further_apart_than_float32_reaches(self, policy):
        x = torch.tensor([3e38, -1e38, 3e38, 3e38]).repeat(2, 1, 1).requires_grad_()
        p = sm.softmax(x, policy=policy)
        assert p[0, 0].tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
        stats = stats_of(x.detach(), torch.float32)
        assert stats.entropy[0, 0] == pytest.approx(math.log(3), rel=1e-6)
        assert stats.var[0, 0] == 0
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
        last, shown = x.movedim(dim, -1), mask.movedim(dim, -1)
        moved = sm.softmax(last, policy=policy, mask=shown).movedim(-1, dim)
        assert torch.equal(sm.softmax(x, policy=policy, dim=dim, mask=mask), moved)
        assert torch.equal(sm.entropy(x, dim=dim, mask=mask), sm.entropy(last, mask=shown))

    @every_policy
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_hidden_logits_are_the_same_as_a_mask(self, policy, dtype):
        x = torch.randn(2, 2, 8).to(dtype)
        mask = torch.rand(2, 2, 8) < 0.7
        mask[..., 0] = True
        want, entropy = sm.softmax(x, policy=policy, mask=mask), sm.entropy(x, mask=mask)
        for filler in (-math.inf, torch.finfo(dtype).min):
            hidden = x.masked_fill(~mask, filler)
            assert torch.equal(sm.softmax(hidden, policy=policy), want)
            assert torch.equal(sm.entropy(hidden), entropy)

    @given(NARROW, st.lists(st.booleans(), min_size=40, max_size=40), st.sampled_from([0.0, 1e300, -1e300]))
    def test_statistics_ignore_hidden_keys(self, row, pattern, filler):
        visible = torch.tensor(pattern[: len(row)])
        got = dense_stats(torch.where(visible, double(row), filler), visible)
        want = stats_of([v for v, on in zip(row, visible.tolist(), strict=True) if on])
        for name in ("count", "max", "lse", "mean", "var", "entropy", "top_weight"):
            assert getattr(got, name) == pytest.approx(float(getattr(want, name)), rel=1e-12, abs=1e-14), name
