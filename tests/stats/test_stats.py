"""`RowStats`: merging, what derives from the five statistics, and how it behaves as a value."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

import sharpmax as sm
from sharpmax.stats.statistics import FIELDS, RowStats, dense_stats

DERIVED = (*FIELDS, "entropy", "top_weight")
# How far the parts and the whole may differ: a logit of 1000 is itself only known to 1000 · eps.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4}

LOGITS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=24)
# Close together, where many keys carry weight; far apart nearly every row is one-hot.
CLOSE = st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=24)
DTYPES = st.sampled_from([torch.float64, torch.float32])


def of(values: Any, dtype: torch.dtype = torch.float64) -> RowStats:
    """The statistics of one row of logits, all of them visible."""
    logits = torch.as_tensor(values, dtype=dtype)
    return dense_stats(logits, torch.ones_like(logits, dtype=torch.bool))


def nothing(rows: tuple[int, ...] = (), dtype: torch.dtype = torch.float64) -> RowStats:
    return of(torch.zeros(*rows, 0), dtype)


def assert_same(got: RowStats, want: RowStats, tolerance: float) -> None:
    assert got.measured == want.measured
    assert torch.equal(got.count, want.count)
    assert torch.equal(got.max, want.max)
    for name in ("lse", "mean", "var", "entropy", "top_weight"):
        a, b = getattr(got, name), getattr(want, name)
        # Variances of far logits are of the order of their squares.
        atol = tolerance * (1e3 if name == "var" else 1.0)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=atol, equal_nan=True, msg=name)


def split(values: list[float], places: list[int], parts: int, dtype: torch.dtype) -> list[RowStats]:
    """The values dealt out to a number of parts, some of which may stay empty."""
    hands: list[list[float]] = [[] for _ in range(parts)]
    for i, value in enumerate(values):
        hands[places[i % len(places)]].append(value)
    return [of(hand, dtype) for hand in hands]


class TestMerge:
    @given(LOGITS | CLOSE, st.lists(st.integers(0, 4), min_size=1, max_size=9), st.permutations(range(5)), DTYPES)
    def test_any_split_in_any_order_is_the_whole(self, values, places, order, dtype):
        parts = split(values, places, 5, dtype)
        merged = functools.reduce(RowStats.merge, [parts[i] for i in order])
        assert_same(merged, of(values, dtype), TOLERANCE[dtype])

    @given(CLOSE, DTYPES)
    def test_a_row_without_keys_is_the_identity(self, values, dtype):
        stats, empty = of(values, dtype), nothing(dtype=dtype)
        eps = 8 * torch.finfo(dtype).eps
        assert_same(stats.merge(empty), stats, eps)
        assert_same(empty.merge(stats), stats, eps)

    def test_rows_merge_one_by_one(self):
        """Some rows of a part may be empty while others are not."""
        logits = torch.randn(4, 10, dtype=torch.float64)
        visible = torch.rand(4, 10) < 0.5
        visible[0] = False
        visible[1] = True
        first = dense_stats(logits, visible)
        second = dense_stats(logits, ~visible)
        assert_same(first.merge(second), of(logits), 1e-12)

    @pytest.mark.parametrize("broken_first", [True, False])
    def test_a_nan_in_a_part_shows_in_the_whole(self, broken_first):
        broken = of([[1.0, math.nan], [1.0, 2.0]])
        fine = of([[5.0, 3.0, 4.0], [5.0, 3.0, 4.0]])
        whole = broken.merge(fine) if broken_first else fine.merge(broken)
        for name in ("max", "lse", "mean", "var", "entropy", "top_weight"):
            value = getattr(whole, name)
            assert value[0].isnan(), name
            assert value[1].isfinite(), name
        assert_same(whole.map(lambda a: a[1]), of([1.0, 2.0, 5.0, 3.0, 4.0]), 1e-13)

    def test_logits_whose_squares_overflow(self):
        """0 · (2e20)² is 0 · inf in float32, and NaN if the weight comes last."""
        whole = of([1e20], torch.float32).merge(of([-1e20, -1e20], torch.float32))
        assert_same(whole, of([1e20, -1e20, -1e20], torch.float32), 0.0)
        assert whole.var == 0

    def test_gradients_of_parts_are_those_of_the_whole(self):
        logits = torch.randn(3, 12, dtype=torch.float64)

        def gradient(stats_of):
            x = logits.clone().requires_grad_()
            stats = stats_of(x)
            (stats.lse + 2 * stats.mean + 3 * stats.var + 5 * stats.entropy).sum().backward()
            return x.grad

        parts = gradient(lambda x: of(x[:, :5]).merge(of(x[:, 5:5])).merge(of(x[:, 5:])))
        torch.testing.assert_close(parts, gradient(of), rtol=1e-11, atol=1e-12)

    def test_unmeasured_statistics_stay_unmeasured(self):
        full = of([1.0, 2.0])
        plain = RowStats.anchored(full.count, full.lse, torch.zeros_like(full.lse), full.entropy)
        for merged in (full.merge(plain), plain.merge(full)):
            assert merged.measured == ("count", "lse", "mean")
            assert merged.entropy == pytest.approx(float(of([1.0, 1.0, 2.0, 2.0]).entropy), rel=1e-14)
        assert full.merge(RowStats.anchored(full.count)).measured == ("count",)


class TestDerived:
    @given(LOGITS | CLOSE)
    def test_the_five_statistics_say_the_same_as_anchored_rows(self, values):
        stats = of(values)
        public = RowStats(stats.count, stats.max, stats.lse, stats.mean, stats.var)
        assert public.measured == FIELDS
        for name in DERIVED[:-1]:
            # lse and mean have been rounded at the size of the logits before their difference was taken.
            assert getattr(public, name) == pytest.approx(float(getattr(stats, name)), rel=1e-11, abs=1e-11), name

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("n", [1, 2, 3, 7, 1000, 12345])
    def test_equal_logits_reach_ln_n_and_not_more(self, n, dtype):
        entropy = of([0.1] * n, dtype).entropy
        assert entropy <= torch.tensor(n, dtype=dtype).log()
        assert entropy == pytest.approx(math.log(n), rel=4 * torch.finfo(dtype).eps, abs=0)

    def test_rounding_of_lse_and_mean_cannot_leave_that_range(self):
        """Near 1000 float32 knows lse and mean to 6e-5, and their difference no better."""
        top = torch.tensor([1000.0, 1000.0])
        lse, mean = torch.tensor([1001.0987, 1000.0]), torch.tensor([1000.0, 1000.0001])
        stats = RowStats(torch.tensor([3, 3]), max=top, lse=lse, mean=mean, var=torch.zeros(2))
        assert stats.entropy.tolist() == [torch.tensor(3.0).log().item(), 0.0]

    def test_what_reads_the_maximum_carries_no_gradient(self):
        """The maximum is a constant, so a gradient through the rest alone would be a wrong one."""
        stats = sm.row_stats(torch.randn(2, 4, requires_grad=True), torch.randn(5, 4), impl="streaming")
        assert stats.entropy.requires_grad
        assert not any(x.requires_grad for x in (stats.max, stats.top_weight))

    def test_the_top_weight_of_logits_carries_one(self):
        logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
        stats = of(logits)
        assert not stats.max.requires_grad
        (found,) = torch.autograd.grad(stats.top_weight.sum(), logits)
        (want,) = torch.autograd.grad(logits.softmax(-1).amax(-1).sum(), logits)
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-15)


class TestValue:
    @pytest.fixture(params=["streaming", "sdpa"])
    def stats(self, request) -> RowStats:
        return sm.row_stats(torch.randn(1, 2, 4), torch.randn(1, 5, 4), impl=request.param)

    def arrays_equal(self, a: RowStats, b: RowStats) -> bool:
        (left, left_form), (right, right_form) = a.flatten(), b.flatten()
        return left_form == right_form and all(torch.equal(x, y) for x, y in zip(left, right, strict=True))

    @pytest.mark.parametrize("name", ["count", "entropy", "anything"])
    def test_nothing_can_be_set(self, stats, name):
        with pytest.raises(AttributeError):
            setattr(stats, name, torch.zeros(1))

    def test_map_reaches_every_array(self, stats):
        first = stats.map(lambda a: a[..., :1])
        assert first.measured == stats.measured
        assert first.count.shape == (1, 1)
        for name in stats.measured:
            assert torch.equal(getattr(first, name), getattr(stats, name)[..., :1])

    def test_is_a_torch_tree(self, stats):
        leaves, form = pytree.tree_flatten({"rows": [stats]})
        assert len(leaves) == len(stats.flatten()[0])
        again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(form)))
        assert self.arrays_equal(again["rows"][0], stats)
        doubled = pytree.tree_map(lambda a: a * 2, stats)
        assert torch.equal(doubled.count, stats.count * 2)

    @pytest.mark.parametrize(
        "again", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))], ids=["copy", "deepcopy", "pickle"]
    )
    def test_copies(self, stats, again):
        other = again(stats)
        assert other is not stats
        assert self.arrays_equal(other, stats)
        assert other.measured == stats.measured
