"""Time and memory of a call: on a GPU by its own events, elsewhere by the processor's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["Spent", "peak_bytes", "spent"]

_WAIT = 2_000_000
"""Cycles, about a millisecond, in which the host queues a call that is to be timed."""


class Spent(NamedTuple):
    """Milliseconds that the device took, and that the host took to ask for it."""

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
    # A block that is lying about may be larger than what is asked of it, and would be counted as a whole.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
