"""Entropy from an attention kernel that is already there.

With the keys in place of the values, attention returns E[k]; the mean logit is scale·q·E[k], and the kernel's own
log-sum-exp completes the entropy. It costs one pass of PyTorch's attention. Lse and mean come separately, so their
difference carries a rounding error of about eps·|lse|: half precision is computed in float32, and rows of large logits
in float64.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.stats.call import AttentionCall, Parts, floats_at_least_32

FIELDS = frozenset({"count", "lse", "mean", "entropy"})
"""What the kernel can tell; the maximum and the variance never leave it."""

# What rounding may cost an entropy, in nats, by the dtype of the statistics: before another way is taken, and at most.
_QUICK_LOSS = {torch.float32: 8e-6, torch.float64: 2e-14}
_MOST_LOSS = {torch.float32: 8e-6, torch.float64: 1e-11}


class LostDigitsError(UnsupportedError):
    """The logits are so large that rounding costs too much of the entropy."""


def obstacle(call: AttentionCall) -> str | None:
    """Why the kernel cannot serve this call, or None."""
    if call.q.device.type != "cpu":
        return f"it uses the CPU's flash attention and q is on {call.q.device}"
    if call.mask is not None and call.mask.is_floating_point():
        return "the mean of an added float mask never leaves the kernel"
    return None


def quick_parts(call: AttentionCall) -> Parts:
    """Anchored at lse: log_mass 0, shortfall the entropy; var is not measured and comes as 0."""
    return _parts(call, _QUICK_LOSS[floats_at_least_32(call.q.dtype)])


def wide_parts(call: AttentionCall) -> Parts:
    """As `quick_parts`, computed in float64: for larger logits."""
    dtype = floats_at_least_32(call.q.dtype)
    found = _parts(replace(call, q=call.q.double(), k=call.k.double()), _MOST_LOSS[dtype])
    return Parts(*(part.to(dtype) for part in found))


def _parts(call: AttentionCall, loss: float) -> Parts:
    """The parts, unless an entropy loses more than `loss` nats to rounding."""
    batch, key_heads, group, rows, width = call.q.shape
    heads = (batch, key_heads * group)
    dtype = floats_at_least_32(call.q.dtype)
    q, k = call.q.to(dtype), call.k.to(dtype)
    # A kernel that hides a key by adding −inf to its logit keeps a NaN there, and 0 · NaN is NaN: keys that are not
    # finite go in as zeros, and the rows that see one are marked afterwards, like those of a query of that kind.
    bad_keys = ~k.isfinite().all(-1)
    invalid = ~q.isfinite().all(-1)
    if bad_keys.any():
        k = k.masked_fill(bad_keys[..., None], 0.0)
        invalid = invalid | call.rows_that_see(bad_keys)
    shared = k[:, :, None].expand(-1, -1, group, -1, -1).reshape(*heads, call.keys, width).contiguous()
    mask, is_causal = _kernel_mask(call, heads, dtype)
    scale = call.scale
    if scale <= 0.0:  # the kernel hides keys before it multiplies by the scale: −inf becomes NaN or +inf
        q, scale = q * scale, 1.0
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.reshape(*heads, rows, width).contiguous(), shared, shared, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    lse = lse.to(dtype).view(batch, key_heads, group, rows)
    entropy = (lse - scale * (q * out.reshape(q.shape)).sum(-1)).clamp_min(0.0)
    empty = (call.counts() == 0).view(lse.shape)
    # A logit beyond the range of the dtype shows as an lse that is not finite.
    if not bool((invalid | empty | (lse.abs() * torch.finfo(dtype).eps <= loss)).all()):
        raise LostDigitsError(
            "impl: 'sdpa' cannot do this: the logits are so large that the difference of lse and mean loses the "
            "entropy; use impl='streaming'"
        )
    return Parts(
        lse.masked_fill(invalid, torch.nan).masked_fill(empty, -torch.inf),
        torch.zeros_like(lse).masked_fill(invalid & ~empty, torch.nan),
        entropy.masked_fill(invalid, torch.nan).masked_fill(empty, 0.0),
        torch.zeros_like(lse),
    )


def _kernel_mask(call: AttentionCall, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """The mask as the kernel takes it: its own causal flag where that says the same, else −inf in a float mask."""
    offset = call.offset
    if offset is not None and offset >= call.keys - 1:
        offset = None
    if call.mask is None and call.spans is None and offset in (None, 0):
        return None, offset == 0
    hide = call.hidden()
    hide = hide.reshape(hide.shape[0], -1, *hide.shape[-2:])  # of one head, or of all
    mask = torch.zeros(hide.shape, dtype=dtype, device=hide.device).masked_fill_(hide, -torch.inf)
    return mask.expand(heads[0], heads[1], call.q.shape[-2], call.keys), False
