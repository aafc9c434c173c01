"""The GPU benchmark: statistics, attention, training step and decode, next to every PyTorch backend.

Results are checked against float64 and incorrect ones are not timed. Within a round everything runs once.
"""

from __future__ import annotations

import gc
import json
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.experiments.benchmarks.gpu_inputs import (
    FULL_LENGTH,
    ChosenHeads,
    HeadGradients,
    Inputs,
    Shape,
    chosen_heads,
    decode_shapes,
    drawn,
    in_pages,
    prefill_shapes,
    rows_in_float64,
    sampled_rows,
)
from sharpmax.experiments.benchmarks.measuring import Note, distance, in_rounds, silent
from sharpmax.files import write_text
from sharpmax.provenance import check_amounts, check_seed, provenance
from sharpmax.stats.statistics import RowStats

T = TypeVar("T")

KINDS = ("stats", "attention", "train", "decode")
ROUNDS = 20

FLOORS = {"stats": 0.5, "attention": 1.5, "train": None, "decode": 1.03}
"""Lower bounds from arithmetic and memory traffic, in times of plain attention; None where there is no simple one."""

LIMITS: dict[str, dict[str, float]] = {
    "stats": {"mean_ratio": 0.62},
    "attention": {"mean_ratio": 1.62, "ratio": 1.8, "extra_bytes_per_row": 32.0},
    "train": {"mean_ratio": 1.9},
    "decode": {"mean_ratio": 1.12},
}
"""Targets: for the mean of the cases that count, and for each of them."""

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The one that builds the n×n matrix is not among them."""

# Matrix products: plain attention has 2 and 5 back; statistics add 1 and, recomputing the logits, 3 back.
_PRODUCTS = {"stats": 1, "attention": 3, "train": 11}
_STATISTICS_ERROR = 1e-4  # relative where a statistic exceeds 1
_OUTPUT_FACTOR, _GRADIENT_FACTOR = 2.0, 3.0  # errors allowed, in errors of PyTorch's kernel
_WAIT = 2_000_000  # cycles, about a millisecond, in which the host queues a call that is to be timed


class Spent(NamedTuple):
    """Milliseconds of the device, and of the host to launch."""

    device_ms: float
    host_ms: float


def spent(run: Callable[[], Any], device: torch.device, wait: int = _WAIT) -> Spent:
    """Time of one call.

    On a GPU the call is queued behind a wait of so many cycles, so what is timed is the device's work and not Python's.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        taken = 1e3 * (time.perf_counter() - start)
        return Spent(taken, taken)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(wait)  # type: ignore[no-untyped-call, unused-ignore]
    begin.record()
    start = time.perf_counter()
    run()
    launched = 1e3 * (time.perf_counter() - start)
    end.record()
    end.synchronize()
    return Spent(begin.elapsed_time(end), launched)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """The most memory that a call holds at a time, its outputs included and its inputs not; None off a GPU."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    # A cached block may be larger than requested, and would be counted as a whole.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Plain attention by torch's own choice of backend."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def with_backend(name: str, run: Callable[[], T]) -> Callable[[], T]:
    """The same with one backend and no other; it raises `RuntimeError` where that one refuses."""

    def alone() -> T:
        with sdpa_kernel([BACKENDS[name]]):
            return run()

    return alone


@dataclass(frozen=True)
class Runner:
    """Something to time, its errors, and the largest error allowed for each."""

    run: Callable[[], Any]
    errors: Callable[[Any], Mapping[str, float]]
    allowed: Mapping[str, float]


@dataclass(frozen=True)
class CheckedRunner:
    """Errors, and for correct results the median times and the peak memory."""

    errors: Mapping[str, float]
    agrees: bool
    problem: str | None = None
    ms: float = math.nan
    host_ms: float = math.nan
    peak: int | None = None


def check_and_time(
    ours: Mapping[str, Runner], stock: Mapping[str, Runner], *, device: torch.device, rounds: int, note: Note = silent
) -> tuple[dict[str, CheckedRunner], dict[str, CheckedRunner]]:
    """Check and time ours, and those of PyTorch's backends that take the case and are correct.

    The check, the measuring of memory and an unrecorded round are the warm-up.
    """
    note("checking")
    # Names of ours and of PyTorch's backends never meet: the former are kinds of case.
    runners = {**ours, **stock}
    found = {name: _checked(runner) for name, runner in runners.items()}
    correct = {name: partial(spent, runners[name].run, device) for name, one in found.items() if one.agrees}
    if not any(name in correct for name in stock):
        raise UnsupportedError(f"--gpu: none of PyTorch's kernels {', '.join(stock)} takes a case on this device")
    peaks = {name: peak_bytes(runners[name].run, device) for name in correct}
    note("warming up")
    in_rounds(correct, 1)
    for name, times in in_rounds(correct, rounds, note).items():
        ms, host_ms = (statistics.median(column) for column in zip(*times, strict=True))
        found[name] = replace(found[name], ms=ms, host_ms=host_ms, peak=peaks[name])
    return {name: found[name] for name in ours}, {name: found[name] for name in stock if name in correct}


def _checked(runner: Runner) -> CheckedRunner:
    with warnings.catch_warnings():
        # Backends say in warnings why they refuse.
        warnings.simplefilter("ignore")
        try:
            errors = runner.errors(runner.run())
        except Exception as problem:  # compilers of kernels raise errors of many kinds
            first_line = next(iter(str(problem).splitlines()), "")
            return CheckedRunner({}, agrees=False, problem=f"{type(problem).__name__}: {first_line}")
    # Written this way round so that NaN does not pass.
    return CheckedRunner(errors, agrees=all(error <= runner.allowed[name] for name, error in errors.items()))


def _entries(
    x: Inputs,
    ours: Mapping[str, Runner],
    stock: Mapping[str, Runner],
    yardstick: Mapping[str, float],
    plain: Mapping[str, float],
    *,
    device: torch.device,
    rounds: int,
    note: Note,
) -> list[dict[str, Any]]:
    """Time ours by kind next to PyTorch's; times are None where the check failed.

    `yardstick` are the errors of PyTorch's kernel with everything else exact, `plain` those of plain attention.
    """
    found, rivals = check_and_time(ours, stock, device=device, rounds=rounds, note=note)
    backend, best = min(rivals.items(), key=lambda rival: rival[1].ms)
    entries = []
    for kind, runner in ours.items():
        one, shape = found[kind], x.shape
        right, speed = one.agrees, {}
        if right and kind == "decode":
            speed["tb_per_s"] = shape.cache_bytes / one.ms / 1e9
        elif right:
            speed["tflop_per_s"] = _PRODUCTS[kind] * shape.product_flops / one.ms / 1e9
        entry = {
            "kind": kind,
            "case": shape.name,
            "shape": asdict(shape),
            "counts": shape.counts,
            "agrees": right,
            "problem": one.problem,
            "ours_ms": one.ms if right else None,
            "stock_ms": best.ms if right else None,
            "stock_backend": backend,
            "ratio": one.ms / best.ms if right else None,
            "floor": FLOORS[kind],
            "limits": LIMITS[kind],
            "stock_ms_by_backend": {rival: other.ms for rival, other in rivals.items()} if right else None,
            **speed,
            **({"extra_bytes_per_row": _extra_bytes(kind, one, best, shape.rows)} if right else {}),
            "host_ms": one.host_ms if right else None,
            "stock_host_ms": best.host_ms if right else None,
            "working_set_mb": x.bytes / 1e6,
            "errors": {
                field: {
                    "ours": _finite(error),
                    "allowed": runner.allowed.get(field),
                    "stock": None if kind == "stats" else _finite(yardstick[field]),
                    "stock_plain": None if kind == "stats" else _finite(plain[field]),
                }
                for field, error in one.errors.items()
            },
            "rounds": rounds,
        }
        entries.append(entry)
    return entries


def _extra_bytes(kind: str, one: CheckedRunner, best: CheckedRunner, rows: int) -> float | None:
    if one.peak is None or best.peak is None:
        return None
    # Row statistics replace nothing, so all their memory is extra.
    return (one.peak - (0 if kind == "stats" else best.peak)) / rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _errors(name: str, given: Tensor, wanted: Tensor) -> dict[str, float]:
    """Largest and root mean square error of a tensor, under its name."""
    error = given.double() - wanted
    return {name: float(error.abs().max()), f"{name} rms": float(error.square().mean().sqrt())}


def _times(factor: float, errors: Mapping[str, float]) -> dict[str, float]:
    return {name: factor * error for name, error in errors.items()}


def prefill(shape: Shape, *, seed: int, device: torch.device, rounds: int, note: Note = silent) -> list[dict[str, Any]]:
    """The entries of a shape, of the kinds `stats` and `attention`."""
    x = drawn(shape, seed=seed, device=device)
    q, k, v, causal, grouped = x.q, x.k, x.v, shape.causal, shape.group > 1
    rows = sampled_rows(shape, device)
    note("computing the float64 reference")
    truth = rows_in_float64(x, rows)

    def stats_errors(found: RowStats) -> dict[str, float]:
        there = ["entropy", *(name for name in ("lse", "mean", "var") if name in found.measured)]
        return {name: distance(getattr(found, name)[..., rows], truth.stats[name]) for name in there}

    def sharp_errors(out: Tensor) -> dict[str, float]:
        return _errors("output", out[:, :, rows], truth.sharp)

    def plain_errors(out: Tensor) -> dict[str, float]:
        return _errors("output", out[:, :, rows], truth.plain)

    # What PyTorch's kernel makes of the exact β·q in the dtype of q is what rounding costs anybody. Rows are
    # independent, so only the sampled ones need it.
    exact = q.clone()
    exact[:, :, rows] = (truth.beta[..., None] * q[:, :, rows].double()).to(q.dtype)
    yardstick = sharp_errors(attend(exact, k, v, causal))
    plain = plain_errors(attend(q, k, v, causal))
    del exact
    ours = {
        "stats": Runner(
            lambda: sm.row_stats(q, k, is_causal=causal, enable_gqa=grouped, fields={"entropy"}),
            stats_errors,
            dict.fromkeys(truth.stats, _STATISTICS_ERROR),
        ),
        "attention": Runner(
            lambda: sm.attention(q, k, v, is_causal=causal, enable_gqa=grouped, policy="paper"),
            sharp_errors,
            _times(_OUTPUT_FACTOR, yardstick),
        ),
    }
    limits = _times(_OUTPUT_FACTOR, plain)
    stock = {
        name: Runner(with_backend(name, lambda: attend(q, k, v, causal)), plain_errors, limits) for name in BACKENDS
    }
    return _entries(x, ours, stock, yardstick, plain, device=device, rounds=rounds, note=note)


def decoding(shape: Shape, *, seed: int, device: torch.device, rounds: int, note: Note = silent) -> dict[str, Any]:
    """The entry of a shape, of the kind `decode`.

    PyTorch's kernels read no pages: they get the same keys in one piece.
    """
    x = drawn(shape, seed=seed, device=device)
    note("computing the float64 reference")
    truth = rows_in_float64(x, sampled_rows(shape, device))
    exact = (truth.beta[..., None] * x.q.double()).to(x.q.dtype)
    yardstick = _errors("output", attend(exact, x.k, x.v), truth.sharp)
    plain = _errors("output", attend(x.q, x.k, x.v), truth.plain)
    limits = _times(_OUTPUT_FACTOR, plain)

    def rival(name: str, run: Callable[[], Tensor]) -> Runner:
        return Runner(with_backend(name, run), lambda out: _errors("output", out.view_as(x.q), truth.plain), limits)

    keys, values = x.k, x.v
    table = lengths = None
    if shape.page_size is not None:
        pages = in_pages(x, shape.page_size, seed)
        keys, values, table, lengths = pages.k, pages.v, pages.table, pages.lengths
    ours = Runner(
        lambda: sm.decode(x.q, keys, values, block_table=table, lengths=lengths, policy="paper"),
        lambda out: _errors("output", out, truth.sharp),
        _times(_OUTPUT_FACTOR, yardstick),
    )
    # Query heads that share their keys can also be passed as query rows of one head, which suits some kernels better.
    folded = x.q.view(shape.batch, shape.kv_heads, shape.group, shape.width)
    stock = {name: rival(name, lambda: attend(x.q, x.k, x.v)) for name in BACKENDS}
    stock |= {f"{name}, folded": rival(name, lambda: attend(folded, x.k, x.v)) for name in BACKENDS}
    return _entries(x, {"decode": ours}, stock, yardstick, plain, device=device, rounds=rounds, note=note)[0]


def training(shape: Shape, *, seed: int, device: torch.device, rounds: int, note: Note = silent) -> dict[str, Any]:
    """The entry of a shape, of the kind `train`."""
    x = drawn(shape, seed=seed, device=device)
    note("computing the float64 reference")
    heads = chosen_heads(x)
    plain_truth, sharp_truth = heads.exact(None), heads.exact("paper")

    def step(attention: Callable[..., Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        inputs = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]

        def gradients() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(attention(*inputs), inputs, x.upstream)

        return gradients

    def sharp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sm.attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.group > 1, policy="paper")

    def plain_errors(found: tuple[Tensor, ...]) -> dict[str, float]:
        return _gradient_errors(heads.of(*found), plain_truth)

    plain_step = step(lambda q, k, v: attend(q, k, v, shape.causal))
    plain = plain_errors(plain_step())
    yardstick = _gradient_errors(_rounded(heads), sharp_truth)
    allowed = _times(_GRADIENT_FACTOR, yardstick)
    ours = Runner(step(sharp), lambda found: _gradient_errors(heads.of(*found), sharp_truth), allowed)
    limits = _times(_GRADIENT_FACTOR, plain)
    stock = {name: Runner(with_backend(name, plain_step), plain_errors, limits) for name in BACKENDS}
    return _entries(x, {"train": ours}, stock, yardstick, plain, device=device, rounds=rounds, note=note)[0]


def _rounded(heads: ChosenHeads) -> HeadGradients:
    """PyTorch's gradients with everything else exact: β, its gradient, and the sums of the parts."""
    beta = heads.beta()
    exact = (beta[..., None] * heads.q.double()).to(heads.q.dtype)
    inputs = [y.requires_grad_() for y in (exact, heads.k[:, None].clone(), heads.v[:, None].clone())]
    with torch.enable_grad():
        out = attend(inputs[0], inputs[1], inputs[2], heads.causal)
        into_q, into_k, into_v = torch.autograd.grad(out, inputs, heads.upstream)
    through = heads.through_beta((heads.q.double() * into_q.double()).sum(-1))
    return HeadGradients(
        (beta[..., None] * into_q.double() + through.q).to(heads.q.dtype),
        (into_k[:, 0].double() + through.k).to(heads.k.dtype),
        into_v[:, 0],
    )


