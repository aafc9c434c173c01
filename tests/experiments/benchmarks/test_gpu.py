"""The GPU benchmark on a CPU: its references are right, and what is wrong gets no speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import ArgumentError, UnsupportedError
from sharpmax.experiments.benchmarks import gpu, gpu_inputs
from sharpmax.experiments.benchmarks.gpu import Runner, Spent, check_and_time, decoding
from sharpmax.experiments.benchmarks.gpu_inputs import (
    Shape,
    chosen_heads,
    decode_shapes,
    drawn,
    in_pages,
    prefill_shapes,
    rows_in_float64,
    sampled_rows,
)
from sharpmax.stats import dispatch as operator
from sharpmax.stats.call import AttentionCall, Parts
from tests.experiments.gpu_cases import CPU, SHAPE, plain_decode, set_decode

pytestmark = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")

SHAPES = [SHAPE, replace(SHAPE, causal=False), Shape(1, 2, 2, 1, 33, 8)]
OPTIONS: dict[str, Any] = {"seed": 0, "device": CPU, "rounds": 2}
SPEEDS = ("ours_ms", "stock_ms", "ratio", "stock_ms_by_backend", "host_ms", "stock_host_ms")


def break_statistics(monkeypatch: pytest.MonkeyPatch, mistake: float) -> None:
    for name in ("sdpa", "streaming"):
        right = operator.IMPLEMENTATIONS[name]

        def wrong(problem: AttentionCall, right: Any = right) -> Parts:
            parts: Parts = right(problem)
            return parts._replace(shortfall=parts.shortfall + mistake)

        monkeypatch.setitem(operator.IMPLEMENTATIONS, name, wrong)


def whole(shape: Shape, policy: str | None) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients in float64 by sharp attention itself, all rows at once."""
    x = drawn(shape, seed=0, device=CPU)
    inputs = [y.double().requires_grad_() for y in (x.q, x.k, x.v)]
    q, k, v = inputs
    options: dict[str, Any] = {"is_causal": shape.causal, "enable_gqa": shape.group > 1}
    out = sm.attention(q, k, v, policy=policy, **options)
    return out, list(torch.autograd.grad(out, inputs, x.upstream.double()))


def test_eight_shapes_count_and_others_show_that_it_runs() -> None:
    eight = [shape for shape in prefill_shapes() if shape.counts]
    assert {(s.batch, s.heads, s.kv_heads, s.queries, s.keys, s.width, s.causal) for s in eight} == {
        (batch, 32, kv, n, n, width, causal)
        for batch, kv, n in ((4, 32, 4096), (1, 8, 16384))
        for width in (64, 128)
        for causal in (False, True)
    }
    assert [s.queries for s in prefill_shapes() if s.once] == [131_072]
    counted = [(s.batch, s.keys, s.page_size) for s in decode_shapes() if s.counts]
    assert counted == [(8, 32_768, None), (1, 131_072, None), (8, 32_768, 64)]
    assert [s.keys for s in decode_shapes() if s.once] == [1_048_576]
    assert len({s.name for s in (*prefill_shapes(), *decode_shapes())}) == 14
    assert [s.queries for s in prefill_shapes(2048)][::8] == [512, 16_384]
    for length in (15, 16_385):
        with pytest.raises(ArgumentError, match="length: got"):
            prefill_shapes(length)


def test_rows_of_the_inputs_are_of_every_kind() -> None:
    x = drawn(Shape(1, 4, 4, 64, 4096, 64), seed=0, device=CPU)
    entropy = sm.row_stats(x.q.float(), x.k.float()).entropy
    assert entropy.min() < 1.0
    assert entropy.max() > 7.0
    assert ((entropy > 1.0) & (entropy < 5.5)).float().mean() > 0.2  # where the polynomial acts
    assert torch.equal(x.q, drawn(x.shape, seed=0, device=CPU).q)


