"""Spans: the first key that each row sees and the one after its last, int32 `[B or 1, 2, Lq]`.

Sliding windows, packed sequences and masks of padding become spans, which cost a row two numbers.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import reject, reject_type


def window_spans(spans: Tensor | None, window: int, queries: int, offset: int, device: torch.device) -> Tensor:
    """Spans `[B or 1, 2, Lq]` of the last `window` keys of each row, up to its own place i + offset."""
    if isinstance(window, bool) or not isinstance(window, int):
        reject_type("window", type(window).__name__, "an integer number of keys, 1 or more")
    if window < 1:
        reject("window", window, "1 or more keys")
    if spans is None:
        last = torch.arange(queries, device=device, dtype=torch.int32) + offset
        spans = torch.stack((torch.zeros_like(last), last + 1))[None]
    low, high = spans.unbind(1)
    return torch.stack((torch.maximum(low, high - window), high), dim=1)


def packed_spans(
    cu_queries: Tensor, cu_keys: Tensor | None, queries: int, keys: int, causal: bool, device: torch.device
) -> Tensor:
    """Spans of packed sequences: number s has the rows from cu_queries[s] to cu_queries[s + 1].

    `cu_keys` gives its keys in the same way (None: the same numbers). Causal limits are aligned to the last row and the
    last key of each sequence. Rows after the last sequence see nothing.
    """
    cu_keys = cu_queries if cu_keys is None else cu_keys
    for name, starts, length in (("cu_seqlens", cu_queries, queries), ("cu_seqlens_k", cu_keys, keys)):
        _check_starts(name, starts, length, device)
    if cu_keys.shape != cu_queries.shape:
        reject("cu_seqlens_k", f"{len(cu_keys)} starts", f"{len(cu_queries)}, as many as cu_seqlens has")
    row = torch.arange(queries, device=device)
    sequence = torch.searchsorted(cu_queries.long(), row, right=True) - 1
    outside = (sequence < 0) | (sequence >= len(cu_queries) - 1)
    sequence = sequence.clamp(0, len(cu_queries) - 2)
    low, high = cu_keys[sequence], cu_keys[sequence + 1]
    if causal:
        high = torch.minimum(high, high - cu_queries[sequence + 1] + row + 1)
    return torch.stack((low, torch.where(outside, low, torch.maximum(high, low)))).to(torch.int32)[None]


def _check_starts(name: str, starts: object, length: int, device: torch.device) -> None:
    if not isinstance(starts, Tensor):
        reject_type(name, type(starts).__name__, "a tensor of integers: where each sequence starts, and the end")
    if starts.dtype not in (torch.int32, torch.int64):
        reject_type(name, f"dtype {starts.dtype}", "int32 or int64")
    if starts.ndim != 1 or len(starts) < 2:
        reject(name, f"shape {tuple(starts.shape)}", "one dimension of two or more numbers, from 0 to the length")
    if starts.device != device:
        reject(name, f"device {starts.device}", f"the device of q, {device}")
    # On a GPU reading the numbers would wait for the device.
    if starts.device.type == "cpu" and ops_for(starts).concrete(starts):
        ascending = bool((starts[1:] >= starts[:-1]).all())
        if not ascending or int(starts[0]) < 0 or int(starts[-1]) > length:
            reject(name, starts.tolist(), f"ascending numbers from 0 to at most {length}")


_latest_spans: list[tuple[weakref.ref[Tensor], int, Tensor | None]] = []
"""Masks, their versions and their spans, for the few masks of the latest models."""


def spans_of(mask: Tensor) -> Tensor | None:
    """The spans `[B, 2, Lq]` of a boolean mask `[B, 1, Lq, Lk]`, found once per mask.

    None if a row sees several runs of keys. Masks for padding, windows and packing show one run per row.
    """
    for known, version, spans in _latest_spans:
        if known() is mask and version == mask._version:
            return spans
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1 or mask.is_inference():
        return None
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    keys, visible = mask.shape[-1], mask[:, 0].view(torch.uint8)
    count = visible.sum(-1, dtype=torch.int32)
    low, last = visible.argmax(-1), keys - 1 - visible.flip(-1).argmax(-1)
    # This waits for the device, once for all layers that share a mask.
    there = bool(((last - low + 1 == count) | (count == 0)).all())
    found = torch.stack((low, low + count), dim=1).to(torch.int32) if there else None
    # A model uses a few masks at a time, one per kind of layer.
    latest = (weakref.ref(mask), mask._version, found)
    _latest_spans[:] = [latest, *(one for one in _latest_spans if one[0]() is not None)][:4]
    return found
