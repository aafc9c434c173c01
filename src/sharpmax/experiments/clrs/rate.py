"""How fast a device multiplies matrices, the measure of how much of it a training uses."""

from __future__ import annotations

import time

import torch

__all__ = ["matrix_rate"]

_SIDE, _ROUNDS = 8192, 20


def matrix_rate(device: torch.device) -> float | None:
    """Measured bfloat16 FLOP/s of a large square product; None where there is no GPU."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(_SIDE, _SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        a @ b
    torch.cuda.synchronize(device)
    return 2.0 * _SIDE**3 * _ROUNDS / (time.perf_counter() - began)
