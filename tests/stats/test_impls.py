"""The implementations of row statistics against the float64 oracle, and which of them is chosen when."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left

import sharpmax as sm
from sharpmax.errors import NotMeasuredError, UnsupportedError
from sharpmax.stats import dispatch, streaming
from sharpmax.stats.call import AttentionCall
from sharpmax.stats.statistics import FIELDS
from tests.numerics import assert_same_stats, call_at, exact, heads, textbook, worst

on_cpu = pytest.mark.parametrize("impl", ["reference", "streaming", "sdpa"])


def wide(*shape: int) -> Tensor:
    return heads(*shape, dtype=torch.float64)


class TestContractOfAccuracy:
    """Error against float64 at most twice that of the plain computation in the same precision."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("impl", ["streaming", "sdpa"])
    @pytest.mark.parametrize(("sharpness", "keys"), [(0.3, 1025), (1.0, 97), (3.0, 1025)])
    def test_every_statistic(self, dtype: torch.dtype, impl: Any, sharpness: float, keys: int) -> None:
        q, k = heads(2, 4, 97, 64, dtype=dtype, scale=sharpness), heads(2, 4, keys, 64, dtype=dtype)
        visible = torch.ones(97, keys, dtype=torch.bool).tril(keys - 97)
        got = sm.row_stats(q, k, is_causal=True, impl=impl)
        want, rough = exact(q, k, is_causal=True), textbook(q @ k.mT * 64**-0.5, visible)
        for name, value in rough.items():
            if name == "var" and impl == "sdpa":
                continue
            # lse and mean come as the sum of an anchor and a part: one rounding of the anchor more.
            anchor = float(want.lse.abs().max()) * torch.finfo(torch.float32).eps if name in ("lse", "mean") else 0.0
            truth = getattr(want, name)
            assert worst(getattr(got, name), truth) <= 2 * worst(value, truth) + anchor, name

    @pytest.mark.parametrize("impl", ["streaming", "sdpa", "triton", "auto"])
    @pytest.mark.parametrize("offset", [-1e5, -3e3, 200.0, 1e5])
    def test_what_all_logits_share_does_not_matter(self, impl: Any, offset: float) -> None:
        # Multiples of 1/64 under 2^17: the logits are exact in float32, so nothing but the statistics can lose digits.
        q, k = torch.ones(1, 2, 9, 16), heads(1, 2, 40, 16)
        k = torch.cat([k[..., :1] * 64.0, 0.0 * k[..., 1:]], -1).round() / 64.0
        k[..., 1] = offset
        got = sm.row_stats(q, k, is_causal=True, scale=1.0, impl=impl, fields=("entropy",))
        assert worst(got.entropy, exact(q, k, is_causal=True, scale=1.0).entropy) < 1e-5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_sdpa_refuses_logits_beyond_its_precision(self, dtype: torch.dtype) -> None:
        q, k = heads(1, 2, 5, 16, dtype=dtype), heads(1, 2, 9, 16, dtype=dtype) * 1e12
        with pytest.raises(UnsupportedError, match=r"'sdpa' cannot do this: .*large.*impl='streaming'"):
            sm.row_stats(q, k, impl="sdpa", fields=("entropy",))
        assert worst(sm.row_stats(q, k, fields=("entropy",)).entropy, exact(q, k).entropy) < 1e-5

    @pytest.mark.parametrize("impl", ["streaming", "sdpa", "triton", "auto"])
    @pytest.mark.parametrize("scale", [0.0, -0.3, -1.0])
    def test_a_scale_of_zero_or_less(self, impl: Any, scale: float) -> None:
        q, k = heads(1, 2, 9, 16), heads(1, 2, 9, 16)
        got = sm.row_stats(q, k, is_causal=True, scale=scale, impl=impl, fields=("entropy", "lse", "mean"))
        assert_same_stats(got, exact(q, k, is_causal=True, scale=scale), 1e-5, "entropy", "lse", "mean")


