"""Launch the fused Triton kernels for row statistics and their gradient. No logits are stored."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpmax.errors import install_command
from sharpmax.stats.call import AttentionCall, Parts, floats_at_least_32, layout
from sharpmax.stats.statistics import FIELDS
from sharpmax.stats.streaming import Gradients, Incoming

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
WIDEST = 256
_MANY_PAIRS = 1 << 28
"""Pairs of a row and a key from which the device, at a tenth of a millisecond, takes longer than the host."""

_LOOKING = 528
"""Programs that search for rows the quick kernel could not do: a few per processor of a large GPU."""

# Looked up once and without importing Triton, as torch.compile cannot trace the search.
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
    if width > WIDEST:
        return f"the head size is {width}, and the kernel takes 1 to {WIDEST}"
    return None


def triton_parts(call: AttentionCall, fields: frozenset[str] = frozenset(FIELDS)) -> Parts:
    """Statistics of `fields` relative to an anchor, each `[B, Hkv, G, Lq]`; float32, or float64 for float64 input.

    The anchor is the maximum if `max` is in the fields; else it may be the lse. Without `var` in the fields, var may be
    0. A visible logit that is NaN or +inf makes all four NaN for its row. One that overflowed to −inf has weight 0.
    """
    q, scale = call.q, call.scale
    dtype = floats_at_least_32(q.dtype)
    parts = [torch.empty(q.shape[:-1], dtype=dtype, device=q.device) for _ in range(4)]
    if not q.numel() or not call.keys:  # nothing to launch
        return Parts(parts[0].fill_(-torch.inf), *(part.zero_() for part in parts[1:]))
    if dtype == torch.float64:
        # A kernel's float arguments are float32, too coarse a scale for float64 logits.
        q, scale = q * scale, 1.0
    gain = call.gain if call.mask is not None and call.mask.dtype != torch.bool else None
    key = (layout(q), layout(call.k), layout(call.mask), layout(gain), layout(call.spans), call.offset, scale)
    made = replace(call, q=q, scale=scale, gain=gain)
    _launch_parts(key, q, call.k, (call.mask, gain, call.spans), call.offset, fields, parts, lambda: made)
    return Parts(*parts)


def unmasked_parts(
    q: Tensor, k: Tensor, offset: int | None, scale: float, fields: frozenset[str]
) -> tuple[Parts, PartsPlan | None]:
    """As `triton_parts`, for q `[B, H, Lq, D]` and k `[B, Hkv, Lk, D]` that were checked before; each `[B, H, Lq]`.

    The plan, if there is one, does the same for tensors of the same layout.
    """
    parts = Parts(*(torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(4)))
    key = (layout(q), layout(k), offset, scale)

    def made() -> AttentionCall:
        grouped = q.view(q.shape[0], k.shape[1], -1, *q.shape[2:])
        return AttentionCall(grouped, k, None, offset, scale, tuple(q.shape[:-1]))

    return parts, _launch_parts(key, q, k, (None, None, None), offset, fields, parts, made)


def _launch_parts(
    key: Any, q: Tensor, k: Tensor, masks: tuple[Tensor | None, ...], offset: int | None, fields: frozenset[str],
    parts: Sequence[Tensor], made: Callable[[], AttentionCall],
) -> PartsPlan | None:  # fmt: skip
    """Launch the kernels for statistics; `masks` are mask, gain and spans, and `made` gives the whole call."""
    quick = q.dtype in _HALF
    first = box = tile = None
    with on_device(q):
        if quick:
            tile = _quick_tile(q.shape[-2], q.shape[-1], masks[0] is not None, offset is None and masks[2] is None)
            box = _box(k, tile.keys, power_of_2(q.shape[-1])) if _large(q, k) else None
            every_key = masks[0] is None and masks[2] is None and offset is None and k.shape[-2] % tile.keys == 0
            options = {"TMA": box is not None, "EVEN": every_key, "MAX": "max" in fields, "VAR": "var" in fields}
            chosen = tile
            first = launch(
                ("quick_parts", key, *options.values()),
                (q, k, box, *masks, *parts),
                lambda: _settled("quick_parts", made(), chosen, {**options, "STAGES": chosen.stages}),
            )
        second = launch(
            ("careful_parts", key),
            (q, k, *masks, *parts),
            lambda: _settled("careful_parts", call := made(), _careful_tile(call), {"AFTER_QUICK": quick}),
        )
    if second is None or (quick and first is None):
        return None
    return PartsPlan(first, second, tile if quick and box is not None else None)


class PartsPlan(NamedTuple):
    """The launches for the statistics of rows without a mask, for any tensors of the same layout."""

    quick: Compiled | None
    careful: Compiled
    copied: Tile | None
    """The tile of keys that the copy engine fetches; None without it."""

    def run(self, q: Tensor, k: Tensor, at: int, step: int) -> None:
        """Write the four parts to the addresses `at`, `at + step`, …; both are multiples of 16."""
        q_at, k_at = q.data_ptr(), k.data_ptr()
        rest = (None, None, None, at, at + step, at + 2 * step, at + 3 * step)
        if self.quick is not None:
            box = None if self.copied is None else _box(k, self.copied.keys, power_of_2(q.shape[-1]))
            self.quick(q_at, k_at, box, *rest)
        self.careful(q_at, k_at, *rest)


def _settled(name: str, call: AttentionCall, tile: Tile, options: dict[str, Any]) -> Settings:
    """The settings of one of the kernels for row statistics."""
    kernels = importlib.import_module("sharpmax.stats.triton_kernel")
    q, gain = call.q, call.gain
    batch, heads, group, queries, width = q.shape
    rows, (kind, floor) = q.shape[:-1], mask_kind(call.mask)
    numbers = [
        *q.stride(), *call.k.stride(), *strides_as(call.mask, *rows, call.keys), *strides_as(gain, *rows),
        *strides_as(call.spans, batch, 2, queries), heads, group, queries, call.keys,
        limited(call.offset, queries, call.keys), call.scale,
    ]  # fmt: skip
    # One axis of programs: the other axes of a CUDA grid end at 65,535.
    programs = total = batch * heads * group * -(-queries // tile.rows)
    if name == "careful_parts":
        programs = min(total, _LOOKING) if options["AFTER_QUICK"] else total
        numbers.append(total)
        options["num_stages"] = tile.stages
    constants = {
        "WIDTH": width, "CAUSAL": call.offset is not None, "SPANS": call.spans is not None, "MASK": kind,
        "MASK_FLOOR": floor, "GAIN": gain is not None, "WIDEN": widened(q), "BLOCK_D": power_of_2(width),
        "BLOCK_Q": tile.rows, "BLOCK_K": tile.keys, "num_warps": tile.warps, **options,
    }  # fmt: skip
    return Settings(getattr(kernels, name), (programs,), tuple(numbers), constants)


class Settings(NamedTuple):
    """A kernel, its grid, and its arguments after the tensors: numbers, then constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]


