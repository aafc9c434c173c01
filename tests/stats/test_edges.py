"""Places where a small mistake in measuring rows would show nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.stats import dispatch as api
from sharpmax.stats import dispatch as operator
from sharpmax.stats import sdpa as stock
from sharpmax.stats import streaming
from sharpmax.stats import triton_launch as kernels
from sharpmax.stats.call import AttentionCall, without_autocast
from sharpmax.stats.dispatch import packed_spans, window_spans
from tests.numerics import call_at, exact, heads, worst

CPU = torch.device("cpu")


def problem(queries=3, keys=5, mask=None, **options) -> AttentionCall:
    q, k = heads(1, 2, queries, 4), heads(1, 2, keys, 4)
    return call_at(q, k, mask, **({"offset": None, "scale": None, "enable_gqa": False} | options))


class TestArguments:
    def test_torch_biases_are_causal_limits(self):
        q, k = heads(1, 2, 3, 8), heads(1, 2, 5, 8)
        assert sm.row_stats(q, k, attn_mask=causal_upper_left(3, 5)).count[0, 0].tolist() == [1, 2, 3]
        assert sm.row_stats(q, k, attn_mask=causal_lower_right(3, 5)).count[0, 0].tolist() == [3, 4, 5]
        assert AttentionCall.of(q, k, causal_upper_left(3, 5)).offset == 0
        assert AttentionCall.of(q, k, causal_lower_right(3, 5)).offset == 2
        assert AttentionCall.of(q, k, causal="upper-left").offset == 0
        assert AttentionCall.of(q, k).offset is None

    def test_what_stops_a_kernel_stops_no_other_way(self, monkeypatch):
        monkeypatch.setattr(kernels, "obstacle", lambda problem: "it rains")
        monkeypatch.setattr(stock, "obstacle", lambda problem: "it snows")
        q, k = heads(1, 2, 3, 8), heads(1, 2, 5, 8)
        ways: list[Any] = ["streaming", "reference", "auto"]
        for impl in ways:
            assert sm.row_stats(q, k, impl=impl).count.shape == (1, 2, 3)
        stopped: list[tuple[Any, str]] = [("triton", "it rains"), ("sdpa", "it snows")]
        for impl, reason in stopped:
            with pytest.raises(
                UnsupportedError, match=f"^impl: '{impl}' cannot do this: {reason}; use impl='streaming'"
            ):
                sm.row_stats(q, k, impl=impl)

    def test_every_way_measures_what_it_is_asked_for_and_says_what_it_measured(self):
        q, k = heads(1, 2, 3, 8), heads(1, 2, 5, 8)
        assert sm.row_stats(q, k, impl="streaming", fields=("entropy",)).measured == (
            "count",
            "max",
            "lse",
            "mean",
            "var",
        )
        assert sm.row_stats(q, k, impl="sdpa").measured == ("count", "lse", "mean")
        assert sm.row_stats(q, k, fields=("entropy",)).measured == ("count", "lse", "mean")
        assert sm.row_stats(q, k, fields=("count",)).measured == ("count",)


class TestProblem:
    @pytest.mark.parametrize("offset", [None, -2, 0, 1, 4, 9])
    @pytest.mark.parametrize("mask", [None, "keys", "rows"])
    def test_counts_are_what_is_not_hidden(self, offset, mask):
        shown = {None: None, "keys": torch.tensor([True, False, True, True, False]), "rows": torch.ones(3, 1) > 0}[mask]
        made = problem(mask=shown, offset=offset)
        hidden = made.hidden().expand(1, 2, 1, 3, 5)
        assert made.counts().tolist() == (~hidden).sum(-1).reshape(1, 2, 3).tolist()
        wanted = [[j > i + offset if offset is not None else False for j in range(5)] for i in range(3)]
        if mask == "keys":
            wanted = [[hide or j in (1, 4) for j, hide in enumerate(row)] for row in wanted]
        assert hidden[0, 0, 0].tolist() == wanted

    def test_which_rows_see_a_key(self):
        made = problem(queries=4, keys=4, offset=0)
        for key in range(4):
            marked = torch.zeros(1, 2, 4, dtype=torch.bool)
            marked[..., key] = True
            assert made.rows_that_see(marked)[0, 0, 0].tolist() == [i >= key for i in range(4)]

    def test_a_mask_of_finfo_min_hides_and_half_of_it_is_the_limit(self):
        least = torch.finfo(torch.float32).min
        mask = torch.tensor([0.0, least, least / 2, least / 2.001, -math.inf])
        assert problem(mask=mask).counts()[0, 0].tolist() == [2, 2, 2]

    def test_scaled_rows_are_rows_of_scaled_logits(self):
        mask, beta = heads(3, 5, dtype=torch.float64), torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
        q, k = heads(3, 4, dtype=torch.float64), heads(5, 4, dtype=torch.float64)
        made = call_at(q, k, mask, offset=None, scale=None, enable_gqa=False)
        twice = made.scaled(beta).scaled(beta)
        logits = (q @ k.T / 2.0 + mask) * beta[:, None] ** 2
        for impl in ("reference", "streaming"):
            assert worst(api.measure(twice, impl, frozenset({"lse"})).lse, logits.logsumexp(-1)) < 1e-12


class TestSpans:
    def test_a_window_by_hand(self):
        low, high = window_spans(None, 2, 4, 1, CPU)[0].tolist()
        assert high == [2, 3, 4, 5]
        assert low == [0, 1, 2, 3]

    def test_packed_sequences_by_hand(self):
        starts = torch.tensor([0, 2, 2, 5])
        low, high = packed_spans(starts, None, 6, 6, False, CPU)[0].tolist()
        assert list(zip(low, high, strict=True))[:5] == [(0, 2), (0, 2), (2, 5), (2, 5), (2, 5)]
        assert low[5] == high[5]  # after the last sequence: nothing
        low, high = packed_spans(starts, None, 6, 6, True, CPU)[0].tolist()
        assert list(zip(low, high, strict=True))[:5] == [(0, 1), (0, 2), (2, 3), (2, 4), (2, 5)]

    def test_packed_keys_of_another_length(self):
        rows, keys = torch.tensor([0, 2, 3]), torch.tensor([0, 3, 4])
        low, high = packed_spans(rows, keys, 3, 4, True, CPU)[0].tolist()
        assert list(zip(low, high, strict=True)) == [(0, 2), (0, 3), (3, 4)]


class TestOperator:
    @pytest.mark.parametrize("impl", ["streaming", "sdpa"])
    @pytest.mark.parametrize("shared", ["nothing", "keys", "queries"])
    def test_vmap_is_a_loop(self, impl, shared):
        q, k = heads(3, 2, 4, 6, 8, dtype=torch.float64), heads(3, 2, 4, 7, 8, dtype=torch.float64)
        dims = {"nothing": (0, 0), "keys": (0, None), "queries": (None, 0)}[shared]
        given = [x if dim == 0 else x[0] for x, dim in zip((q, k), dims, strict=True)]

        def entropy(q, k):
            return sm.row_stats(q, k, impl=impl, is_causal=True).entropy

        found = torch.func.vmap(entropy, in_dims=dims)(*given)
        wanted = [entropy(*(x[i] if dim == 0 else x for x, dim in zip(given, dims, strict=True))) for i in range(3)]
        assert worst(found, torch.stack(wanted)) < 1e-12

    @pytest.mark.parametrize("mask", [None, "shared", "of each"])
    def test_gradients_under_vmap_are_those_of_a_loop(self, mask):
        q, k = heads(3, 2, 4, 8, dtype=torch.float64), heads(3, 2, 5, 8, dtype=torch.float64)
        m = {None: None, "shared": heads(4, 5, dtype=torch.float64), "of each": heads(3, 1, 4, 5, dtype=torch.float64)}[
            mask
        ]

        def loss(q, k, m):
            stats = sm.row_stats(q, k, attn_mask=m, impl="streaming")
            return (stats.entropy + stats.var * 0.3).sum()

        if m is None:
            every = torch.func.vmap(torch.func.grad(lambda q, k: loss(q, k, None), argnums=(0, 1)))(q, k)
            each = [
                torch.func.grad(lambda q, k: loss(q, k, None), argnums=(0, 1))(a, b) for a, b in zip(q, k, strict=True)
            ]
        else:
            dim = 0 if mask == "of each" else None
            gradient = torch.func.grad(loss, argnums=(0, 1, 2))
            every = torch.func.vmap(gradient, in_dims=(0, 0, dim))(q, k, m)
            each = [gradient(q[i], k[i], m[i] if dim == 0 else m) for i in range(3)]
        for i, found in enumerate(every):
            assert worst(found, torch.stack([one[i] for one in each])) < 1e-11


def test_stock_with_every_kind_of_limit():
    """Its own causal flag where that says the same, a mask where not."""
    q, k = heads(2, 4, 5, 8, dtype=torch.float64), heads(2, 2, 7, 8, dtype=torch.float64)
    shown = torch.rand(2, 4, 5, 7) > 0.3
    cases: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"attn_mask": shown},
        {"attn_mask": shown[:1, :1]},
        {"attn_mask": shown[:, :1]},
    ]
    cases += [{"is_causal": True, "window": 3}, {"attn_mask": causal_upper_left(5, 7)}]
    for options in cases:
        got = sm.row_stats(q, k, enable_gqa=True, impl="sdpa", **options)
        want = exact(q, k, enable_gqa=True, **options)
        assert got.count.tolist() == want.count.tolist()
        seen = want.count > 0
        assert worst(got.entropy[seen], want.entropy[seen]) < 1e-12, options
        assert worst(got.lse[seen], want.lse[seen]) < 1e-12, options


@pytest.mark.parametrize("impl", ["reference", "streaming", "sdpa"])
def test_a_spoilt_query_that_sees_nothing_is_an_empty_row(impl):
    q, shown = heads(1, 3, 8), torch.ones(3, 4, dtype=torch.bool)
    q[0, 1] = math.nan
    shown[1] = False
    stats = sm.row_stats(q, heads(1, 4, 8), attn_mask=shown, impl=impl)
    assert stats.lse[0, 1] == stats.mean[0, 1] == -math.inf
    assert stats.entropy[0, 1] == 0.0


class TestBatches:
    def test_keys_that_a_batch_shares(self):
        q, k = heads(3, 2, 4, 8, dtype=torch.float64), heads(1, 2, 5, 8, dtype=torch.float64)
        for impl in ("reference", "streaming", "sdpa"):
            got = sm.row_stats(q, k, impl=impl)
            assert worst(got.entropy, sm.row_stats(q, k.expand(3, -1, -1, -1), impl=impl).entropy) < 1e-12

    def test_a_mask_of_some_of_several_batches(self):
        q, k = heads(2, 3, 2, 4, 8, dtype=torch.float64), heads(2, 3, 2, 5, 8, dtype=torch.float64)
        shown = torch.rand(2, 1, 1, 4, 5) > 0.3
        shown[..., 0] = True
        whole = exact(q, k, attn_mask=shown.expand(2, 3, 2, 4, 5)).entropy
        for impl in ("reference", "streaming", "sdpa"):
            assert worst(sm.row_stats(q, k, attn_mask=shown, impl=impl).entropy, whole) < 1e-12


class TestTiles:
    """Tiles so small that every loop turns more than once."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr(streaming, "_TILE_ELEMENTS", {"cpu": 1})
        monkeypatch.setattr(streaming, "_KEYS_PER_TILE", 3)

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("batch", [2, 3])
    @pytest.mark.parametrize("masked", [False, True])
    def test_spans_of_each_sequence_and_of_all(self, shared, batch, masked):
        q, k = heads(batch, 2, 4, 8, dtype=torch.float64), heads(batch, 2, 7, 8, dtype=torch.float64)
        mask = torch.tensor([True, False, True, True, True, False, True]) if masked else None
        made = call_at(q, k, mask, offset=None, scale=None, enable_gqa=False)
        low = torch.tensor([[0, 1, 2, 3], [2, 2, 0, 0], [0, 0, 4, 6]])[:batch]
        spans = torch.stack((low, low + torch.tensor([1, 3, 2, 1])), 1).to(torch.int32)
        made = replace(made, spans=spans[:1] if shared else spans)
        got, want = (api.measure(made, impl, frozenset({"lse"})) for impl in ("streaming", "reference"))
        seen = want.count > 0
        assert worst(got.lse[seen], want.lse[seen]) < 1e-12
        assert got.count.tolist() == want.count.tolist()

    @pytest.mark.parametrize("offset", [-3, -2, -1, 0, 1, 2])
    @pytest.mark.parametrize("queries", [4, 33])
    def test_causal_limits_before_and_behind_the_diagonal(self, offset, queries):
        q, k = heads(1, 2, queries, 8, dtype=torch.float64), heads(1, 2, 7, 8, dtype=torch.float64)
        made = call_at(q, k, None, offset=offset, scale=None, enable_gqa=False)
        got, want = (api.measure(made, impl, frozenset({"lse", "var"})) for impl in ("streaming", "reference"))
        seen = want.count > 0
        assert worst(got.lse[seen], want.lse[seen]) < 1e-12
        assert worst(got.var, want.var) < 1e-12


