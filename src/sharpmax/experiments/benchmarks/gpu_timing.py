"""Time sharpmax and every PyTorch backend in the same rounds. Incorrect results are not timed."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.experiments.benchmarks.gpu_inputs import Inputs, Shape
from sharpmax.experiments.benchmarks.measuring import Note, silent

_WAIT = 2_000_000  # cycles, about a millisecond, in which the host queues a call that is to be timed


class Spent(NamedTuple):
    """Milliseconds of the device, and of the host to launch."""

    device_ms: float
    host_ms: float


def spent(run: Callable[[], Any], device: torch.device) -> Spent:
    """Time of one call.

    On a GPU the call is queued behind a short wait, so what is timed is the device's work and not Python's.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        taken = 1e3 * (time.perf_counter() - start)
        return Spent(taken, taken)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_WAIT)  # type: ignore[no-untyped-call, unused-ignore]
    begin.record()
    start = time.perf_counter()
    run()
    asked = 1e3 * (time.perf_counter() - start)
    end.record()
    end.synchronize()
    return Spent(begin.elapsed_time(end), asked)


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


T = TypeVar("T")

BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
"""Names here and in torch; the one that builds the n×n matrix is not among them."""


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Plain attention by torch's own choice of backend."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def with_backend(name: str, run: Callable[[], T]) -> Callable[[], T]:
    """The same with one backend and no other; it raises `RuntimeError` where that one refuses."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, BACKENDS[name])

    def alone() -> T:
        with sdpa_kernel([backend]):
            return run()

    return alone


Errors = Mapping[str, float]


@dataclass(frozen=True)
class Runner:
    """Something to time, its errors, and the largest error allowed for each."""

    run: Callable[[], Any]
    errors: Callable[[Any], Errors]
    allowed: Errors


@dataclass(frozen=True)
class Outcome:
    """Errors, and for correct results the median times and the peak memory."""

    errors: Errors
    agrees: bool
    problem: str | None = None
    ms: float | None = None
    host_ms: float | None = None
    peak: int | None = None


def times(factor: float, errors: Errors) -> dict[str, float]:
    """So many times the errors of a yardstick, as what is allowed."""
    return {name: factor * error for name, error in errors.items()}


def contest(
    ours: Mapping[str, Runner], stock: Mapping[str, Runner], *, device: torch.device, rounds: int, note: Note = silent
) -> tuple[dict[str, Outcome], dict[str, Outcome]]:
    """Outcomes of ours and of PyTorch's backends that take the case and are correct.

    The check, the measuring of memory and an unrecorded round are the warm-up.
    """
    note("checking")
    found = {name: _checked(runner) for name, runner in ours.items()}
    rivals = {name: outcome for name, runner in stock.items() if (outcome := _checked(runner)).agrees}
    if not rivals:
        raise UnsupportedError(f"--gpu: none of PyTorch's kernels {', '.join(stock)} takes a case on this device")
    running = {("ours", name): ours[name].run for name, outcome in found.items() if outcome.agrees}
    running |= {("stock", name): stock[name].run for name in rivals}
    peaks = {key: peak_bytes(run, device) for key, run in running.items()}
    taken: dict[tuple[str, str], list[Spent]] = {key: [] for key in running}
    for done in range(rounds + 1):
        note(f"round {done} of {rounds}" if done else "warming up")
        for key, run in running.items():
            one = spent(run, device)
            if done:
                taken[key].append(one)

    def timed(side: str, name: str, outcome: Outcome) -> Outcome:
        key = side, name
        if key not in taken:
            return outcome
        ms, host_ms = (statistics.median(column) for column in zip(*taken[key], strict=True))
        return Outcome(outcome.errors, agrees=True, ms=ms, host_ms=host_ms, peak=peaks[key])

    return (
        {name: timed("ours", name, outcome) for name, outcome in found.items()},
        {name: timed("stock", name, outcome) for name, outcome in rivals.items()},
    )


def fastest(stock: Mapping[str, Outcome]) -> tuple[str, Outcome]:
    """The name and the outcome of PyTorch's fastest kernel."""
    return min(stock.items(), key=lambda one: math.inf if one[1].ms is None else one[1].ms)


