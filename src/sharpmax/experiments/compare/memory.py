"""The most memory that a piece of work holds on its device."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from sharpmax.experiments.fresh import resident_bytes

__all__ = ["peak_of"]


@contextmanager
def peak_of(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """A function that gives, after the work, by how many bytes the device's memory rose in it; None if unknown."""
    found: list[int | None] = [None]
    gc.collect()
    if device.type == "cuda":
        # cuBLAS keeps workspaces for as long as the process lives, so that the first work of all would pay for them.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        yield lambda: found[0]
        peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        torch._C._cuda_clearCublasWorkspaces()
        workspaces = left - torch.cuda.memory_allocated(device)
        found[0] = peak - held - workspaces
        return
    _give_back()
    with suppress(OSError):  # Linux forgets the peak of a process that asks for it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident_bytes()
    yield lambda: found[0]
    after = resident_bytes()
    if before is not None and after is not None:
        found[0] = max(0, after[1] - before[0])


def _give_back() -> None:
    """Let the C library return to the system what earlier work freed: it would count as held before, and not as new."""
    with suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