class Compiled(NamedTuple):
    """A compiled kernel, with every argument that follows the tensors."""

    run: Callable[..., None]
    grid: tuple[int, ...]
    device: int
    function: Any
    metadata: Any
    rest: tuple[Any, ...]

    def __call__(self, *addresses: Any) -> None:
        """Launch it on tensors at these addresses, multiples of 16, for which Triton specialised the kernel."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        self.run(*self.grid, stream, self.function, self.metadata, None, None, None, *addresses, *self.rest)


_compiled: dict[Any, Compiled] = {}
_MOST_COMPILED = 4096


def launch(key: Any, tensors: Sequence[Any], settle: Callable[[], Settings]) -> Compiled | None:
    """Launch a kernel whose first parameters are `tensors` (None, or a descriptor, for some).

    `key` determines everything else: the kernel, the device, the dtypes of the tensors, and what `settle` returns. The
    first launch goes through Triton, which takes tens of microseconds to bind and specialise its arguments. Later
    launches go straight to the driver if every address is a multiple of 16, and return the compiled kernel. So does the
    first launch, if later ones can skip Triton.
    """
    addresses = [x.data_ptr() if type(x) is Tensor else x for x in tensors]
    aligned = not any(type(one) is int and one & 15 for one in addresses)
    found = _compiled.get(key) if aligned else None
    if found is not None:
        found(*addresses)
        return found
    kernel, grid, numbers, constants = settle()
    given = [x.view(torch.uint8) if isinstance(x, Tensor) and x.dtype == torch.bool else x for x in tensors]
    compiled = kernel[grid](*given, *numbers, **constants)
    if not aligned or not hasattr(compiled, "packed_metadata") or any(isinstance(x, Tensor) for x in addresses):
        return None
    names = kernel.arg_names[len(tensors) + len(numbers) :]
    rest = (*numbers, *(constants[name] for name in names))
    if len(_compiled) >= _MOST_COMPILED:
        _compiled.clear()
    _compiled[key] = Compiled(
        compiled.run, (*grid, 1, 1)[:3], torch.cuda.current_device(), compiled.function, compiled.packed_metadata, rest
    )
    return _compiled[key]


def padded(size: int) -> int:
    """The size rounded up to a multiple of 16 bytes."""
    return (size + 15) & ~15


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)


def interpreted() -> bool:
    """Whether Triton runs its interpreter, on the CPU."""
    triton = sys.modules.get("triton")
    if triton is not None:  # Triton decided this when it was imported
        return not isinstance(triton.language.sum, triton.JITFunction)
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def widened(x: Tensor) -> bool:
    """Whether a kernel widens x. The interpreter stores bfloat16 as integers, and its dot would multiply those."""
    return x.dtype == torch.bfloat16 and interpreted()


def power_of_2(n: int, least: int = 16) -> int:
    """The smallest power of 2 that is at least n, for the size of a block. A matrix product takes 16 or more."""
    return max(least, 1 << (n - 1).bit_length())


def limited(offset: int | None, queries: int, keys: int) -> int:
    """A causal offset clamped to the range that matters, so that row + offset fits 32 bits; 0 for None."""
    return 0 if offset is None else max(-queries, min(offset, keys))


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the device of x is the current one, where kernels run."""
    # Asking is cheaper than switching, which would show in every generated token.
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


