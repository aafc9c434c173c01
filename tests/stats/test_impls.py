"""The implementations of row statistics against the float64 oracle, and which of them is chosen when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import NotMeasuredError, UnsupportedError
from sharpmax.stats import dispatch as operator
from sharpmax.stats import streaming
from tests.numerics import exact, heads, tables, worst


def plain(q: Tensor, k: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """The statistics as one writes them down first, in the dtype of the input."""
    s = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
    p = s.softmax(-1)
    s = s.masked_fill(~visible, 0.0)
    mean = (p * s).sum(-1)
    lse = s.masked_fill(~visible, -torch.inf).logsumexp(-1)
    return {"lse": lse, "mean": mean, "var": (p * (s - mean[..., None]) ** 2).sum(-1), "entropy": lse - mean}


class TestContractOfAccuracy:
    """Error against float64 at most twice that of the plain computation in the same precision."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("impl", ["streaming", "sdpa"])
    @pytest.mark.parametrize(("sharpness", "keys"), [(0.3, 1025), (1.0, 97), (3.0, 1025)])
    def test_every_statistic(self, dtype: torch.dtype, impl: Any, sharpness: float, keys: int) -> None:
        q, k = heads(2, 4, 97, 64, dtype=dtype, scale=sharpness), heads(2, 4, keys, 64, dtype=dtype)
        visible = torch.ones(97, keys, dtype=torch.bool).tril(keys - 97)
        got = sm.row_stats(q, k, is_causal=True, impl=impl)
        want, rough = exact(q, k, is_causal=True), plain(q, k, visible)
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
        want = exact(q, k, is_causal=True, scale=scale)
        for name in ("entropy", "lse", "mean"):
            assert worst(getattr(got, name), getattr(want, name)) < 1e-5, name


class TestTiles:
    """Small tiles, so that every edge between them is met."""

    @pytest.fixture(autouse=True)
    def _small_tiles(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streaming, "_TILE_ELEMENTS", {"cpu": 64, "cuda": 64})
        monkeypatch.setattr(streaming, "_KEYS_PER_TILE", 5)

    @pytest.mark.parametrize(
        ("mask", "is_causal"), [(None, False), (None, True), ("bool", False), ("bias", False), ("late", False)]
    )
    def test_statistics_and_gradient(self, mask: str | None, is_causal: bool) -> None:
        q = heads(3, 6, 70, 4, dtype=torch.float64).requires_grad_()
        k = heads(3, 2, 83, 4, dtype=torch.float64).requires_grad_()
        m: Tensor | None = None
        if mask == "bool":
            m = torch.rand(3, 1, 70, 83) > 0.8
        elif mask == "bias":
            m = heads(6, 1, 83, dtype=torch.float64)
        elif mask == "late":  # the first tiles of a row hold nothing but hidden keys
            m = torch.arange(83) > 61
        found = []
        for impl in ("streaming", "reference"):
            stats = sm.row_stats(q, k, attn_mask=m, is_causal=is_causal, enable_gqa=True, impl=impl)
            seen = stats.count > 0
            total = (stats.entropy + 2 * stats.var)[seen].sum() + (stats.lse - 3 * stats.mean)[seen].sum()
            found.append((stats, torch.autograd.grad(total, (q, k))))
        (ours, grads), (want, true_grads) = found
        for name, value in tables(ours):
            good = want.count > 0
            assert worst(value[good], getattr(want, name)[good]) < 1e-11, name
        for g, t in zip(grads, true_grads, strict=True):
            assert worst(g, t) < 1e-10

    def test_mean_and_variance_of_far_apart_tiles(self) -> None:
        k = torch.tensor([[-1e5], [0.0], [0.0], [0.0], [0.0], [1e5], [1e5]])
        stats = sm.row_stats(torch.ones(1, 1), k, scale=1.0, impl="streaming")
        assert stats.mean.item() == pytest.approx(1e5)
        assert stats.var.item() == 0.0
        assert stats.entropy.item() == pytest.approx(0.6931472, abs=1e-6)


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

        spies = {name: spy(name, function) for name, function in operator.IMPLEMENTATIONS.items()}
        monkeypatch.setattr(operator, "IMPLEMENTATIONS", spies)
        return names

    @pytest.mark.parametrize("impl", ["streaming", "sdpa", "triton"])
    def test_an_explicit_choice_is_kept(self, impl: Any, used: list[str]) -> None:
        sm.row_stats(heads(1, 2, 3, 16), heads(1, 2, 4, 16), impl=impl)
        sm.attention(heads(1, 2, 3, 16), heads(1, 2, 4, 16), heads(1, 2, 4, 16), policy="paper", impl=impl)
        assert used == [impl, impl]

    def test_auto_takes_the_kernel_when_entropy_is_enough(self, used: list[str]) -> None:
        q, k = heads(1, 2, 3, 16), heads(1, 2, 4, 16)
        sm.row_stats(q, k, fields=("entropy",))
        sm.attention(q, k, k, policy="paper")
        assert used == ["sdpa", "sdpa"]

    def test_auto_streams_when_more_is_asked_for(self, used: list[str]) -> None:
        q, k = heads(1, 2, 3, 16), heads(1, 2, 4, 16)
        sm.row_stats(q, k)
        sm.row_stats(q, k, fields=("entropy",), attn_mask=heads(3, 4))
        assert used == ["streaming", "streaming"]

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
            operator._row_parts, (q, k, *rows, 0.3, impl, True, True), test_utils=("test_schema", "test_faketensor")
        )
        parts = list(operator._row_parts(q, k, *rows, 0.3, impl, True, True))
        arguments = (q, k, *rows[:3], parts, parts[0], parts[1], None, rows[3], 0.3, impl, False)
        torch.library.opcheck(operator._row_parts_backward, arguments, test_utils=("test_schema", "test_faketensor"))
