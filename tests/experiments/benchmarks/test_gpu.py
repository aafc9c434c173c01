"""The GPU benchmark on a CPU: its references are correct, and incorrect results are not timed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.experiments.benchmarks import gpu, gpu_inputs
from sharpmax.experiments.benchmarks.gpu_inputs import ChosenHeads, Shape, drawn, rows_in_float64, sampled_rows
from sharpmax.experiments.benchmarks.measuring import Spent
from sharpmax.stats import dispatch as operator
from sharpmax.stats.call import AttentionCall, Parts

pytestmark = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")

CPU = torch.device("cpu")
SHAPE = Shape(2, 4, 2, 40, 40, 16, causal=True)
SHAPES = [SHAPE, replace(SHAPE, causal=False), Shape(1, 2, 2, 1, 33, 8)]
OPTIONS: dict[str, Any] = {"seed": 0, "device": CPU, "rounds": 2}
SPEEDS = ("ours_ms", "stock_ms", "ratio", "stock_ms_by_backend", "host_ms", "stock_host_ms")


def plain_decode(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, block_table: Tensor | None = None, **options: Any
) -> Tensor:
    if block_table is not None:
        assert lengths is not None
        keys = int(lengths[0])
        pages = [x[block_table.long()].flatten(1, 2) for x in (k, v)]
        assert all(x[:, keys:].isnan().all() for x in pages), "unused slots must not be read"
        k, v = (x[:, :keys].transpose(1, 2) for x in pages)
    out: Tensor = sm.attention(q, k, v, enable_gqa=True, **options)
    return out


def set_decode(monkeypatch: pytest.MonkeyPatch, decode: Any = plain_decode) -> None:
    monkeypatch.setattr(sys.modules["sharpmax"], "decode", decode, raising=False)


def whole(shape: Shape, policy: str | None) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of `sm.attention` in float64, all rows at once."""
    x = drawn(shape, seed=0, device=CPU)
    inputs = [y.double().requires_grad_() for y in (x.q, x.k, x.v)]
    q, k, v = inputs
    out = sm.attention(q, k, v, policy=policy, is_causal=shape.causal, enable_gqa=shape.group > 1)
    return out, list(torch.autograd.grad(out, inputs, x.upstream.double()))


def same(got: Tensor, want: Tensor, within: float = 1e-12) -> bool:
    return torch.allclose(got, want, rtol=0, atol=within)


def test_which_shapes_count_and_which_run_once() -> None:
    prefill, decode = gpu_inputs.prefill_shapes(), gpu_inputs.decode_shapes()
    assert (sum(shape.counts for shape in prefill), sum(shape.counts for shape in decode)) == (8, 3)
    assert [shape.keys for shape in (*prefill, *decode) if shape.once] == [131_072, 1_048_576]
    assert len({shape.name for shape in (*prefill, *decode)}) == 14


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_sampled_rows_are_those_of_the_whole(shape: Shape) -> None:
    rows = sampled_rows(shape, CPU)
    assert (int(rows[0]), int(rows[-1]), len(rows)) == (0, shape.queries - 1, min(32, shape.queries))
    x = drawn(shape, seed=0, device=CPU)
    truth = rows_in_float64(x, rows)
    assert same(truth.sharp, whole(shape, "paper")[0][:, :, rows])
    assert same(truth.plain, whole(shape, None)[0][:, :, rows])
    assert not same(truth.sharp, truth.plain, 0.1)
    options: dict[str, Any] = {"is_causal": shape.causal, "enable_gqa": shape.group > 1, "impl": "reference"}
    stats = sm.row_stats(x.q.double(), x.k.double(), **options)
    assert all(same(value, getattr(stats, name)[..., rows]) for name, value in truth.stats.items())


@pytest.mark.parametrize("policy", ["paper", None])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=lambda s: s.name)
def test_gradients_in_blocks_are_those_of_the_whole(
    shape: Shape, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_inputs, "_BLOCK", 2 * 7 * shape.group * shape.keys)  # blocks of seven rows
    heads = ChosenHeads.of(drawn(shape, seed=0, device=CPU))
    wanted = heads.part(shape, *whole(shape, policy)[1])
    assert [len(one) for one in wanted] == [2, 2, 2]
    assert all(map(same, heads.exact(policy), wanted))


def test_the_yardstick_of_gradients_is_exact_in_float64() -> None:
    """There, only a missing part (through β or around it) could make a difference."""
    heads = ChosenHeads.of(drawn(SHAPE, seed=0, device=CPU, dtype=torch.float64))
    assert all(same(got, want, 1e-10) for got, want in zip(gpu._rounded(heads), heads.exact("paper"), strict=True))


