"""`decode`: sharp attention of the newest tokens against a cache, contiguous or paged, whose keys are read once."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, overload

import torch
from torch import Tensor

from sharpmax.arrays import check_scale
from sharpmax.errors import UnsupportedError, reject, reject_type
from sharpmax.ops.attention import (
    MOST_QUERIES,
    QueryScale,
    attention,
    check_values,
    learns,
    policies_of,
    resolved_policy,
)
from sharpmax.ops.kernels.decode_launch import Cache, decode_op, measure_op, obstacle, rows_alike, values_op
from sharpmax.ops.kernels.decode_launch import decode as run_decode
from sharpmax.ops.kernels.tables import Coefficients, table_of
from sharpmax.policies.base import Policy
from sharpmax.policies.per_frequency import query_factors, without_frequencies
from sharpmax.policies.per_head import PerHead
from sharpmax.stats.call import as_beta, broadcast, check_tensors, hidden_by, layout, remember
from sharpmax.stats.dense import centred, dense_stats
from sharpmax.stats.dispatch import is_number, is_plain, on_gpu
from sharpmax.stats.statistics import RowStats

DecodeImpl = Literal["auto", "triton", "torch"]
Policies = Policy | str | None | Sequence[Policy | str | None]


@overload
def decode(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = ..., block_table: Tensor | None = ...,
    attn_mask: Tensor | None = ..., scale: float | None = ..., policy: Policies = ..., impl: DecodeImpl = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def decode(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = ..., block_table: Tensor | None = ...,
    attn_mask: Tensor | None = ..., scale: float | None = ..., policy: Policies = ..., impl: DecodeImpl = ...,
    return_stats: Literal[True],
) -> tuple[Tensor, RowStats]: ...  # fmt: skip
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    policy: Policies = None,
    impl: DecodeImpl = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, RowStats]:
    """Sharp attention of the newest Lq tokens of each sequence, q `[B, H, Lq, D]`, against a cache.

    The cache is contiguous, k `[B, Hkv, Lk, D]` and v `[B, Hkv, Lk, Dv]`, or paged, k `[pages, page_size, Hkv, D]` and
    v `[pages, page_size, Hkv, Dv]` with `block_table` `[B, n]`, the pages of each sequence in order. `lengths` `[B]`
    says how many keys of each sequence are filled, the newest tokens included (None: all); row i sees the keys before
    length − (Lq − 1 − i). What lies beyond has no effect, NaN included. A mask (contiguous caches only) broadcasts to
    `[B, H, Lq, Lk]`: boolean, True = visible, or floats that are added. `policy` is one policy for all heads, or a
    sequence with one per query head.

    On CUDA keys and values are read once, and nothing waits for the device, so the call can be captured in a CUDA
    graph that then serves every length. `impl="torch"` is the same in plain torch, which is also what `auto` takes
    on the CPU and where gradients are wanted; `impl="triton"` insists on the kernels. Rows without keys are 0. With
    `return_stats` the statistics of the rows *before* sharpening come back too.

    >>> import torch, sharpmax as sm
    >>> q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    >>> sm.decode(q, k, v, lengths=torch.tensor([5, 16]), policy="paper").shape
    torch.Size([2, 4, 1, 8])
    """
    known = None
    if not return_stats and impl == "auto" and is_number(scale) and isinstance(policy, (Policy, str, NoneType)):
        given = (q, k, v, lengths, block_table, attn_mask)
        if is_plain(*given) and on_gpu(q):
            policy = policy if isinstance(policy, Policy) else resolved_policy(policy)
            known = (id(policy), scale, *((layout(x), x.device) for x in given if x is not None), *map(_is_none, given))
            if known in _known:
                _, used, coefficients, mask_shape = _known[known]
                mask = None if attn_mask is None else attn_mask.view(mask_shape)
                return run_decode(q, k, v, lengths, block_table, mask, used, *coefficients, False)[0]
    _check(q, k, v, lengths, block_table, attn_mask)
    cache = Cache(lengths, block_table)
    policies = _policies(policy, q.shape[1])
    if (factors := query_factors(policies)) is not None:
        q, policies, known = QueryScale(factors)(q), without_frequencies(policies), None
    mask = None if attn_mask is None else attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    if not _with_kernels(q, k, v, mask, impl):
        return _plain(q, k, v, cache, mask, scale, policies, return_stats)
    scale = q.shape[-1] ** -0.5 if scale is None else check_scale(scale, q.shape[-1])
    table = table_of(policies, q.device)
    if table is not None:
        if known is not None:
            remember(_known, known, (policy, scale, table, None if mask is None else mask.shape))
        run = run_decode if is_plain(q, k, v, lengths, block_table, mask) else decode_op
        found = run(q, k, v, lengths, block_table, mask, scale, *table, return_stats)
        return (found[0], _stats(*found[2:])) if return_stats else found[0]
    logits, *rows = measure_op(q, k, lengths, block_table, mask, scale)
    stats = _stats(*rows)
    dense = logits[..., : cache.batch_heads_keys(k)[2]].reshape(*q.shape[:3], -1)
    beta = as_beta(_joined(policies).beta(stats, lambda b: _measured(dense, b)), q.dtype).expand(q.shape[:3])
    masked, alike = mask is not None, rows_alike(mask, q.shape[2])
    out = values_op(logits, stats.max, beta.contiguous(), v, lengths, block_table, masked, alike)
    return (out, stats) if return_stats else out


_known: dict[Any, tuple[Any, float, Coefficients, Any]] = {}
"""Policy, scale, coefficients and shape of the mask of calls that were checked before."""


def _is_none(x: Tensor | None) -> bool:
    return x is None


def _stats(count: Tensor, peak: Tensor, log_mass: Tensor, shortfall: Tensor, var: Tensor) -> RowStats:
    return RowStats.anchored(count, peak, log_mass, shortfall, max=peak, var=var)


def _measured(logits: Tensor, beta: Tensor) -> RowStats:
    visible = logits != -torch.inf
    return dense_stats(centred(logits, visible)[0] * as_beta(beta, logits.dtype)[..., None], visible)


def _policies(policy: Policies, heads: int) -> tuple[Policy, ...]:
    """One policy for all heads, or one per head."""
    if policy is None or isinstance(policy, (Policy, str)):
        one = resolved_policy(policy)
        if not isinstance(one, PerHead):
            return (one,)
        if one.layers != 1:
            reject("policy", f"{one.layers} layers", "one layer", "use policy.for_layer(index)")
        policy = policies_of(one)
    if not isinstance(policy, Sequence):
        reject_type("policy", type(policy).__name__, "a policy, its name, None, or a sequence with one per query head")
    if len(policy) != heads:
        reject("policy", f"{len(policy)} policies for {heads} query heads", "one policy, or one per query head")
    return tuple(resolved_policy(one) for one in policy)


def _joined(policies: tuple[Policy, ...]) -> Policy:
    return policies[0] if len(policies) == 1 else PerHead((policies,))


def _with_kernels(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, impl: str) -> bool:
    if impl not in ("auto", "triton", "torch"):
        reject("impl", repr(impl), "one of ['auto', 'triton', 'torch']")
    if impl == "torch" or not (q.numel() and k.numel() and v.numel()):
        return False
    reason = obstacle(q, v)
    if reason is None and q.shape[2] > MOST_QUERIES:
        reason = f"q has {q.shape[2]} tokens per sequence, and the kernel takes 1 to {MOST_QUERIES}"
    if reason is None and learns(q, k, v, mask):
        reason = "a gradient is wanted, and the kernel has none"
    if impl == "triton":
        if reason is not None:
            raise UnsupportedError(f"impl: 'triton' cannot do this: {reason}; use impl='torch'")
        return True
    # The interpreter is for tests: on the CPU plain torch is faster by far.
    return reason is None and on_gpu(q)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, mask: Tensor | None, scale: float | None,
    policies: tuple[Policy, ...], return_stats: bool,
) -> Tensor | tuple[Tensor, RowStats]:  # fmt: skip
    """The same through `attention`: pages gathered, lengths turned into a mask, what they hide set to 0."""
    keys = cache.batch_heads_keys(k)[2]
    if cache.pages is not None:
        places = cache.pages.long().clamp(0, max(0, k.shape[0] - 1))
        k, v = (x[places].flatten(1, 2).transpose(1, 2) for x in (k, v))
    batch, _, queries, _ = q.shape
    place = torch.arange(keys, device=q.device)
    filled = torch.full((batch,), keys, device=q.device) if cache.lengths is None else cache.lengths.clamp(0, keys)
    if cache.lengths is not None:
        gone = (place >= filled[:, None])[:, None, :, None]
        k, v = k.masked_fill(gone, 0.0), v.masked_fill(gone, 0.0)
    last = filled[:, None] - torch.arange(queries - 1, -1, -1, device=q.device)
    visible = (place < last[..., None])[:, None]
    if mask is None:
        mask = visible
    elif mask.dtype == torch.bool:
        mask = mask & visible
    else:
        mask = mask.expand(*torch.broadcast_shapes(mask.shape, visible.shape)).masked_fill(~visible, -torch.inf)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"scale": scale, "enable_gqa": True, "policy": _joined(policies)}
    if not return_stats:
        return _blind_rows_0(attention(q, k, v, attn_mask=mask, **options), mask)
    out, stats = attention(q, k, v, attn_mask=mask, return_stats=True, **options)
    return _blind_rows_0(out, mask), stats


def _blind_rows_0(out: Tensor, mask: Tensor) -> Tensor:
    """Without a policy PyTorch's function is called as it is, and does not always give 0 here."""
    return out.masked_fill(hidden_by(mask).all(-1, keepdim=True), 0.0)


