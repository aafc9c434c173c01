"""One attention call in canonical form (shapes, mask, causal offset, spans), and its logits when needed."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sharpmax.arrays import check_heads, check_scale, check_width
from sharpmax.errors import ArgumentError, reject, reject_type
from sharpmax.stats.statistics import RowStats

# Float16 is used up to its largest number. Other dtypes leave room for the product with the keys.
_LARGEST = {torch.float16: 65504.0, torch.bfloat16: 1e30, torch.float32: 1e30, torch.float64: 1e290}


class Parts(NamedTuple):
    """Statistics of the rows relative to an anchor, each `[B, Hkv, G, Lq]`: see `RowStats.anchored`."""

    anchor: Tensor
    log_mass: Tensor
    shortfall: Tensor
    var: Tensor


Alignment = Literal["upper-left", "lower-right"]


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention: rows of logits s = scale·q·k + mask·gain, and which keys each row sees.

    q `[B, Hkv, G, Lq, D]` has G query heads per key head, k is `[B, Hkv, Lk, D]`. `mask` is None, boolean (True =
    visible) or float (added), and broadcasts to `[B, Hkv, G, Lq, Lk]`; `gain` `[B, Hkv, G, Lq]` multiplies only a float
    mask. Row i sees key j if j ≤ i + offset (`offset` None: no causal limit), if j lies in its span (`spans`: None, or
    int32 `[B or 1, 2, Lq]`, the first key of each row and the one after its last) and if the mask does not hide it.
    Statistics are returned in `rows`, the caller's shape `[..., H, Lq]`.

    With `softcap` c the logits are c·tanh(s/c) before the mask is added, and `after_cap` `[B, H, Lq]` is the β that
    then multiplies them. Row statistics do not cover these two; `logits` does.
    """

    q: Tensor
    k: Tensor
    mask: Tensor | None
    offset: int | None
    scale: float
    rows: tuple[int, ...]
    gain: Tensor | None = None
    spans: Tensor | None = None
    softcap: float | None = None
    after_cap: Tensor | None = None
    layer: int = 0
    """The number of the attention module in its model, or of the call in a `capture` block."""

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        attn_mask: Tensor | None = None,
        *,
        causal: Alignment | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> AttentionCall:
        """Check the arguments of an attention function: q `[..., H, Lq, D]`, k `[..., Hkv, Lk, D]`.

        Tensors are views where possible. PyTorch's causal biases become causal limits.
        """
        if attn_mask is not None and causal is not None:
            raise ArgumentError(
                "attn_mask: got a mask together with is_causal=True; allowed: one of the two; "
                "put the causal limit into the mask"
            )
        # Not imported here, as it is heavy (torch's compiler and Triton). A caller with such a bias has imported it.
        bias = sys.modules.get("torch.nn.attention.bias")
        if bias is not None and isinstance(attn_mask, bias.CausalBias):
            causal = "lower-right" if attn_mask.variant == bias.CausalVariant.LOWER_RIGHT else "upper-left"
            attn_mask = None
        check_tensors(q, k)
        key_heads, group = check_heads(q, k, enable_gqa)
        batch = broadcast(q.shape[:-3], k.shape[:-3])
        if batch is None:
            allowed = f"a batch that broadcasts with the query's {tuple(q.shape[:-3])}"
            reject("k", f"batch {tuple(k.shape[:-3])}", allowed)
        if batch != tuple(q.shape[:-3]):
            reject("q", f"batch {tuple(q.shape[:-3])}", f"the batch of k, {tuple(k.shape[:-3])}")
        size, (queries, width), keys = math.prod(batch), q.shape[-2:], k.shape[-2]
        logits = (*q.shape[:-1], keys)
        return cls(
            q=q.reshape(size, key_heads, group, queries, width),
            k=k.expand(*batch, *k.shape[-3:]).reshape(size, key_heads, keys, width),
            mask=None if attn_mask is None else _canonical_mask(attn_mask, q, logits, (key_heads, group)),
            offset=None if causal is None else keys - queries if causal == "lower-right" else 0,
            scale=check_scale(scale, width),
            rows=tuple(q.shape[:-1]),
        )

    @classmethod
    def in_model(
        cls, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scaling: float | None, **more: Any
    ) -> AttentionCall:
        """A call inside a transformers model, unchecked: query `[B, H, Lq, D]`, key `[B, Hkv, Lk, D]`.

        The mask is `[B or 1, H or 1, Lq, Lk]`. `causal` is aligned upper-left: in a static cache the first Lq keys are
        the prompt, and the rest is not written yet.
        """
        heads, queries = query.shape[1:3]
        groups = (key.shape[1], heads // key.shape[1])
        if causal and key.shape[2] > queries:
            key = key[:, :, :queries]
        if mask is not None:
            mask = mask.reshape(mask.shape[0], *((1, 1) if mask.shape[1] == 1 else groups), *mask.shape[2:])
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q = query.reshape(query.shape[0], *groups, *query.shape[2:])
        return cls(q, key, mask, 0 if causal else None, scale, tuple(query.shape[:-1]), **more)

    @property
    def query(self) -> Tensor:
        """The queries, `[B, H, Lq, D]`."""
        return self.q.flatten(1, 2)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.shape[1] * self.q.shape[2]

    @property
    def queries(self) -> int:
        """Number of rows per head."""
        return self.q.shape[3]

    @property
    def keys(self) -> int:
        """Number of keys, visible or not."""
        return self.k.shape[2]

    def hidden(self, rows: slice | None = None) -> Tensor:
        """Which keys the rows (default: all rows) do not see, broadcasting to `[B, Hkv, G, rows, Lk]`."""
        device = self.q.device
        hide = torch.zeros((1, 1, 1, 1, 1), dtype=torch.bool, device=device)
        # Compilers reject slice(None).
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
            visible = ~self.hidden()
            found = visible.sum(-1)
            if visible.shape[-1] != self.keys:  # a mask that broadcasts along the keys hides either all or none
                found = found * self.keys
        return found.expand(shape).reshape(self.rows)

    def rows_that_see(self, keys: Tensor) -> Tensor:
        """Which rows see at least one of the marked keys (boolean `[B, Hkv, Lk]`), as `[B, Hkv, G, Lq]`."""
        marked, count = keys[:, :, None, None, :], self.queries
        step = max(1, (1 << 24) // max(1, keys.numel()))
        blocks = [(marked & ~self.hidden(slice(i, i + step))).any(-1) for i in range(0, count, step)]
        lengths = [min(step, count - i) for i in range(0, count, step)]
        return torch.cat([b.expand(*self.q.shape[:3], n) for b, n in zip(blocks, lengths, strict=True)], dim=-1)

    def scaled(self, beta: Tensor) -> AttentionCall:
        """The same rows with their logits multiplied by `beta`, which has the shape `rows`."""
        beta = as_beta(beta, self.q.dtype).reshape(self.q.shape[:-1])
        beta = capped_beta(self.q.to(beta.dtype), beta)
        gain = None
        if self.mask is not None and self.mask.is_floating_point():
            gain = beta if self.gain is None else self.gain * beta
        return replace(self, q=(self.q * beta[..., None]).to(beta.dtype), k=self.k.to(beta.dtype), gain=gain)

    def of_heads(self, heads: Tensor) -> AttentionCall:
        """The call of some query heads only, each with the keys it reads."""
        query, mask = self.query[:, heads], self.mask
        if mask is not None and mask.shape[1] * mask.shape[2] > 1:
            mask = mask.expand(-1, *self.q.shape[1:3], -1, -1).flatten(1, 2)[:, heads, None]
        key = self.k[:, heads // self.q.shape[2]]
        return replace(self, q=query[:, :, None], k=key, mask=mask, rows=tuple(query.shape[:-1]))

    def of_rows(self, places: Tensor) -> AttentionCall:
        """The call of a single row per sequence, that at index `places` `[B]`."""
        chosen = places.to(self.q.device).view(-1, 1, 1, 1, 1)
        q = self.q.gather(3, chosen.expand(-1, *self.q.shape[1:3], 1, self.q.shape[-1]))
        mask, beta = self.mask, self.after_cap
        if mask is not None:
            whole = mask.expand(self.batch, -1, -1, self.queries, -1)
            mask = whole.gather(3, chosen.expand(-1, *whole.shape[1:3], 1, whole.shape[-1]))
        elif self.offset is not None:
            mask = torch.arange(self.keys, device=chosen.device) <= chosen + self.offset
        if beta is not None:
            beta = beta.expand(self.rows).gather(2, chosen[..., 0, 0].expand(-1, self.heads, 1))
        return replace(self, q=q, mask=mask, offset=None, after_cap=beta, rows=(self.batch, self.heads, 1))

    def logits(self, places: Tensor | slice) -> Logits:
        """Logits `[B, H, R, Lk]`, float32 or float64, of the rows at `places` (`[R]`, or a slice, which is cheaper)."""
        q, k = self.q[:, :, :, places], self.k
        dtype, rows = floats_at_least_32(q.dtype), q.shape[3]
        # Few operations, because a generated token is short: heads that share keys read them once, and the product
        # itself applies the scale.
        q = q.to(dtype).reshape(self.batch * k.shape[1], -1, q.shape[-1])
        k = k.to(dtype).flatten(0, 1).transpose(1, 2)
        s = torch.baddbmm(q.new_empty(()), q, k, beta=0.0, alpha=self.scale)
        s = s.view(self.batch, self.heads, rows, self.keys)
        if self.softcap is not None:
            s = torch.tanh(s / self.softcap) * self.softcap
        if self.after_cap is not None:
            s = s * self.after_cap.expand(self.query.shape[:-1])[:, :, places, None].to(dtype)
        return Logits.masked(s, self._mask_at(places))

    def _mask_at(self, places: Tensor | slice) -> Tensor | None:
        if self.mask is not None:
            return self.mask.expand(-1, -1, -1, self.queries, -1)[:, :, :, places].flatten(1, 2)
        if self.offset is not None:
            last = torch.arange(self.queries, device=self.k.device)[places, None] + self.offset
            return (torch.arange(self.keys, device=self.k.device) <= last)[None, None]
        return None


@dataclass(eq=False)
class Logits:
    """Logits `[B, H, Lq, Lk]` including a float mask, and which of them are hidden (None: none)."""

    values: Tensor
    hidden: Tensor | None
    _top: Tensor | None = field(default=None, repr=False)

    @classmethod
    def masked(cls, values: Tensor, mask: Tensor | None) -> Logits:
        """Logits under a mask of transformers: boolean (True = visible) or float (added)."""
        if mask is None:
            return cls(values, None)
        hidden = hidden_by(mask)
        return cls(values + mask.masked_fill(hidden, 0.0) if mask.is_floating_point() else values, hidden)

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the rows, `[B, H, Lq]`."""
        return tuple(self.values.shape[:-1])

    @property
    def top(self) -> Tensor:
        """The largest visible logit of each row; carries no gradient."""
        if self._top is None:  # not a cached_property, whose lock compilers reject
            self._top = self.scaled(None).detach().amax(-1)
        return self._top

    def of_heads(self, heads: Tensor) -> Logits:
        """The logits of some heads only."""
        return Logits(self.values[:, heads], None if self.hidden is None else take_heads(self.hidden, heads))

    def scaled(self, beta: Tensor | None) -> Tensor:
        """The logits (β None), or β·(logits − top); hidden logits are lower than any visible one can be.

        Distances from the top are at most 0, so no β can make them overflow.
        """
        x = self.values
        if beta is not None:
            x = (x - self.top[..., None]) * as_beta(beta, x.dtype)[..., None].to(x.dtype)
        return x if self.hidden is None else x.masked_fill(self.hidden, torch.finfo(x.dtype).min / 8)

    def measure(self, needs: frozenset[str], beta: Tensor | None = None) -> RowStats:
        """Row statistics, at β if given. The operations are few, as this runs for every generated token."""
        x = self.scaled(beta)
        x = x.to(floats_at_least_32(x.dtype))
        top = self.top.to(x.dtype)
        if beta is None:
            x = x - top[..., None]
        else:
            x, top = x.clamp_min(-1e4), top * as_beta(beta, x.dtype)
        if self.hidden is None:
            count = x.new_full((1, 1, 1), x.shape[-1], dtype=torch.int64)
        else:
            x = x.clamp_min(-1e4)  # a hidden logit still weighs nothing, and its square is finite
            count = (~self.hidden).expand(*self.hidden.shape[:-1], x.shape[-1]).sum(-1)
        weight = x.exp()
        mass = weight.sum(-1)
        shortfall = -(weight * x).sum(-1) / mass
        var = (weight * (x + shortfall[..., None]).square()).sum(-1) / mass if "var" in needs else None
        return RowStats.anchored(count.expand(top.shape), top, mass.log(), shortfall, max=top, var=var)


def layout(x: Tensor | None) -> Any:
    """Everything about a tensor but its contents: what checks and kernel launches depend on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


_MOST_REMEMBERED = 1024


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Store a result for later calls. Not during the capture of a CUDA graph, which owns the memory it allocates."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    if len(known) >= _MOST_REMEMBERED:
        known.clear()
    known[key] = value


def take_heads(array: Tensor, heads: Tensor) -> Tensor:
    """Some heads of an array `[B, H, ...]`, or all of one that broadcasts along them."""
    return array if array.shape[1] == 1 else array.index_select(1, heads)


def hidden_by(mask: Tensor) -> Tensor:
    """Which entries of a mask hide their key: False, −inf, or a float so low that −inf is meant.

    Masks are often filled with `finfo.min`. Half of that and below hides the key, whatever its sum with a logit is.
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


def largest_for(dtype: torch.dtype) -> float:
    """The largest product of β and a number of this dtype that is allowed."""
    return _LARGEST[dtype]


def capped_beta(x: Tensor, beta: Tensor, share: float = 1.0) -> Tensor:
    """β capped for rows x `[..., n]` so that β·x stays within the range of x's dtype, or a share of it.

    A β of 1 or less is not changed. Where the cap acts, the softmax is one-hot unless logits are almost equal.
    """
    largest = x.detach().abs().amax(-1).to(beta.dtype).clamp_min(1e-8)
    return beta.clamp(max=(share * largest_for(x.dtype) / largest).clamp_min(1.0))


def autocasts(kind: str) -> bool:
    """Whether `torch.autocast` is on for this kind of device."""
    # The usual devices are named because compilers cannot trace `is_autocast_available`.
    known = kind in ("cpu", "cuda", "mps", "xpu") or torch.amp.autocast_mode.is_autocast_available(kind)
    return known and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context that keeps logits and weights at their precision inside `torch.autocast`, as torch's softmax does."""
    # Asking is cheaper than switching autocast off, which would show in every generated token.
    return torch.autocast(device.type, enabled=False) if autocasts(device.type) else nullcontext()


def as_autocast(*inputs: Any) -> tuple[Any, ...]:
    """The inputs in the dtype of `torch.autocast`, if it is on; float64 stays.

    PyTorch's attention casts its inputs in the same way, so the logits that are measured are those it computes.
    """
    if not isinstance(inputs[0], Tensor) or not autocasts(inputs[0].device.type):
        return inputs
    dtype = torch.get_autocast_dtype(inputs[0].device.type)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in inputs
    )


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that all of these broadcast to, or None if there is none."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def check_like(tensor: Tensor, other: Tensor, name: str, other_name: str) -> None:
    """Refuse anything but a tensor with the dtype and device of another."""
    if not isinstance(tensor, Tensor):
        reject_type(name, type(tensor).__name__, "a torch.Tensor")
    if tensor.dtype != other.dtype:
        reject_type(name, f"dtype {tensor.dtype}", f"the dtype of {other_name}, {other.dtype}")
    if tensor.device != other.device:
        reject(name, f"device {tensor.device}", f"the device of {other_name}, {other.device}")


def check_tensors(q: Tensor, k: Tensor) -> None:
    """Refuse queries and keys that do not fit: type, dtype, device, rank and head size."""
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor):
            reject_type(name, type(x).__name__, "a torch.Tensor")
        if not x.is_floating_point():
            reject_type(name, f"dtype {x.dtype}", "a floating dtype", f"convert it first: {name}.float()")
        if x.ndim < 2:
            reject(name, f"shape {tuple(x.shape)}", "two or more dimensions, [..., L, D]")
    check_like(k, q, "k", "q")
    check_width(q, k)


def check_mask(mask: Tensor, q: Tensor, logits: tuple[int, ...], name: str) -> None:
    """Refuse a mask that does not fit logits of this shape: type, dtype, device and shape."""
    if not isinstance(mask, Tensor):
        reject_type(name, type(mask).__name__, "a torch.Tensor or None")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        reject_type(name, f"dtype {mask.dtype}", "bool (True = visible) or a floating dtype (added)")
    if mask.device != q.device:
        reject(name, f"device {mask.device}", f"the device of q, {q.device}")
    if broadcast(mask.shape, logits) != tuple(logits):
        reject(name, f"shape {tuple(mask.shape)}", f"a shape that broadcasts to {logits}, [..., Lq, Lk]")


def _canonical_mask(mask: Tensor, q: Tensor, logits: tuple[int, ...], heads: tuple[int, int]) -> Tensor:
    check_mask(mask, q, logits, "attn_mask")
    mask = mask.reshape((1,) * (max(len(logits), 3) - mask.ndim) + tuple(mask.shape))
    batch = mask.shape[:-3]
    if math.prod(batch) != 1:
        mask = mask.expand(*logits[:-3], *mask.shape[-3:])
        batch = mask.shape[:-3]
    shared_head = mask.shape[-3] == 1
    split = (1, 1) if shared_head else heads
    return mask.reshape(math.prod(batch), *split, *mask.shape[-2:])