class TestWhatARowSees:
    @pytest.mark.parametrize("offset", [None, -2, 0, 1, 4, 9])
    @pytest.mark.parametrize("mask", [None, "keys", "rows"])
    def test_counts_are_what_is_not_hidden(self, offset: int | None, mask: str | None) -> None:
        shown = {None: None, "keys": torch.tensor([True, False, True, True, False]), "rows": torch.ones(3, 1) > 0}[mask]
        call = call_at(heads(1, 2, 3, 4), heads(1, 2, 5, 4), shown, offset=offset)
        hidden = call.hidden().expand(1, 2, 1, 3, 5)
        assert call.counts().tolist() == (~hidden).sum(-1).reshape(1, 2, 3).tolist()
        wanted = [[j > i + offset if offset is not None else False for j in range(5)] for i in range(3)]
        if mask == "keys":
            wanted = [[hide or j in (1, 4) for j, hide in enumerate(row)] for row in wanted]
        assert hidden[0, 0, 0].tolist() == wanted

    def test_a_mask_of_finfo_min_hides_and_half_of_it_is_the_limit(self) -> None:
        least = torch.finfo(torch.float32).min
        mask = torch.tensor([0.0, least, least / 2, least / 2.001, -math.inf])
        assert sm.row_stats(heads(3, 4), heads(5, 4), attn_mask=mask).count.tolist() == [2, 2, 2]

    @on_cpu
    def test_a_nan_query_that_sees_nothing_is_an_empty_row(self, impl: Any) -> None:
        q, shown = heads(1, 3, 8), torch.ones(3, 4, dtype=torch.bool)
        q[0, 1] = math.nan
        shown[1] = False
        stats = sm.row_stats(q, heads(1, 4, 8), attn_mask=shown, impl=impl)
        assert stats.lse[0, 1] == stats.mean[0, 1] == -math.inf
        assert stats.entropy[0, 1] == 0.0

    def test_sdpa_with_every_kind_of_limit(self) -> None:
        """The kernel gets its own causal flag where that means the same, and a mask elsewhere."""
        q, k = wide(2, 4, 5, 8), wide(2, 2, 7, 8)
        shown = torch.rand(2, 4, 5, 7) > 0.3
        cases: list[dict[str, Any]] = [{"attn_mask": mask} for mask in (None, shown, shown[:1, :1], shown[:, :1])]
        cases += [{"is_causal": True}, {"is_causal": True, "window": 3}, {"attn_mask": causal_upper_left(5, 7)}]
        for options in cases:
            got = sm.row_stats(q, k, enable_gqa=True, impl="sdpa", **options)
            assert_same_stats(got, exact(q, k, enable_gqa=True, **options), 1e-12, "entropy", "lse")
        one_behind = call_at(wide(1, 2, 4, 8), wide(1, 2, 6, 8), offset=1)
        got, want = (dispatch.measure(one_behind, impl, frozenset({"lse"})) for impl in ("sdpa", "reference"))
        assert_same_stats(got, want, 1e-12, "lse")

    @on_cpu
    def test_keys_and_masks_that_batches_share(self, impl: Any) -> None:
        q, k = wide(2, 3, 2, 4, 8), wide(2, 1, 2, 5, 8)
        shown = torch.rand(2, 1, 1, 4, 5) > 0.3
        shown[..., 0] = True
        want = exact(q, k.expand(2, 3, 2, 5, 8), attn_mask=shown.expand(2, 3, 2, 4, 5))
        assert_same_stats(sm.row_stats(q, k, attn_mask=shown, impl=impl), want, 1e-12, "entropy")


class TestTiles:
    """Small tiles, so that every edge between them is met."""

    @pytest.fixture(autouse=True)
    def _small_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming, "_TILE_ELEMENTS", {"cpu": 64, "cuda": 64})
        monkeypatch.setattr(streaming, "_KEYS_PER_TILE", 5)

    @pytest.fixture
    def _tiny_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming, "_TILE_ELEMENTS", {"cpu": 1})
        monkeypatch.setattr(streaming, "_KEYS_PER_TILE", 3)

    @pytest.mark.parametrize(
        ("mask", "is_causal"), [(None, False), (None, True), ("bool", False), ("bias", False), ("late", False)]
    )
    def test_statistics_and_gradient(self, mask: str | None, is_causal: bool) -> None:
        q, k = wide(3, 6, 70, 4).requires_grad_(), wide(3, 2, 83, 4).requires_grad_()
        m: Tensor | None = None
        if mask == "bool":
            m = torch.rand(3, 1, 70, 83) > 0.8
        elif mask == "bias":
            m = wide(6, 1, 83)
        elif mask == "late":  # the first tiles of a row hold nothing but hidden keys
            m = torch.arange(83) > 61
        found = []
        for impl in ("streaming", "reference"):
            stats = sm.row_stats(q, k, attn_mask=m, is_causal=is_causal, enable_gqa=True, impl=impl)
            seen = stats.count > 0
            total = (stats.entropy + 2 * stats.var)[seen].sum() + (stats.lse - 3 * stats.mean)[seen].sum()
            found.append((stats, torch.autograd.grad(total, (q, k))))
        (ours, grads), (want, true_grads) = found
        assert_same_stats(ours, want, 1e-11)
        for g, t in zip(grads, true_grads, strict=True):
            assert worst(g, t) < 1e-10

    def test_mean_and_variance_of_far_apart_tiles(self) -> None:
        k = torch.tensor([[-1e5], [0.0], [0.0], [0.0], [0.0], [1e5], [1e5]])
        stats = sm.row_stats(torch.ones(1, 1), k, scale=1.0, impl="streaming")
        assert stats.mean.item() == pytest.approx(1e5)
        assert stats.var.item() == 0.0
        assert stats.entropy.item() == pytest.approx(0.6931472, abs=1e-6)

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.usefixtures("_tiny_tiles")
    def test_spans_of_each_sequence_and_of_all(self, shared: bool, masked: bool) -> None:
        mask = torch.tensor([True, False, True, True, True, False, True]) if masked else None
        low = torch.tensor([[0, 1, 2, 3], [2, 2, 0, 0], [0, 0, 4, 6]])
        spans = torch.stack((low, low + torch.tensor([1, 3, 2, 1])), 1).to(torch.int32)
        call = replace(
            call_at(wide(3, 2, 4, 8), wide(3, 2, 7, 8), mask, offset=None), spans=spans[:1] if shared else spans
        )
        got, want = (dispatch.measure(call, impl, frozenset({"lse"})) for impl in ("streaming", "reference"))
        assert_same_stats(got, want, 1e-12, "lse")

    @pytest.mark.parametrize("offset", [-3, -2, -1, 0, 1, 2])
    @pytest.mark.parametrize("queries", [4, 33])
    @pytest.mark.usefixtures("_tiny_tiles")
    def test_causal_limits_before_and_behind_the_diagonal(self, offset: int, queries: int) -> None:
        call = call_at(wide(1, 2, queries, 8), wide(1, 2, 7, 8), offset=offset)
        got, want = (dispatch.measure(call, impl, frozenset({"lse", "var"})) for impl in ("streaming", "reference"))
        assert_same_stats(got, want, 1e-12, "lse", "var")