def _checked(runner: Runner) -> Outcome:
    with warnings.catch_warnings():
        # Backends say in warnings why they refuse.
        warnings.simplefilter("ignore")
        try:
            errors = runner.errors(runner.run())
        except Exception as problem:  # compilers of kernels raise errors of many kinds
            first_line = next(iter(str(problem).splitlines()), "")
            return Outcome({}, agrees=False, problem=f"{type(problem).__name__}: {first_line}")
    # Written this way round so that NaN does not pass.
    return Outcome(errors, agrees=all(error <= runner.allowed[name] for name, error in errors.items()))


FLOORS = {"stats": 0.5, "attention": 1.5, "train": None, "decode": 1.03}
"""Lower bounds from arithmetic and memory traffic, in times of plain attention; None where there is no simple one."""

LIMITS: dict[str, dict[str, float]] = {
    "stats": {"mean_ratio": 0.62},
    "attention": {"mean_ratio": 1.62, "ratio": 1.8, "extra_bytes_per_row": 32.0},
    "train": {"mean_ratio": 1.9},
    "decode": {"mean_ratio": 1.12},
}
"""Targets: for the mean of the cases that count, and for each of them."""

_PRODUCTS = {"stats": 1, "attention": 3, "train": 11}
"""Matrix products: plain attention has 2 and 5 back; statistics add 1 and, recomputing the logits, 3 back."""


def entry(
    kind: str,
    x: Inputs,
    outcome: Outcome,
    rivals: Mapping[str, Outcome],
    *,
    rounds: int,
    allowed: Mapping[str, float],
    yardstick: Mapping[str, float],
    plain: Mapping[str, float],
) -> dict[str, Any]:
    """The entry of a case; its times are None where the check failed.

    `yardstick` are the errors of PyTorch's kernel with everything else exact, `plain` those of plain attention.
    """
    name, best = fastest(rivals)
    ms, stock_ms = outcome.ms, best.ms
    right = outcome.agrees and ms is not None and stock_ms is not None
    return {
        "kind": kind,
        "case": x.shape.name,
        "shape": x.shape.to_dict(),
        "counts": x.shape.counts,
        "agrees": outcome.agrees,
        "problem": outcome.problem,
        "ours_ms": ms if right else None,
        "stock_ms": stock_ms if right else None,
        "stock_backend": name,
        "ratio": ms / stock_ms if right and ms is not None and stock_ms is not None else None,
        "floor": FLOORS[kind],
        "limits": LIMITS[kind],
        "stock_ms_by_backend": {rival: found.ms for rival, found in rivals.items()} if right else None,
        **(_pace(kind, x.shape, ms) if right and ms is not None else {}),
        **(_memory(kind, x.shape, outcome, best) if right else {}),
        "host_ms": outcome.host_ms if right else None,
        "stock_host_ms": best.host_ms if right else None,
        "working_set_mb": x.bytes / 1e6,
        "errors": {
            field: {
                "ours": _finite(error),
                "allowed": allowed.get(field),
                "stock": None if kind == "stats" else _finite(yardstick[field]),
                "stock_plain": None if kind == "stats" else _finite(plain[field]),
            }
            for field, error in outcome.errors.items()
        },
        "rounds": rounds,
    }


def _pace(kind: str, shape: Shape, ms: float) -> dict[str, float]:
    if kind == "decode":
        return {"tb_per_s": shape.cache_bytes / ms / 1e9}
    return {"tflop_per_s": _PRODUCTS[kind] * shape.product_flops / ms / 1e9}


def _memory(kind: str, shape: Shape, outcome: Outcome, best: Outcome) -> dict[str, float | None]:
    """Row statistics replace nothing, so all their memory is extra."""
    if outcome.peak is None or best.peak is None:
        return {"extra_bytes_per_row": None}
    without = 0 if kind == "stats" else best.peak
    return {"extra_bytes_per_row": (outcome.peak - without) / shape.rows}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
