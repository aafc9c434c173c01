"""Dense row statistics against fifty-digit arithmetic, and their behaviour at the edges of the number range."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sharpmax.stats.statistics import RowStats, centred, dense_stats

# Wide rows are nearly one-hot, narrow ones nearly uniform, and a few far keys above a crowd are in between.
WIDE = st.lists(st.floats(-700, 700), min_size=1, max_size=40)
NARROW = st.lists(st.floats(-3, 3), min_size=1, max_size=40)
ONE_UP = st.builds(lambda gap, rest: [gap + max(rest), *rest], st.floats(0, 300), NARROW)
LOGITS = WIDE | NARROW | ONE_UP


def exact(row: list[float]) -> dict[str, float]:
    """The statistics by definition, to fifty digits; log1p because 1 + 1e-100 has more than fifty."""
    with mpmath.workdps(50):
        s = sorted(map(mpmath.mpf, row), reverse=True)
        x = [v - s[0] for v in s]
        weights = [mpmath.exp(v) for v in x]
        total = mpmath.fsum(weights)
        below = -mpmath.fsum(w * v for w, v in zip(weights, x, strict=True)) / total
        log_mass = mpmath.log1p(mpmath.fsum(weights[1:]))
        var = mpmath.fsum(w * (v + below) ** 2 for w, v in zip(weights, x, strict=True)) / total
        return {
            "max": float(s[0]),
            "lse": float(s[0] + log_mass),
            "mean": float(s[0] - below),
            "var": float(var),
            "entropy": float(log_mass + below),
            "top_weight": float(1 / total),
        }


def stats_of(row: list[float] | Tensor, dtype: torch.dtype = torch.float64) -> RowStats:
    logits = torch.as_tensor(row, dtype=dtype)
    return dense_stats(logits, torch.ones_like(logits, dtype=torch.bool))


class TestAgainstFiftyDigits:
    @given(LOGITS)
    @settings(max_examples=150)
    @example([0.0, -46.0])  # entropy 5e-19
    @example([0.0] + [-690.0] * 39)
    @example([700.0, -700.0])
    def test_float64(self, row):
        got, want = stats_of(row), exact(row)
        assert got.count == len(row)
        assert got.max == want["max"]
        assert got.entropy == pytest.approx(want["entropy"], rel=1e-12, abs=1e-300)
        assert got.var == pytest.approx(want["var"], rel=1e-11, abs=1e-300)
        assert got.top_weight == pytest.approx(want["top_weight"], rel=1e-13)
        # lse and mean are of the size of the logits, and so does their rounding.
        size = 1e-15 * max(map(abs, row))
        assert got.lse == pytest.approx(want["lse"], rel=1e-14, abs=size)
        assert got.mean == pytest.approx(want["mean"], rel=1e-14, abs=size)

    @pytest.mark.parametrize("gap", [30.0, 50.0, 100.0, 300.0, 690.0])
    def test_entropies_far_below_one_unit_in_the_last_place_of_1(self, gap):
        """The textbook formula lse − mean gives exactly 0 here; the relative error must not care."""
        row = [gap, 0.0, 0.0, -1.0]
        got, want = float(stats_of(row).entropy), exact(row)["entropy"]
        assert 0 < want < 1e-10
        assert got == pytest.approx(want, rel=1e-13)
        textbook = torch.tensor(row, dtype=torch.float64)
        p = textbook.softmax(-1)
        assert abs(float(textbook.logsumexp(-1) - (p * textbook).sum()) / want - 1) > 1e-6

    @given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40))
    def test_float32_is_accurate_to_its_own_rounding(self, row):
        got, want = stats_of(row, torch.float32), exact(row)
        # exp(x) carries |x| rounding errors of x, and weights count up to |x| ≈ 17 here.
        assert got.entropy == pytest.approx(want["entropy"], rel=1e-5, abs=1e-37)
        assert got.top_weight == pytest.approx(want["top_weight"], rel=1e-5)


class TestLiveKeys:
    @given(NARROW, st.lists(st.booleans(), min_size=40, max_size=40), st.sampled_from([0.0, 1e300, -1e300]))
    def test_hidden_keys_do_not_exist(self, row, pattern, filler):
        visible = torch.tensor(pattern[: len(row)])
        logits = torch.where(visible, torch.tensor(row, dtype=torch.float64), filler)
        got = dense_stats(logits, visible)
        want = stats_of([v for v, on in zip(row, visible.tolist(), strict=True) if on])
        for name in ("count", "max", "lse", "mean", "var", "entropy", "top_weight"):
            assert getattr(got, name) == pytest.approx(float(getattr(want, name)), rel=1e-12, abs=1e-14), name


class TestEdges:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_logits_as_far_apart_as_the_dtype_allows(self, dtype):
        top = torch.finfo(dtype).max
        stats = stats_of([top, -top / 3, top], dtype)
        assert stats.entropy == pytest.approx(math.log(2), rel=1e-6)
        assert stats.var == 0
        x, peak = centred(torch.tensor([top, -top / 3], dtype=dtype), torch.tensor([True, True]))
        assert peak == top
        assert x.isfinite().all()

    def test_the_maximum_carries_no_gradient_and_ties_share_theirs(self):
        logits = torch.zeros(5, dtype=torch.float64, requires_grad=True)
        stats = dense_stats(logits, torch.ones(5, dtype=torch.bool))
        assert not stats.max.requires_grad
        (gradient,) = torch.autograd.grad(stats.lse, logits)
        assert gradient.tolist() == pytest.approx([0.2] * 5, rel=1e-15)

    @pytest.mark.parametrize("name", ["lse", "mean", "var", "entropy"])
    def test_gradients(self, name):
        visible = torch.rand(3, 7) < 0.8
        logits = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x: getattr(dense_stats(x, visible), name), (logits,))

    def test_second_derivatives_exist(self):
        """The oracle is differentiable any number of times."""
        logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
        visible = torch.ones(2, 5, dtype=torch.bool)
        assert torch.autograd.gradgradcheck(lambda x: dense_stats(x, visible).entropy, (logits,))