def test_pages_hold_the_cache() -> None:
    shape = Shape(3, 2, 2, 1, 21, 4)
    x = drawn(shape, seed=0, device=CPU)
    pages = in_pages(x, 8, seed=0)
    assert pages.k.shape == (9, 8, 2, 4)
    assert pages.table.dtype == pages.lengths.dtype == torch.int32
    assert not torch.equal(pages.table.flatten(), torch.arange(9))
    gathered = pages.v[pages.table.long()].flatten(1, 2)
    assert torch.equal(gathered[:, :21].transpose(1, 2), x.v)
    assert gathered[:, 21:].isnan().all()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_sampled_rows_are_those_of_the_whole(shape: Shape) -> None:
    rows = sampled_rows(shape, CPU)
    assert (int(rows[0]), int(rows[-1]), len(rows)) == (0, shape.queries - 1, min(32, shape.queries))
    x = drawn(shape, seed=0, device=CPU)
    truth = rows_in_float64(x, rows)
    assert torch.allclose(truth.sharp, whole(shape, "paper")[0][:, :, rows], rtol=0, atol=1e-12)
    assert torch.allclose(truth.plain, whole(shape, None)[0][:, :, rows], rtol=0, atol=1e-12)
    assert not torch.allclose(truth.sharp, truth.plain, atol=0.1)
    stats = sm.row_stats(
        x.q.double(), x.k.double(), is_causal=shape.causal, enable_gqa=shape.group > 1, impl="reference"
    )
    for name, value in truth.stats.items():
        assert torch.allclose(value, getattr(stats, name)[..., rows], rtol=0, atol=1e-12), name


@pytest.mark.parametrize("policy", ["paper", None])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda s: s.name)
def test_gradients_in_blocks_are_those_of_the_whole(
    shape: Shape, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_inputs, "_BLOCK", 7 * shape.group * shape.keys)  # blocks of seven rows
    heads = chosen_heads(drawn(shape, seed=0, device=CPU))
    assert heads.where == ((0, 0), (1, 1))
    for got, want in zip(heads.exact(policy), heads.of(*whole(shape, policy)[1]), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_the_yardstick_of_gradients_is_exact_but_for_rounding() -> None:
    """In float64 nothing is rounded, so it has to be the truth: the parts through β and around it are all there."""
    x = drawn(SHAPE, seed=0, device=CPU, dtype=torch.float64)
    heads = chosen_heads(x)
    for got, want in zip(gpu._rounded(heads), heads.exact("paper"), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-10)


def test_what_is_right_gets_a_speed() -> None:
    entries = [*gpu.prefill(SHAPE, **OPTIONS), gpu.training(SHAPE, **OPTIONS)]
    assert [one["kind"] for one in entries] == ["stats", "attention", "train"]
    for one in entries:
        assert one["agrees"] is True
        assert one["ratio"] == one["ours_ms"] / one["stock_ms"]
        assert one["stock_backend"] == "flash"  # the one of them that a CPU has
        assert one["extra_bytes_per_row"] is None
        assert one["tflop_per_s"] > 0
        assert all(error["ours"] <= error["allowed"] for error in one["errors"].values())
    assert set(entries[0]["errors"]) == {"entropy", "lse", "mean"}
    products = [one["tflop_per_s"] * one["ours_ms"] * 1e9 / SHAPE.product_flops for one in entries]
    assert products == pytest.approx([1, 3, 11])


@pytest.mark.parametrize("mistake", [0.1, float("nan")])
def test_wrong_statistics_get_no_speed(mistake: float, monkeypatch: pytest.MonkeyPatch) -> None:
    break_statistics(monkeypatch, mistake)
    for one in (*gpu.prefill(SHAPE, **OPTIONS), gpu.training(SHAPE, **OPTIONS)):
        assert one["agrees"] is False, one["kind"]
        assert [one[speed] for speed in SPEEDS] == [None] * len(SPEEDS)
        assert "tflop_per_s" not in one
        json.dumps(one, allow_nan=False)


def test_attention_that_forgets_to_sharpen_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sm.attention
    monkeypatch.setattr(sm, "attention", lambda *given, **options: right(*given, **options | {"policy": None}))
    stats, attention = gpu.prefill(SHAPE, **OPTIONS)
    assert (stats["agrees"], attention["agrees"]) == (True, False)
    assert attention["ratio"] is None
    assert gpu.training(SHAPE, **OPTIONS)["ratio"] is None


def test_gradients_without_the_part_through_beta_get_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        stats = sm.row_stats(q.detach(), k.detach(), is_causal=True, enable_gqa=True)
        beta = sm.policies.PAPER.beta(stats)
        queries = (q * beta[..., None]).to(q.dtype)
        return F.scaled_dot_product_attention(queries, k, v, is_causal=True, enable_gqa=True)

    monkeypatch.setattr(sm, "attention", cut)
    one = gpu.training(SHAPE, **OPTIONS)
    assert one["agrees"] is False
    assert one["ours_ms"] is None
    assert gpu.prefill(SHAPE, **OPTIONS)[1]["agrees"] is True


def test_what_fails_is_named_and_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any, **options: Any) -> Tensor:
        raise RuntimeError("out of shared memory\nand more")

    monkeypatch.setattr(sm, "attention", failing)
    one = gpu.prefill(SHAPE, **OPTIONS)[1]
    assert (one["agrees"], one["problem"], one["ratio"]) == (False, "RuntimeError: out of shared memory", None)