def _check(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, block_table: Tensor | None, mask: Tensor | None
) -> None:
    check_tensors(q, k)
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 4:
            reject(name, f"shape {tuple(x.shape)}", "four dimensions")
    paged = block_table is not None
    _check_integers("lengths", lengths, q, (q.shape[0],))
    if paged:
        _check_integers("block_table", block_table, q, (q.shape[0], None))
        if lengths is None:
            reject("lengths", None, "how many keys of each sequence are filled, with a block_table")
        if mask is not None:
            reject("attn_mask", "a mask together with a block_table", "one of the two")
    elif k.shape[0] != q.shape[0]:
        reject("k", f"batch {k.shape[0]}", f"the batch of q, {q.shape[0]}", "pass block_table if k holds pages")
    heads = k.shape[2 if paged else 1]
    if heads == 0 or q.shape[1] % heads:
        reject("k", f"{heads} heads for {q.shape[1]} query heads", "a number of heads that divides the query's")
    check_values(q, k, v)
    if mask is not None:
        _check_mask(mask, q, (*q.shape[:3], k.shape[2]))


def _check_integers(name: str, x: Any, q: Tensor, shape: tuple[int | None, ...]) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
        given = f"dtype {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        reject_type(name, given, "a tensor of int32 or int64")
    if x.device != q.device:
        reject(name, f"device {x.device}", f"the device of q, {q.device}")
    if x.ndim != len(shape) or any(want is not None and want != n for n, want in zip(x.shape, shape, strict=True)):
        wanted = ", ".join("n" if n is None else str(n) for n in shape)
        reject(name, f"shape {tuple(x.shape)}", f"[{wanted}], one per sequence of q")


def _check_mask(mask: Any, q: Tensor, logits: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor):
        reject_type("attn_mask", type(mask).__name__, "a torch.Tensor or None")
    if mask.dtype not in (torch.bool, q.dtype):
        reject_type("attn_mask", f"dtype {mask.dtype}", f"bool or the dtype of q, {q.dtype}")
    if mask.device != q.device:
        reject("attn_mask", f"device {mask.device}", f"the device of q, {q.device}")
    if mask.ndim > 4 or broadcast(mask.shape, logits) != tuple(logits):
        reject("attn_mask", f"shape {tuple(mask.shape)}", f"a shape that broadcasts to {logits}, [B, H, Lq, Lk]")
