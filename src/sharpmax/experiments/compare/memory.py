"""The most memory that a piece of work holds on its device."""

from __future__ import annotations

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
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        yield lambda: found[0]
        found[0] = torch.cuda.max_memory_allocated(device) - held
        return
    with suppress(OSError):  # Linux forgets the peak of a process that asks for it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident_bytes()
    yield lambda: found[0]
    after = resident_bytes()
    if before is not None and after is not None:
        found[0] = max(0, after[1] - before[0])