NO_MASK, MASK_SHOWS, MASK_ADDED = range(3)
"""How kernels read a mask: not at all, as bytes that are 1 where a key is visible, or as floats that are added."""


def mask_kind(mask: Tensor | None) -> tuple[int, float]:
    """How kernels read a mask, and the largest float that hides a key (see `hidden_by`)."""
    if mask is None:
        return NO_MASK, 0.0
    return (MASK_SHOWS, 0.0) if mask.dtype == torch.bool else (MASK_ADDED, torch.finfo(mask.dtype).min / 2)


def strides_as(x: Tensor | None, *shape: int) -> tuple[int, ...]:
    """The strides that read `x` as if it had this shape: 0 where it broadcasts."""
    return (0,) * len(shape) if x is None else x.expand(shape).stride()


def _large(q: Tensor, k: Tensor) -> bool:
    """Whether the copy engine is worth it: it saves the device at most 4%, and costs the host a descriptor."""
    return interpreted() or q.numel() // q.shape[-1] * k.shape[-2] >= _MANY_PAIRS


def _box(k: Tensor, keys: int, width: int) -> object | None:
    """A descriptor for Hopper's copy engine to fetch a tile of keys; None if the engine cannot."""
    key = (k.data_ptr(), k.shape, k.stride(), k.dtype, k.device, keys, width)
    if key in _boxes:
        return _boxes[key]
    if not (_has_copy_engine(k.device) or interpreted()):
        return None
    # The stride of an axis of length 1 has no meaning, but must still be one the engine takes.
    strides = [n if size > 1 else 16 for n, size in zip(k.stride(), k.shape, strict=True)]
    if k.stride(-1) != 1 or k.data_ptr() % 16 or any(n <= 0 or n * k.element_size() % 16 for n in strides[:-1]):
        return None
    tools = importlib.import_module("triton.tools.tensor_descriptor")
    base = k if interpreted() else _Address(k)
    box: object = tools.TensorDescriptor(base, list(k.shape), [*strides[:-1], 1], [1, 1, keys, width])
    if isinstance(base, _Address):
        if len(_boxes) >= _MOST_COMPILED:
            _boxes.clear()
        _boxes[key] = box
    return box


class _Address:
    """Stands in for a tensor in a descriptor, without keeping its memory."""

    def __init__(self, x: Tensor) -> None:
        self.dtype, self._address = x.dtype, x.data_ptr()

    def data_ptr(self) -> int:
        return self._address


_boxes: dict[Any, object] = {}


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _quick_tile(queries: int, width: int, masked: bool, every_key: bool) -> Tile:
    """The tile of the quick kernel. Its operands fit the shared memory of any recent GPU (99 KiB)."""
    if width > 128:
        tile = Tile(64, 32, 4, 2)
    elif masked:
        # The addresses of the mask take as many registers as the logits, so more warps share them.
        tile = Tile(128, 64, 8, 2)
    elif every_key:
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
    elif call.q.dtype == torch.float32:  # without tensor cores both operands go through registers
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
"""Tiles to use instead, by the name of the kernel (`into_queries`, `into_keys`), for benchmarks and tests."""


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
    """Gradients of the rows' parts with respect to q and k, in the layouts of q and k.

    Sums are in float32. The derivative by a logit is rounded to the dtype of q if that is half precision.
    """
    q, k = call.q, call.k
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    if not q.numel() or not call.keys:
        return Gradients(dq.zero_(), dk.zero_(), None)
    batch, heads, group, queries, width = q.shape
    kernels = importlib.import_module("sharpmax.stats.triton_backward_kernel")
    kind, floor = mask_kind(call.mask)
    mask = call.mask.view(torch.uint8) if call.mask is not None and kind == MASK_SHOWS else call.mask
    gain = call.gain if kind == MASK_ADDED else None
    with_var = grads.var is not None
    # A derivative that is rounded to half precision can be computed in a shorter form.
    folded = q.dtype != torch.float32 and not with_var
    # What the second kernel reads per row: a reference, c0, c1, and possibly the mean and c2.
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
    """The tile of a kernel: a tuned one, or one that fits the shared memory of any recent GPU (99 KiB)."""
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