@pytest.mark.parametrize("page_size", [None, 8])
def test_decode(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_decode(monkeypatch)
    shape = Shape(2, 4, 2, 1, 45, 16, page_size=page_size)
    one = decoding(shape, **OPTIONS)
    assert one["agrees"] is True
    assert one["tb_per_s"] == pytest.approx(2 * 2 * 2 * 2 * 45 * 16 / one["ours_ms"] / 1e9)
    assert set(one["stock_ms_by_backend"]) == {"flash", "flash, folded"}
    assert one["stock_ms"] == min(one["stock_ms_by_backend"].values())
    set_decode(monkeypatch, lambda *given, **options: plain_decode(*given, **options | {"policy": None}))
    assert decoding(shape, **OPTIONS)["ratio"] is None


def test_a_wrong_stock_kernel_is_no_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is quick because it is wrong would set a false bar."""
    monkeypatch.setattr(gpu, "with_backend", lambda name, run: run if name == "flash" else lambda: run() * 1.1)
    assert list(gpu.prefill(SHAPE, **OPTIONS)[1]["stock_ms_by_backend"]) == ["flash"]
    monkeypatch.setattr(gpu, "with_backend", lambda name, run: lambda: run() * torch.nan)
    with pytest.raises(UnsupportedError, match="none of PyTorch's kernels cuDNN, flash, efficient"):
        gpu.prefill(SHAPE, **OPTIONS)


def test_one_backend_and_no_other() -> None:
    q = torch.randn(1, 2, 4, 8)
    assert torch.equal(gpu.with_backend("flash", lambda: gpu.attend(q, q, q))(), gpu.attend(q, q, q))
    with pytest.raises(RuntimeError, match="No viable backend"):
        gpu.with_backend("cuDNN", lambda: gpu.attend(q, q, q))()


def test_everybody_takes_turns_and_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def runner(name: str) -> Runner:
        return Runner(lambda: order.append(name), lambda result: {"output": 0.0}, {"output": 0.0})

    times = iter([100.0] * 3 + [5.0, 4.0, 2.0] + [6.0, 3.0, 9.0] + [7.0, 5.0, 1.0])
    monkeypatch.setattr(gpu, "peak_bytes", lambda run, device: 640)

    def canned(run: Any, device: torch.device) -> Spent:
        run()
        return Spent(next(times), 0.5)

    monkeypatch.setattr(gpu, "spent", canned)
    ours, rivals = check_and_time({"a": runner("a")}, {"b": runner("b"), "c": runner("c")}, device=CPU, rounds=3)
    assert "".join(order) == "abc" * 5
    assert (ours["a"].ms, ours["a"].host_ms, ours["a"].peak) == (6.0, 0.5, 640)
    assert {name: one.ms for name, one in rivals.items()} == {"b": 4.0, "c": 2.0}


def test_files_are_named_after_the_device_and_say_where_they_come_from(tmp_path: Path) -> None:
    path = gpu.save(
        tmp_path / "h200.json", gpu.with_origin([{"kind": "stats"}], command="sharpmax bench --gpu", seed=3)
    )
    (one,) = json.loads(path.read_text(encoding="utf-8"))
    assert one["command"] == "sharpmax bench --gpu"
    assert one["provenance"]["seed"] == 3
    assert {"commit", "versions", "hardware", "date"} <= set(one["provenance"])
    assert gpu.slug("") == "gpu"


@pytest.mark.parametrize(
    ("options", "named"), [({"repeat": 0}, "repeat"), ({"seed": -1}, "seed"), ({"length": 1}, "length")]
)
def test_wrong_arguments_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=f"{named}: got"):
        gpu.gpu_entries(CPU, **options)