class TestParts:
    """What implementations and the operator hand on, before anything derived hides it."""

    def test_an_implementation_is_told_what_is_wanted(self, monkeypatch):
        told = []

        def note(problem, fields):
            told.append(fields)
            return streaming.streaming_parts(problem)

        monkeypatch.setitem(operator.IMPLEMENTATIONS, "streaming", note)
        wanted = [frozenset(names) for names in ((), ("max",), ("var",), ("max", "var"))]
        for fields in wanted:
            operator.measure_parts(problem(), "streaming", fields | {"lse"})
        assert told == wanted

    @pytest.mark.parametrize("into_mask", [False, True])
    def test_gradients_without_keys(self, into_mask):
        made = problem(keys=0, mask=torch.zeros(3, 0))
        numbers = torch.zeros(made.q.shape[:-1])
        inputs = (made.q, made.k, made.mask, None, None, [numbers] * 4, numbers, numbers, None)
        found = torch.ops.sharpmax.row_parts_backward(*inputs, None, 1.0, "streaming", into_mask)
        assert made.mask is not None
        assert [x.shape for x in found] == [made.q.shape, made.k.shape, made.mask.shape if into_mask else (0,)]

    def test_gradients_are_laid_out_as_compilers_are_told(self):
        q, k = (heads(2, 5, 2, 8).transpose(1, 2).requires_grad_() for _ in range(2))
        gradients = torch.autograd.grad(sm.row_stats(q, k, impl="streaming").entropy.sum(), (q, k))
        for x, gradient in zip((q, k), gradients, strict=True):
            assert not x.is_contiguous()
            assert gradient.stride() == torch.empty_like(x).stride()

    def test_the_stock_kernel_one_key_behind_the_diagonal(self):
        q, k = heads(1, 2, 4, 8, dtype=torch.float64), heads(1, 2, 6, 8, dtype=torch.float64)
        made = call_at(q, k, None, offset=1, scale=None, enable_gqa=False)
        got, want = (api.measure(made, impl, frozenset({"lse"})) for impl in ("sdpa", "reference"))
        assert worst(got.lse, want.lse) < 1e-12

    def test_rows_that_see_a_key_are_found_in_blocks(self):
        """So many keys that two of three rows are looked at together, and the last one alone."""
        q, k = torch.zeros(3, 1), torch.zeros(1, 1).expand(1 << 23, 1)
        made = call_at(q, k, None, offset=None, scale=None, enable_gqa=False)
        marked = torch.zeros(1, 1, 1 << 23, dtype=torch.bool)
        marked[..., 7] = True
        assert made.rows_that_see(marked).tolist() == [[[[True] * 3]]]

    def test_the_stock_kernel_is_one_of_the_cpu(self):
        x = torch.zeros(1, 2, 3, 4, device="meta")
        made = call_at(x, x, None, offset=None, scale=None, enable_gqa=False)
        assert stock.obstacle(made) == "it uses the CPU's flash attention and q is on meta"