def entries() -> list[dict[str, Any]]:
    return [*gpu.prefill(SHAPE, **OPTIONS), *gpu.training(SHAPE, **OPTIONS)]


def test_correct_results_are_timed() -> None:
    found = entries()
    assert [one["kind"] for one in found] == ["stats", "attention", "train"]
    for one in found:
        assert one["agrees"] is True
        assert one["ratio"] == one["ours_ms"] / one["stock_ms"]
        assert one["stock_backend"] == "flash"  # the only one on a CPU
        assert one["extra_bytes_per_row"] is None
        assert all(error["ours"] <= error["allowed"] for error in one["errors"].values())
    assert set(found[0]["errors"]) == {"entropy", "lse", "mean"}
    products = [one["tflop_per_s"] * one["ours_ms"] * 1e9 / SHAPE.product_flops for one in found]
    assert products == pytest.approx([1, 3, 11])


@pytest.mark.parametrize("mistake", [0.1, float("nan")])
def test_wrong_statistics_are_not_timed(mistake: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sdpa", "streaming"):
        right = operator.IMPLEMENTATIONS[name]

        def wrong(problem: AttentionCall, *fields: Any, right: Any = right) -> Parts:
            parts: Parts = right(problem, *fields)
            return parts._replace(shortfall=parts.shortfall + mistake)

        monkeypatch.setitem(operator.IMPLEMENTATIONS, name, wrong)
    for one in entries():
        assert one["agrees"] is False, one["kind"]
        assert [one[speed] for speed in SPEEDS] == [None] * len(SPEEDS)
        assert "tflop_per_s" not in one
        json.dumps(one, allow_nan=False)


def unsharpened(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def without_the_gradient_of_beta(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    beta = sm.policies.PAPER.beta(sm.row_stats(q.detach(), k.detach(), is_causal=True, enable_gqa=True))
    return unsharpened((q * beta[..., None]).to(q.dtype), k, v)


def failing(*given: Any, **options: Any) -> Tensor:
    raise RuntimeError("out of shared memory\nand more")


@pytest.mark.parametrize(
    ("attention", "right", "problem"),
    [
        (unsharpened, [True, False, False], None),
        (without_the_gradient_of_beta, [True, True, False], None),
        (failing, [True, False, False], "RuntimeError: out of shared memory"),
    ],
)
def test_wrong_attention_is_not_timed(
    attention: Any, right: list[bool], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm, "attention", attention)
    found = entries()
    assert [one["agrees"] for one in found] == [one["ratio"] is not None for one in found] == right
    assert found[-1]["problem"] == problem


@pytest.mark.parametrize("page_size", [None, 8])
def test_decode(page_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_decode(monkeypatch)
    shape = Shape(2, 4, 2, 1, 45, 16, page_size=page_size)
    (one,) = gpu.prefill(shape, **OPTIONS)
    assert (one["kind"], one["agrees"]) == ("decode", True)
    assert one["tb_per_s"] == pytest.approx(2 * 2 * 2 * 2 * 45 * 16 / one["ours_ms"] / 1e9)
    assert set(one["stock_ms_by_backend"]) == {"flash", "flash, folded"}
    assert one["stock_ms"] == min(one["stock_ms_by_backend"].values())
    set_decode(monkeypatch, lambda *given, **options: plain_decode(*given, **options | {"policy": None}))
    assert gpu.prefill(shape, **OPTIONS)[0]["ratio"] is None


def test_incorrect_backends_of_pytorch_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "with_backend", lambda name, run: run if name == "flash" else lambda: run() * 1.1)
    assert list(gpu.prefill(SHAPE, **OPTIONS)[1]["stock_ms_by_backend"]) == ["flash"]
    monkeypatch.setattr(gpu, "with_backend", lambda name, run: lambda: run() * torch.nan)
    with pytest.raises(UnsupportedError, match="none of PyTorch's kernels cuDNN, flash, efficient"):
        gpu.prefill(SHAPE, **OPTIONS)


def test_cases_take_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0] * 3 + [5.0, 4.0, 4.0] + [6.0, 3.0, 8.0] + [7.0, 5.0, 1.0])
    monkeypatch.setattr(gpu, "spent", lambda run, device: Spent(next(times), 0.5))
    monkeypatch.setattr(gpu, "peak_bytes", lambda run, device: 640)
    stats, attention = gpu.prefill(SHAPE, **OPTIONS | {"rounds": 3})
    assert (stats["ours_ms"], attention["ours_ms"], attention["stock_ms"]) == (6.0, 4.0, 4.0)
    assert (stats["extra_bytes_per_row"], attention["extra_bytes_per_row"]) == (640 / SHAPE.rows, 0.0)
