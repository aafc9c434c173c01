"""One attention call in canonical form: shapes, mask, causal offset, spans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpmax.errors import reject, reject_type

# Half precision has little room. Elsewhere there is some left for the product with the keys.
_ROOM = {torch.float16: 65504.0, torch.bfloat16: 1e30, torch.float32: 1e30, torch.float64: 1e290}


class Parts(NamedTuple):
    """Statistics of the rows relative to an anchor, each `[B, Hkv, G, Lq]`: see `RowStats.anchored`."""

    anchor: Tensor
    log_mass: Tensor
    shortfall: Tensor
    var: Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """Rows of logits s = scale·q·k + mask·gain, in canonical shapes.

    q `[B, Hkv, G, Lq, D]` with G query heads per key head, k `[B, Hkv, Lk, D]`; `mask` (None, boolean with True =
    visible, or float, added) and `gain` (None, or one factor per row, for the mask alone) broadcast to
    `[B, Hkv, G, Lq, Lk]` and `[B, Hkv, G, Lq]`. Row i sees key j if j ≤ i + offset (`offset` None: no causal
    limit), if j lies in its span (`spans` None: everywhere; else int32 `[B or 1, 2, Lq]`, the first key of each row
    and the one after its last) and the mask does not hide it. Statistics come back in `rows`, the caller's shape
    `[..., H, Lq]`.
    """

    q: Tensor
    k: Tensor
    mask: Tensor | None
    gain: Tensor | None
    offset: int | None
    scale: float
    rows: tuple[int, ...]
    spans: Tensor | None = None

    @property
    def keys(self) -> int:
        """Number of keys, visible or not."""
        return self.k.shape[-2]

    def hidden(self, rows: slice | None = None) -> Tensor:
        """Which keys some rows (all, unless given) do not see, broadcasting to `[B, Hkv, G, rows, Lk]`."""
        device = self.q.device
        hide = torch.zeros((1, 1, 1, 1, 1), dtype=torch.bool, device=device)
        # A compiler does not take a slice that is made of nothing, such as slice(None).
        if self.mask is not None:
            hide = hidden_by(self.mask if rows is None or self.mask.shape[-2] == 1 else self.mask[..., rows, :])
        if self.offset is not None:
            places = torch.arange(self.q.shape[-2], device=device)
            last = (places if rows is None else places[rows])[:, None] + self.offset
            hide = hide | (torch.arange(self.keys, device=device) > last)
        if self.spans is not None:
            spans = self.spans if rows is None else self.spans[..., rows]
            low, high = spans[:, None, None, ..., None].unbind(3)
            places = torch.arange(self.keys, device=device)
            hide = hide | (places < low) | (places >= high)
        return hide

    def counts(self) -> Tensor:
        """Visible keys per row, int64 in the shape `rows`."""
        shape = self.q.shape[:-1]
        if self.mask is None:
            last = torch.full((shape[-1],), self.keys - 1, dtype=torch.int64, device=self.q.device)
            if self.offset is not None:
                last = torch.arange(shape[-1], device=self.q.device) + self.offset
            found = (last + 1).clamp(0, self.keys)
            if self.spans is not None:
                low, high = self.spans[:, None, None].unbind(3)
                found = (torch.minimum(found, high) - low.clamp_min(0)).clamp_min(0).long()
        else:
            live = ~self.hidden()
            found = live.sum(-1)
            if live.shape[-1] != self.keys:  # a mask that broadcasts along the keys hides all of them or none
                found = found * self.keys
        return found.expand(shape).reshape(self.rows)

    def rows_that_see(self, keys: Tensor) -> Tensor:
        """Which rows see at least one of the marked keys (boolean `[B, Hkv, Lk]`), as `[B, Hkv, G, Lq]`."""
        count = self.q.shape[-2]
        marked = keys[:, :, None, None, :]
        step = max(1, (1 << 24) // max(1, keys.numel()))
        blocks = [
            (marked & ~self.hidden(slice(i, min(i + step, count)))).any(-1).expand(*self.q.shape[:3], -1)
            for i in range(0, count, step)
        ]
        widths = [min(step, count - i) for i in range(0, count, step)]
        return torch.cat([b.expand(*b.shape[:3], w) for b, w in zip(blocks, widths, strict=True)], dim=-1)

    def scaled(self, beta: Tensor) -> Problem:
        """The same rows with all their logits multiplied by `beta` (in the shape `rows`)."""
        beta = as_beta(beta, self.q.dtype).reshape(self.q.shape[:-1])
        beta = capped_beta(self.q.to(beta.dtype), beta)
        gain = None
        if self.mask is not None and self.mask.is_floating_point():
            gain = beta if self.gain is None else self.gain * beta
        return replace(self, q=(self.q * beta[..., None]).to(beta.dtype), k=self.k.to(beta.dtype), gain=gain)


def hidden_by(mask: Tensor) -> Tensor:
    """Which entries of a mask hide their key: False, or a float that can only be meant as −inf.

    Half of the dtype's most negative number and below counts as −inf: `finfo.min` is what masks are often made
    of, and such keys are not visible, whatever the sum of it and a logit rounds to.
    """
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= torch.finfo(mask.dtype).min / 2


def floats_at_least_32(dtype: torch.dtype) -> torch.dtype:
    """The dtype statistics are computed in: float32, or float64 for float64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_beta(beta: Tensor, dtype: torch.dtype) -> Tensor:
    """β in the dtype of statistics for inputs of `dtype`, at most its largest number: 0 · inf would be NaN."""
    wide = floats_at_least_32(dtype)
    return beta.clamp(max=torch.finfo(wide).max).to(wide)


