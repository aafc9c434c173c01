"""The gradient of row statistics in two fused Triton kernels: neither stores the logits, and both are deterministic."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpmax.rows.impl import triton
from sharpmax.rows.impl.streaming import Gradients, Incoming
from sharpmax.rows.layout import Parts, Problem

__all__ = ["Tile", "obstacle", "triton_backward"]


class Tile(NamedTuple):
    """Rows and keys per tile, and how many warps and pipeline stages work on it."""

    rows: int
    keys: int
    warps: int
    stages: int


# By kernel and head size: for half precision on GPUs with 227 KiB of shared memory and asynchronous tensor cores.
_HOPPER = {
    ("into_queries", 64): Tile(64, 64, 4, 3),
    ("into_queries", 128): Tile(64, 64, 4, 2),
    ("into_queries", 256): Tile(128, 32, 8, 2),
    ("into_keys", 64): Tile(64, 128, 4, 3),
    ("into_keys", 128): Tile(32, 128, 4, 3),
    ("into_keys", 256): Tile(32, 128, 8, 2),
}
OVERRIDES: dict[str, Tile] = {}
"""Tiles to use instead, by the name of the kernel (`into_queries`, `into_keys`): for measuring, and for tests."""


def obstacle(problem: Problem, *, into_mask: bool) -> str | None:
    """Return None if the kernels can find the gradients of this problem, else one line that says why not."""
    if problem.spans is not None:
        return "windows and packed sequences have no kernel for their gradient"
    if into_mask:
        return "the gradient into a mask is as large as the matrix of logits"
    if problem.q.dtype == torch.float64:
        return "the kernels sum in float32, too coarse for float64"
    return triton.obstacle(problem)


def triton_backward(problem: Problem, parts: Parts, grads: Incoming) -> Gradients:
    """Gradients of the rows' parts with respect to q and k, in the layout of these.

    Sums are in float32; the derivative by a logit is rounded to the dtype of q where that is half precision.
    """
    q, k = problem.q, problem.k
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    if not q.numel() or not problem.keys:
        return Gradients(dq.zero_(), dk.zero_(), None)
    batch, heads, group, queries, width = q.shape
    kernels = importlib.import_module("sharpmax.rows.impl.triton_backward_kernel")
    forward = importlib.import_module("sharpmax.rows.impl.triton_kernel")
    mask, kind, floor = triton.mask_for_kernel(problem.mask, forward)
    gain = problem.gain if kind == forward.MASK_ADDED else None
    with_var = grads.var is not None
    # Rounded to half precision anyway, the derivative may take a shorter way.
    folded = q.dtype != torch.float32 and not with_var
    # What the second kernel needs of every row: a reference, c0, c1, and maybe the mean and c2.
    count = 3 if folded else 4 + with_var
    numbers: list[Tensor | None] = [*torch.empty((count, *q.shape[:-1]), dtype=torch.float32, device=q.device)]
    top, c0, c1, mean, c2 = numbers + [None] * (5 - count)
    row_tile, key_tile = _tile("into_queries", problem), _tile("into_keys", problem)
    strides = (
        *q.stride(),
        *k.stride(),
        *triton.strides_as(mask, *q.shape[:-1], problem.keys),
        *triton.strides_as(gain, *q.shape[:-1]),
    )
    offset = triton.limited(problem.offset, queries, problem.keys)
    sizes = (heads, group, queries, problem.keys, offset, problem.scale)
    options: dict[str, Any] = {
        "WIDTH": width,
        "CAUSAL": problem.offset is not None,
        "MASK": kind,
        "MASK_FLOOR": floor,
        "GAIN": gain is not None,
        "VAR": with_var,
        "FOLDED": folded,
        "WIDEN": triton.widened(q),
        "BLOCK_D": triton.power_of_2(width),
    }
    with triton.on_device(q):
        # One axis of programs: the other axes of a CUDA grid end at 65,535.
        kernels.into_queries[(batch * heads * group * -(-queries // row_tile.rows),)](
            *(q, k, mask, gain, dq),
            *(x.contiguous() for x in parts),
            *(_contiguous(g) for g in grads),
            *(top, mean, c0, c1, c2),
            *strides,
            *dq.stride(),
            *sizes,
            **options,
            **_launch(row_tile),
        )
        kernels.into_keys[(batch * heads * -(-problem.keys // key_tile.keys),)](
            *(q, k, mask, gain, dk),
            *(top, mean, c0, c1, c2),
            *strides,
            *dk.stride(),
            *sizes,
            **options,
            EVEN=queries % key_tile.rows == 0,
            ONCE=True,
            **_launch(key_tile),
        )
    return Gradients(dq, dk, None)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _launch(tile: Tile) -> dict[str, int]:
    return {"BLOCK_Q": tile.rows, "BLOCK_K": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}


def _tile(kernel: str, problem: Problem) -> Tile:
    """The tile a kernel works in: as tuned, or one that fits into the 99 KiB of shared memory of any recent GPU."""
    q = problem.q
    width = triton.power_of_2(q.shape[-1], 64)
    if kernel in OVERRIDES:
        tile = OVERRIDES[kernel]
    elif q.dtype == torch.float32:  # no tensor cores at full precision: both operands go through registers
        tile = Tile(32, 16, 4, 1) if width > 128 else Tile(32, 32, 4, 2)
    elif q.is_cuda and torch.cuda.get_device_capability(q.device)[0] in (9, 10):
        tile = _HOPPER[kernel, width]
        if problem.mask is not None:
            # The addresses of a tile of the mask take as many registers as its logits.
            tile = Tile(min(tile.rows, 64), min(tile.keys, 64), 8, 2)
    else:
        tile = Tile(32, 32, 4, 2) if width > 128 else Tile(64, 64, 4 if problem.mask is None else 8, 2)
    return tile._replace(rows=min(tile.rows, triton.power_of_2(q.shape[-2])))