class TestVmap:
    def test_rows_that_are_measured_again_are_those_of_a_loop(self):
        """An entropy target measures with a factor for the mask, which is one of the inputs."""
        q, k, mask = heads(3, 2, 4, 8), heads(3, 2, 5, 8), heads(4, 5)

        def sharp(q, k):
            return sm.attention(q, k, k, attn_mask=mask, policy=sm.policies.EntropyTarget(1.0))

        together = torch.func.vmap(sharp)(q, k)
        assert worst(together, torch.stack([sharp(a, b) for a, b in zip(q, k, strict=True)])) < 1e-5
        gradient = torch.func.grad(lambda q, k: sharp(q, k).square().sum())
        together = torch.func.vmap(gradient)(q, k)
        assert worst(together, torch.stack([gradient(a, b) for a, b in zip(q, k, strict=True)])) < 1e-4


class TestAutocast:
    def test_rows_are_those_of_the_rounded_inputs_in_full_precision(self):
        q, k = heads(1, 2, 16, 8), heads(1, 2, 40, 8)
        with torch.autocast("cpu", torch.bfloat16):
            inside = sm.attention(q, k, k, policy="paper", return_stats=True)[1].entropy
        rounded = exact(q.bfloat16(), k.bfloat16()).entropy
        assert inside.dtype == torch.float32
        assert worst(inside, rounded) < 1e-5
        assert worst(exact(q, k).entropy, rounded) > 1e-4


def test_autocast_is_off_inside_and_on_again_behind():
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(CPU):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    with without_autocast(CPU):
        assert not torch.is_autocast_enabled("cpu")