def room_for(dtype: torch.dtype) -> float:
    """How large the products of β and what is in this dtype may become."""
    return _ROOM[dtype]


def capped_beta(x: Tensor, beta: Tensor, share: float = 1.0) -> Tensor:
    """β of rows x `[..., n]`, stopped where β·x would leave (this share of) the range of x's dtype.

    A β of 1 or less is left as it is. At such a β a softmax is as hard as its logits can be told apart.
    """
    largest = x.detach().abs().amax(-1).to(beta.dtype).clamp_min(1e-8)
    return beta.clamp(max=(share * room_for(x.dtype) / largest).clamp_min(1.0))


def _autocasts(kind: str) -> bool:
    """Whether `torch.autocast` is on for this kind of device."""
    # The usual ones are named because compilers cannot trace the question which devices know autocast.
    known = kind in ("cpu", "cuda", "mps", "xpu") or torch.amp.autocast_mode.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Logits and weights keep their precision inside `torch.autocast`, as torch's own softmax does."""
    # To switch it off takes longer than to ask, and a generated token can afford little.
    return torch.autocast(device.type, enabled=False) if _autocasts(device.type) else nullcontext()


def as_autocast(*inputs: Any) -> tuple[Any, ...]:
    """What attention is computed from inside `torch.autocast`: its dtype instead of float32.

    Stock attention is given just that, and logits are measured as they are there: a GPU has no fast way for others.
    """
    first = inputs[0]
    if not isinstance(first, Tensor):
        return inputs
    if not _autocasts(first.device.type):
        return inputs
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in inputs
    )


