"""Places where a small mistake in measuring rows would show nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sharpmax as sm
from sharpmax.stats import dispatch as api
from sharpmax.stats import streaming
from sharpmax.stats.call import AttentionCall
from sharpmax.stats.statistics import FIELDS
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

    def test_every_way_measures_what_it_is_asked_for_and_says_what_it_measured(self):
        q, k = heads(1, 2, 3, 8), heads(1, 2, 5, 8)
        assert sm.row_stats(q, k, impl="streaming", fields=("entropy",)).measured == FIELDS
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

    @pytest.mark.parametrize("into_mask", [False, True])
    def test_gradients_without_keys(self, into_mask):
        made = problem(keys=0, mask=torch.zeros(3, 0))
        numbers = torch.zeros(made.q.shape[:-1])
        inputs = (made.q, made.k, made.mask, None, None, [numbers] * 4, numbers, numbers, None)
        found = torch.ops.sharpmax.row_parts_backward(*inputs, None, 1.0, "streaming", into_mask)
        assert made.mask is not None
        assert [x.shape for x in found] == [made.q.shape, made.k.shape, made.mask.shape if into_mask else (0,)]

    def test_the_stock_kernel_one_key_behind_the_diagonal(self):
        q, k = heads(1, 2, 4, 8, dtype=torch.float64), heads(1, 2, 6, 8, dtype=torch.float64)
        made = call_at(q, k, None, offset=1, scale=None, enable_gqa=False)
        got, want = (api.measure(made, impl, frozenset({"lse"})) for impl in ("sdpa", "reference"))
        assert worst(got.lse, want.lse) < 1e-12
