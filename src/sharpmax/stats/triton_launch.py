"""Launch the fused Triton kernels for row statistics and their gradient. No logits are stored."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError, install_command
from sharpmax.lazy import require
from sharpmax.stats.call import AttentionCall, Parts, floats_at_least_32
from sharpmax.stats.statistics import FIELDS
from sharpmax.stats.streaming import Gradients, Incoming

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256
_LOOKING = 528
"""Programs that look for rows in which the quick kernel did not go well: a few for each processor of a large GPU."""

# Looked up once and without importing it: this is also asked while torch compiles, where a search is not possible.
_INSTALLED = importlib.util.find_spec("triton") is not None


class Tile(NamedTuple):
    """Rows and keys per tile, and how many warps and pipeline stages work on it."""

    rows: int
    keys: int
    warps: int
    stages: int


def available(device: torch.device) -> str | None:
    """Return None if the kernel can run on tensors of this device, else one line that says why not."""
    if not _INSTALLED:
        return f"triton is not installed; install it with: {install_command('triton', 'triton')}"
    if device.type == "cuda":
        return None
    if device.type != "cpu":
        return f"Triton kernels run on CUDA devices, not on {device.type!r}"
    if not interpreted():
        return "Triton on the CPU is its interpreter alone: set TRITON_INTERPRET=1 before triton is imported"
    return None


def obstacle(call: AttentionCall) -> str | None:
    """Return None if the kernel can serve this call, else one line that says why not."""
    width, mask = call.q.shape[-1], call.mask
    if reason := available(call.q.device):
        return reason
    if call.q.dtype not in _DTYPES:
        return f"q is {call.q.dtype}, and the kernel takes {_names(_DTYPES)}"
    if mask is not None and mask.dtype not in (torch.bool, *_DTYPES):
        return f"attn_mask is {mask.dtype}, and the kernel takes {_names((torch.bool, *_DTYPES))}"
    if width > _WIDEST:
        return f"the head size is {width}, and the kernel takes 1 to {_WIDEST}"
    return None


def triton_parts(call: AttentionCall, fields: frozenset[str] = frozenset(FIELDS)) -> Parts:
    """Statistics of `fields` relative to an anchor, each `[B, Hkv, G, Lq]`; float32, or float64 for float64 input.

    The anchor is the maximum if that is asked for; else it may be the lse. Without `var` in the fields, var may be 0.
    A visible logit that is NaN or +inf makes all four NaN for its row; one that overflowed to −inf has weight 0.
    """
    require("triton", "triton", "impl='triton'")
    if reason := obstacle(call):
        raise UnsupportedError(f"impl: 'triton' cannot do this: {reason}; use impl='streaming'")
    q, k, spans = call.q, call.k, call.spans
    batch, heads, group, queries, width = q.shape
    dtype = floats_at_least_32(q.dtype)
    anchor, log_mass, shortfall, var = (torch.empty(q.shape[:-1], dtype=dtype, device=q.device) for _ in range(4))
    if not q.numel() or not call.keys:  # nothing to launch
        return Parts(anchor.fill_(-torch.inf), log_mass.zero_(), shortfall.zero_(), var.zero_())

    scale = call.scale
    if q.dtype == torch.float64:
        # A kernel's float arguments are float32, too coarse a scale for float64 logits.
        q, scale = q * scale, 1.0
    kernels = importlib.import_module("sharpmax.stats.triton_kernel")
    mask, kind, floor = mask_for_kernel(call.mask, kernels)
    gain = call.gain if kind == kernels.MASK_ADDED else None
    inputs = (mask, gain, spans, anchor, log_mass, shortfall, var)
    geometry = (
        *q.stride(), *k.stride(), *strides_as(mask, *q.shape[:-1], call.keys), *strides_as(gain, *q.shape[:-1]),
        *strides_as(spans, batch, 2, queries), heads, group, queries, call.keys,
        limited(call.offset, queries, call.keys), scale,
    )  # fmt: skip
    options: dict[str, Any] = {
        "WIDTH": width, "CAUSAL": call.offset is not None, "SPANS": spans is not None, "MASK": kind,
        "MASK_FLOOR": floor, "GAIN": gain is not None, "WIDEN": widened(q), "BLOCK_D": power_of_2(width),
    }  # fmt: skip

    def blocks(tile: Tile) -> int:
        return batch * heads * group * -(-queries // tile.rows)

    quick, every_key = q.dtype in _HALF, call.mask is None and spans is None and call.offset is None
    with on_device(q):
        if quick:
            tile = _quick_tile(call)
            box = _box(k, tile.keys, options["BLOCK_D"])
            # One axis of programs: the other axes of a CUDA grid end at 65,535.
            kernels.quick_parts[(blocks(tile),)](
                q, k, box, *inputs, *geometry, **options, TMA=box is not None,
                EVEN=every_key and call.keys % tile.keys == 0, MAX="max" in fields, VAR="var" in fields,
                BLOCK_Q=tile.rows, BLOCK_K=tile.keys, STAGES=tile.stages, num_warps=tile.warps,
            )  # fmt: skip
        tile = _careful_tile(call)
        total = blocks(tile)
        kernels.careful_parts[(min(total, _LOOKING) if quick else total,)](
            q, k, *inputs, *geometry, total, **options, AFTER_QUICK=quick, **_launch(tile)
        )
    return Parts(anchor, log_mass, shortfall, var)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def interpreted() -> bool:
    """Whether Triton runs its interpreter, on the CPU."""
    triton = sys.modules.get("triton")
    if triton is not None:  # what counts is how its own library was built when it was imported
        return not isinstance(triton.language.sum, triton.JITFunction)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def widened(x: Tensor) -> bool:
    """Whether a kernel widens x: the interpreter keeps bfloat16 as 16-bit integers, and its dot multiplies those."""
    return x.dtype == torch.bfloat16 and interpreted()


def power_of_2(n: int, least: int = 16) -> int:
    """The power of 2 that holds n, as blocks of a kernel have to be; 16 at the least is what a product takes."""
    return max(least, 1 << (n - 1).bit_length())


def limited(offset: int | None, queries: int, keys: int) -> int:
    """A causal offset clamped to where it still matters, so that row + offset stays within 32 bits; 0 for None."""
    return 0 if offset is None else max(-queries, min(offset, keys))


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Where to launch from: kernels run on the current device, which may be another than that of x."""
    # To switch takes longer than to ask, and a generated token can afford little.
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def mask_for_kernel(mask: Tensor | None, kernels: ModuleType) -> tuple[Tensor | None, int, float]:
    """The mask as the kernel reads it, its kind, and the largest float that hides a key (see `hidden_by`)."""
    if mask is None:
        return None, kernels.NO_MASK, 0.0
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), kernels.MASK_SHOWS, 0.0
    return mask, kernels.MASK_ADDED, torch.finfo(mask.dtype).min / 2


