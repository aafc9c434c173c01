"""`attention`: PyTorch's attention with a temperature per row.

q, k → row statistics → policy: β per row → β·q → PyTorch's attention kernel. `sharpmax.ops.sharpen` does the middle.
"""

from __future__ import annotations

import dataclasses
from contextvars import ContextVar
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import reject, reject_type
from sharpmax.ops.kernels.sharpen_launch import SharpenPlan
from sharpmax.ops.sharpen import Sharpener, is_added, policies_of, sharpener_for
from sharpmax.policies.base import Policy
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.registry import resolve_policy
from sharpmax.stats.call import Alignment, AttentionCall, as_autocast, autocasts, check_like, layout, remember
from sharpmax.stats.dispatch import Impl, check_impl, is_known_kind, is_number, is_plain, measure, on_gpu
from sharpmax.stats.statistics import FIELDS, RowStats


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., *, scale: float | None = ..., enable_gqa: bool = ..., policy: Policy | str | None = ...,
    impl: Impl = ..., return_stats: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., *, scale: float | None = ..., enable_gqa: bool = ..., policy: Policy | str | None = ...,
    impl: Impl = ..., return_stats: Literal[True],
) -> tuple[Tensor, RowStats]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    policy: Policy | str | None = None,
    impl: Impl = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, RowStats]:
    """`torch.nn.functional.scaled_dot_product_attention` with a temperature per row, chosen by `policy`.

    query `[..., H, Lq, D]`, key `[..., Hkv, Lk, D]`, value `[..., Hkv, Lk, Dv]` give `[..., H, Lq, Dv]`. Arguments have
    the positions, names and meanings of PyTorch's function. Its `is_causal` is aligned top-left, so for Lq ≠ Lk (a
    cache) pass `attn_mask=torch.nn.attention.bias.causal_lower_right(Lq, Lk)`. `policy=None` is PyTorch's function.

    `impl` chooses how rows are measured (see `row_stats`). With `return_stats` the statistics of the rows *before*
    sharpening are returned too. The output of a row without visible keys is 0. Keys and values that a row does not see
    have no effect on it, even if they are NaN (on CUDA the latter depends on PyTorch's kernel).

    >>> import torch, sharpmax as sm
    >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
    >>> sm.attention(q, k, v, is_causal=True, policy="paper").shape
    torch.Size([1, 2, 16, 8])
    """
    resolved = policy if isinstance(policy, Policy) else resolve_policy(policy)

    # On a GPU, a call with the layout of an earlier one skips every check.
    known = None
    usual = attn_mask is None and not return_stats and impl == "auto" and type(dropout_p) is float and is_number(scale)
    if usual and is_plain(query, key, value) and on_gpu(query) and not autocasts(query.device.type):
        known = (
            id(resolved), layout(query), layout(key), layout(value), is_causal, dropout_p, scale, enable_gqa
        )  # fmt: skip
        earlier = _known.get(known)
        if earlier is not None and (sharper := earlier.sharpen(query, key)) is not None:
            return F.scaled_dot_product_attention(sharper, key, value, **earlier.options)

    # q, k: the call, checked and in canonical form.
    check_impl(impl)
    query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
    causal: Alignment | None = "upper-left" if is_causal else None
    call = AttentionCall.of(query, key, attn_mask, causal=causal, scale=scale, enable_gqa=enable_gqa)
    check_values(query, key, value)
    _check_dropout(dropout_p)
    _check_heads(resolved, call)
    if type(attn_mask) is Tensor:
        check_mask_dtype(attn_mask, query)
    sharpener = sharpener_for(policies_of(resolved))
    if sharpener.query_scale is not None:
        query = sharpener.query_scale(query)
        call = AttentionCall.of(query, key, attn_mask, causal=causal, scale=scale, enable_gqa=enable_gqa)

    # Row statistics → β → β·q. A β that is the same for all rows goes into the scale of the logits instead.
    stats = measure(call, impl, frozenset(FIELDS)) if return_stats else None
    mask = attn_mask
    options: dict[str, Any] = {
        "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa
    }  # fmt: skip
    if sharpener.rules and sharpener.uniform is not None and call.scale > 0.0 and not is_added(mask):
        options["scale"] = sharpener.uniform * call.scale
    elif sharpener.rules:
        query, mask = sharpener.sharpen(call, query, mask, impl, stats)
        if call.offset is not None and call.scale <= 0.0:
            # PyTorch's kernel hides keys before it multiplies by the scale, which would make NaN or +inf of −inf.
            query, options["scale"] = query * call.scale, 1.0
    if known is not None and is_known_kind(call) and call.scale > 0.0:  # other scales are not part of `options`
        remember(_known, known, _KnownAttention(resolved, sharpener, call.offset, call.scale, options))

    # β·q → PyTorch's kernel → output.
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    if sharpener.rules:
        if out.device.type == "cpu" and ops_for(out).concrete(out) and bool(out.isnan().any()):
            out = _contain_invalid_keys(out, call, query, key, value, mask, options)
        if attn_mask is not None:
            out = out.masked_fill((call.counts() == 0)[..., None], 0.0)
    return out if stats is None else (out, stats)