class TestChoice:
    @pytest.fixture
    def used(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the implementations that ran."""
        names: list[str] = []

        def spy(name: str, function: Any) -> Any:
            def run(problem: Any, fields: Any) -> Any:
                names.append(name)
                return function(problem, fields)

            return run

        spies = {name: spy(name, function) for name, function in dispatch.IMPLEMENTATIONS.items()}
        monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", spies)
        return names

    @pytest.mark.parametrize("impl", ["streaming", "sdpa", "triton"])
    def test_an_explicit_choice_is_kept(self, impl: Any, used: list[str]) -> None:
        sm.row_stats(heads(1, 2, 3, 16), heads(1, 2, 4, 16), impl=impl)
        sm.attention(heads(1, 2, 3, 16), heads(1, 2, 4, 16), heads(1, 2, 4, 16), policy="paper", impl=impl)
        assert used == [impl, impl]

    def test_auto_takes_the_cheapest_that_measures_enough(self, used: list[str]) -> None:
        q, k = heads(1, 2, 3, 16), heads(1, 2, 4, 16)
        assert sm.row_stats(q, k, fields=("entropy",)).measured == ("count", "lse", "mean")
        sm.attention(q, k, k, policy="paper")
        assert sm.row_stats(q, k).measured == FIELDS
        sm.row_stats(q, k, fields=("entropy",), attn_mask=heads(3, 4))
        assert used == ["sdpa", "sdpa", "streaming", "streaming"]

    def test_auto_measures_nothing_for_a_count(self, used: list[str]) -> None:
        stats = sm.row_stats(heads(1, 2, 3, 16), heads(1, 2, 4, 16), fields=("count",), is_causal=True)
        assert used == []
        assert stats.count[0, 0].tolist() == [2, 3, 4]
        with pytest.raises(NotMeasuredError, match="impl='streaming'"):
            _ = stats.entropy


class TestPromises:
    """What compilers are told of the operators is what they do, whatever the layout of the queries."""

    @pytest.mark.parametrize("impl", ["streaming", "sdpa"])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_layouts(self, impl: str, transposed: bool) -> None:
        # As projections come: [batch, tokens, heads, D], seen as [batch, groups, heads of a group, tokens, D].
        q, k = heads(2, 6, 4, 8).unflatten(2, (2, 2)).movedim(1, 3), heads(2, 6, 2, 8).transpose(1, 2)
        if not transposed:
            q, k = q.contiguous(), k.contiguous()
        mask = torch.ones(2, 1, 1, 6, 6, dtype=torch.bool).tril() if impl == "streaming" else None
        rows = (mask, None, None, None if mask is not None else 0)
        torch.library.opcheck(
            dispatch._row_parts, (q, k, *rows, 0.3, impl, True, True), test_utils=("test_schema", "test_faketensor")
        )
        parts = list(dispatch._row_parts(q, k, *rows, 0.3, impl, True, True))
        arguments = (q, k, *rows[:3], parts, parts[0], parts[1], None, rows[3], 0.3, impl, False)
        torch.library.opcheck(dispatch._row_parts_backward, arguments, test_utils=("test_schema", "test_faketensor"))

    @pytest.mark.parametrize("into_mask", [False, True])
    def test_gradients_without_keys(self, into_mask: bool) -> None:
        call = AttentionCall.of(heads(1, 2, 3, 4), heads(1, 2, 0, 4), torch.zeros(3, 0))
        assert call.mask is not None
        numbers = torch.zeros(call.q.shape[:-1])
        inputs = (call.q, call.k, call.mask, None, None, [numbers] * 4, numbers, numbers, None)
        found = torch.ops.sharpmax.row_parts_backward(*inputs, None, 1.0, "streaming", into_mask)
        assert [x.shape for x in found] == [call.q.shape, call.k.shape, call.mask.shape if into_mask else (0,)]