def strides_as(x: Tensor | None, *shape: int) -> tuple[int, ...]:
    """The strides that read `x` as if it had this shape: 0 where it broadcasts."""
    return (0,) * len(shape) if x is None else x.expand(shape).stride()


def _box(k: Tensor, keys: int, width: int) -> object | None:
    """A descriptor with which Hopper's copy engine fetches a tile of keys, or None where that cannot be."""
    if not (_has_copy_engine(k.device) or interpreted()):
        return None
    # Along an axis of length 1 the stride means nothing, and must still be one the engine takes.
    strides = [n if size > 1 else 16 for n, size in zip(k.stride(), k.shape, strict=True)]
    if k.stride(-1) != 1 or k.data_ptr() % 16 or any(n <= 0 or n * k.element_size() % 16 for n in strides[:-1]):
        return None
    tools = importlib.import_module("triton.tools.tensor_descriptor")
    box: object = tools.TensorDescriptor(k, list(k.shape), [*strides[:-1], 1], [1, 1, keys, width])
    return box


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _quick_tile(call: AttentionCall) -> Tile:
    """The tile of the quick kernel, whose operands fit into the shared memory of any recent GPU (99 KiB)."""
    queries, width = call.q.shape[-2:]
    if width > 128:
        tile = Tile(64, 32, 4, 2)
    elif call.mask is not None:
        # The addresses of a tile of the mask take as many registers as its logits: more warps share them.
        tile = Tile(128, 64, 8, 2)
    elif call.offset is None and call.spans is None:
        tile = Tile(64, 128, 4, 2) if width <= 64 else Tile(128, 64, 4, 2)
    else:
        tile = Tile(128, 64, 4, 3)
    return _shorter(tile, queries)


def _careful_tile(call: AttentionCall) -> Tile:
    """The tile of the careful kernel."""
    queries, width = call.q.shape[-2:]
    wide = width > 128
    if call.q.dtype in _HALF:
        tile = Tile(64, 32, 4 if call.mask is None else 8, 2)
    elif call.q.dtype == torch.float32:  # no tensor cores at full precision: both operands go through registers
        tile = Tile(32, 16 if wide else 32, 4, 2)
    else:
        tile = Tile(16, 16, 4, 1) if wide else Tile(32, 32, 4, 1)
    return _shorter(tile, queries)