def _gradient_errors(given: HeadGradients, wanted: HeadGradients) -> dict[str, float]:
    parts = zip(HeadGradients._fields, given, wanted, strict=True)
    return {key: error for name, a, b in parts for key, error in _errors(f"d{name}", a, b).items()}


def gpu_entries(
    device: torch.device, *, length: int = FULL_LENGTH, repeat: int = ROUNDS, seed: int = 0, note: Note = silent
) -> list[dict[str, Any]]:
    """The entries of every case, in the order of `KINDS`."""
    check_amounts(length, repeat)
    check_seed(seed)
    found: list[dict[str, Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        # Flat rows lie beyond the polynomial's range on purpose, and PyTorch's kernels warn about slow inputs.
        warnings.simplefilter("ignore", UserWarning)
        for made in _all(device, length, repeat, seed, note):
            found += made
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    full = {"full_size": length == FULL_LENGTH}
    return sorted((one | full for one in found), key=lambda one: KINDS.index(one["kind"]))


def _all(device: torch.device, length: int, repeat: int, seed: int, note: Note) -> Iterator[list[dict[str, Any]]]:
    def options(shape: Shape, kind: str) -> dict[str, Any]:
        def tell(text: str) -> None:
            note(f"{kind}, {shape.name}: {text}")

        return {"seed": seed, "device": device, "rounds": 1 if shape.once else repeat, "note": tell}

    for shape in prefill_shapes(length):
        yield prefill(shape, **options(shape, "attention"))
    for shape in prefill_shapes(length):
        if shape.counts:
            yield [training(shape, **options(shape, "train"))]
    for shape in decode_shapes(length):
        yield [decoding(shape, **options(shape, "decode"))]


def slug(gpu: str) -> str:
    """A device as the name of a file.

    >>> slug("NVIDIA H200"), slug("NVIDIA GeForce RTX 4090")
    ('h200', 'geforce-rtx-4090')
    """
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd")) or "gpu"


def with_origin(entries: Sequence[dict[str, Any]], *, command: str, seed: int) -> list[dict[str, Any]]:
    """The entries with command and provenance."""
    origin = {"command": command, "provenance": provenance(seed)}
    return [one | origin for one in entries]


def save(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Write entries as a JSON list."""
    return write_text(path, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
