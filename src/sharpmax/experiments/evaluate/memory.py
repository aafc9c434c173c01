"""The most memory a stretch of work takes: CUDA's own counter on a GPU, the system's on Linux."""

from __future__ import annotations

from pathlib import Path

import torch

from sharpmax.experiments.fresh import resident_bytes

__all__ = ["peak_mib", "start_peak"]

_RESET = Path("/proc/self/clear_refs")


def start_peak(device: torch.device) -> bool:
    """Forget earlier peaks; whether this machine can do so."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _RESET.write_text("5")  # what Linux reads as: the peak of this process begins anew
    except OSError:
        return False
    return device.type == "cpu" and resident_bytes() is not None


def peak_mib(device: torch.device) -> float | None:
    """The most memory in MiB since `start_peak`: of tensors on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    held = resident_bytes()
    return None if held is None else held[1] / 2**20