@dataclasses.dataclass
class _KnownAttention:
    """A checked call, kept for calls whose tensors have the same layout."""

    policy: Policy
    """Kept so that no other object can get its id, which is part of the key."""

    sharpener: Sharpener
    offset: int | None
    scale: float
    options: dict[str, Any]
    """What PyTorch's function gets besides tensors."""

    plan: SharpenPlan | None = None
    table: Tensor | None = None

    def sharpen(self, q: Tensor, k: Tensor) -> Tensor | None:
        """β·q, or None if this needs the whole of `attention`."""
        if self.plan is not None and self.table is not None:
            return self.plan(q, k, self.table)
        sharpener = self.sharpener
        if sharpener.query_scale is not None:
            q = sharpener.query_scale(q)
        if not sharpener.rules or sharpener.uniform is not None:
            return q
        if sharpener.by_constants is not None:
            return sharpener.by_constants(q)
        found = sharpener.plan(q, k, self.offset, self.scale) if sharpener.query_scale is None else None
        if found is not None:
            self.table, self.plan = found[1].values, found[2]
        return sharpener.sharpen_unmasked(q, k, self.offset, self.scale)


_known: dict[Any, _KnownAttention] = {}

_repeated: ContextVar[bool] = ContextVar("sharpmax.attention.repeated", default=False)


def is_repeated() -> bool:
    """Whether PyTorch's function runs a second time for the same call, which those who count calls have to skip."""
    return _repeated.get()


def _contain_invalid_keys(
    out: Tensor, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The output, with NaN only in rows that see an invalid (not finite) key or value.

    PyTorch's kernel multiplies a hidden NaN by a weight of 0, which is NaN.
    """
    invalid = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    if not bool(invalid.any()):
        return out
    rows = call.rows_that_see(invalid.reshape(call.k.shape[:-1])).reshape(call.rows)
    key, value = (x.masked_fill(invalid[..., None], 0.0) for x in (key, value))
    before = _repeated.set(True)
    try:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
    finally:
        _repeated.reset(before)
    return out.masked_fill(rows[..., None], torch.nan)


def _check_heads(policy: Policy, call: AttentionCall) -> None:
    if not isinstance(policy, PerHead):
        return
    if policy.layers != 1:
        reject("policy", policy.describe(), "the policy of one layer", "choose it with policy.for_layer(index)")
    if len(call.rows) < 2 or call.heads != policy.heads:
        given = f"{policy.heads} heads for rows of shape {call.rows}"
        reject("policy", given, "rows [..., H, Lq] with as many heads")


def check_values(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse values that do not fit the queries and keys: type, dtype, device and shape."""
    check_like(value, query, "v", "q")
    if value.ndim != key.ndim or value.shape[:-1] != key.shape[:-1]:
        reject("v", f"shape {tuple(value.shape)}", f"the shape of k {tuple(key.shape)}, but for the last dimension")


def check_mask_dtype(mask: Tensor, query: Tensor) -> None:
    """Refuse a mask dtype that PyTorch's function does not take."""
    if mask.dtype not in (torch.bool, query.dtype):
        reject_type("attn_mask", f"dtype {mask.dtype}", f"bool or the dtype of q, {query.dtype}")


def _check_dropout(dropout_p: float) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        reject_type("dropout_p", type(dropout_p).__name__, "a probability, 0 … 1")
    if not 0.0 <= dropout_p <= 1.0:
        reject("dropout_p", dropout_p, "a probability, 0 … 1")