def make_problem(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None,
    *,
    offset: int | None,
    scale: float | None,
    enable_gqa: bool,
) -> Problem:
    """Check the arguments and bring them into canonical form; the tensors are views where that is possible."""
    check_tensors(q, k)
    if k.ndim != q.ndim:
        reject("k", f"shape {tuple(k.shape)}", f"{q.ndim} dimensions, as q has {tuple(q.shape)}")
    heads, key_heads = (x.shape[-3] if x.ndim > 2 else 1 for x in (q, k))
    if heads != key_heads:
        if not enable_gqa:
            reject(
                "k",
                f"{key_heads} heads for {heads} query heads",
                f"{heads} heads",
                "pass enable_gqa=True if heads share keys",
            )
        if key_heads == 0 or heads % key_heads:
            reject(
                "k",
                f"{key_heads} heads for {heads} query heads",
                "a number of heads that divides the query's",
            )
    batch = broadcast(q.shape[:-3], k.shape[:-3])
    if batch is None:
        reject(
            "k",
            f"batch {tuple(k.shape[:-3])}",
            f"a batch that broadcasts with the query's {tuple(q.shape[:-3])}",
        )
    if batch != tuple(q.shape[:-3]):
        reject("q", f"batch {tuple(q.shape[:-3])}", f"the batch of k, {tuple(k.shape[:-3])}")
    size, group = math.prod(batch), heads // key_heads if key_heads else 1
    width, keys = q.shape[-1], k.shape[-2]
    rows = q.shape[:-1]
    logits = (*rows, keys)
    return Problem(
        q=q.reshape(size, key_heads, group, q.shape[-2], width),
        k=k.expand(*batch, *k.shape[-3:]).reshape(size, key_heads, keys, width),
        mask=None if attn_mask is None else _canonical_mask(attn_mask, q, logits, (key_heads, group)),
        gain=None,
        offset=offset,
        scale=_checked_scale(scale, width),
        rows=tuple(rows),
    )


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that all of these broadcast to, or None if there is none."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def check_tensors(q: Tensor, k: Tensor) -> None:
    """Refuse queries and keys that cannot meet: type, dtype, device, rank and head size."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            reject_type(name, type(x).__name__, "a torch.Tensor")
        if not x.is_floating_point():
            reject_type(name, f"dtype {x.dtype}", "a floating dtype", f"convert it first: {name}.float()")
        if x.ndim < 2:
            reject(name, f"shape {tuple(x.shape)}", "two or more dimensions, [..., L, D]")
    if q.dtype != k.dtype:
        reject_type("k", f"dtype {k.dtype}", f"the dtype of q, {q.dtype}")
    if q.device != k.device:
        reject("k", f"device {k.device}", f"the device of q, {q.device}")
    if q.shape[-1] != k.shape[-1]:
        reject("k", f"head size {k.shape[-1]}", f"the head size of q, {q.shape[-1]}")
    if q.shape[-1] == 0:
        reject("q", "head size 0", "a head size of 1 or more")


def _checked_scale(scale: float | None, width: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(width)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        reject_type("scale", type(scale).__name__, "a number or None (1/√head size)")
    if not math.isfinite(scale):
        reject("scale", scale, "a finite number or None (1/√head size)")
    return float(scale)


def _canonical_mask(mask: Tensor, q: Tensor, logits: tuple[int, ...], heads: tuple[int, int]) -> Tensor:
    if not isinstance(mask, Tensor):
        reject_type("attn_mask", type(mask).__name__, "a torch.Tensor or None")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        reject_type("attn_mask", f"dtype {mask.dtype}", "bool (True = visible) or a floating dtype (added)")
    if mask.device != q.device:
        reject("attn_mask", f"device {mask.device}", f"the device of q, {q.device}")
    if broadcast(mask.shape, logits) != tuple(logits):
        reject(
            "attn_mask",
            f"shape {tuple(mask.shape)}",
            f"a shape that broadcasts to {logits}, [..., H, Lq, Lk]",
        )
    mask = mask.reshape((1,) * (max(len(logits), 3) - mask.ndim) + tuple(mask.shape))
    batch = mask.shape[:-3]
    if math.prod(batch) != 1:
        mask = mask.expand(*logits[:-3], *mask.shape[-3:])
        batch = mask.shape[:-3]
    shared_head = mask.shape[-3] == 1
    split = (1, 1) if shared_head else heads
    return mask.reshape(math.prod(batch), *split, *mask.shape[-2:])