def _shorter(tile: Tile, queries: int) -> Tile:
    return tile._replace(rows=min(tile.rows, power_of_2(queries)))


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


def backward_obstacle(call: AttentionCall, *, into_mask: bool) -> str | None:
    """Return None if the kernels can find the gradients of this call, else one line that says why not."""
    if call.spans is not None:
        return "windows and packed sequences have no kernel for their gradient"
    if into_mask:
        return "the gradient into a mask is as large as the matrix of logits"
    if call.q.dtype == torch.float64:
        return "the kernels sum in float32, too coarse for float64"
    return obstacle(call)


def triton_backward(call: AttentionCall, parts: Parts, grads: Incoming) -> Gradients:
    """Gradients of the rows' parts with respect to q and k, in the layout of these.

    Sums are in float32; the derivative by a logit is rounded to the dtype of q where that is half precision.
    """
    q, k = call.q, call.k
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    if not q.numel() or not call.keys:
        return Gradients(dq.zero_(), dk.zero_(), None)
    batch, heads, group, queries, width = q.shape
    kernels = importlib.import_module("sharpmax.stats.triton_backward_kernel")
    forward = importlib.import_module("sharpmax.stats.triton_kernel")
    mask, kind, floor = mask_for_kernel(call.mask, forward)
    gain = call.gain if kind == forward.MASK_ADDED else None
    with_var = grads.var is not None
    # Rounded to half precision anyway, the derivative may take a shorter way.
    folded = q.dtype != torch.float32 and not with_var
    # What the second kernel needs of every row: a reference, c0, c1, and maybe the mean and c2.
    count = 3 if folded else 4 + with_var
    numbers: list[Tensor | None] = [*torch.empty((count, *q.shape[:-1]), dtype=torch.float32, device=q.device)]
    top, c0, c1, mean, c2 = numbers + [None] * (5 - count)
    row_tile, key_tile = _tile("into_queries", call), _tile("into_keys", call)
    strides = (
        *q.stride(), *k.stride(), *strides_as(mask, *q.shape[:-1], call.keys), *strides_as(gain, *q.shape[:-1]),
    )  # fmt: skip
    sizes = (heads, group, queries, call.keys, limited(call.offset, queries, call.keys), call.scale)
    options: dict[str, Any] = {
        "WIDTH": width, "CAUSAL": call.offset is not None, "MASK": kind, "MASK_FLOOR": floor, "GAIN": gain is not None,
        "VAR": with_var, "FOLDED": folded, "WIDEN": widened(q), "BLOCK_D": power_of_2(width),
    }  # fmt: skip
    with on_device(q):
        # One axis of programs: the other axes of a CUDA grid end at 65,535.
        kernels.into_queries[(batch * heads * group * -(-queries // row_tile.rows),)](
            q, k, mask, gain, dq, *(x if x is None else x.contiguous() for x in (*parts, *grads)),
            top, mean, c0, c1, c2, *strides, *dq.stride(), *sizes, **options, **_launch(row_tile),
        )  # fmt: skip
        kernels.into_keys[(batch * heads * -(-call.keys // key_tile.keys),)](
            q, k, mask, gain, dk, top, mean, c0, c1, c2, *strides, *dk.stride(), *sizes, **options,
            EVEN=queries % key_tile.rows == 0, ONCE=True, **_launch(key_tile),
        )  # fmt: skip
    return Gradients(dq, dk, None)


def _launch(tile: Tile) -> dict[str, int]:
    return {"BLOCK_Q": tile.rows, "BLOCK_K": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages}


def _tile(kernel: str, call: AttentionCall) -> Tile:
    """The tile a kernel works in: as tuned, or one that fits into the 99 KiB of shared memory of any recent GPU."""
    q = call.q
    width = power_of_2(q.shape[-1], 64)
    if kernel in OVERRIDES:
        tile = OVERRIDES[kernel]
    elif q.dtype == torch.float32:  # no tensor cores at full precision: both operands go through registers
        tile = Tile(32, 16, 4, 1) if width > 128 else Tile(32, 32, 4, 2)
    elif q.is_cuda and torch.cuda.get_device_capability(q.device)[0] in (9, 10):
        tile = _HOPPER[kernel, width]
        if call.mask is not None:
            # The addresses of a tile of the mask take as many registers as its logits.
            tile = Tile(min(tile.rows, 64), min(tile.keys, 64), 8, 2)
    else:
        tile = Tile(32, 32, 4, 2) if width > 128 else Tile(64, 64, 4 if call.mask is None else 8, 2)
    return tile._replace(rows=min(tile.rows, power_of_2(q.shape[-2])))
