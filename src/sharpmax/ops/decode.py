"""`decode`: attention of the newest tokens to a cache, contiguous or paged, reading keys and values once."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from sharpmax.arrays import check_scale
from sharpmax.errors import UnsupportedError, reject, reject_type
from sharpmax.ops.attention import attention, check_mask_dtype, check_values
from sharpmax.ops.kernels.decode_launch import decode as run_decode
from sharpmax.ops.kernels.decode_launch import decode_op, obstacle
from sharpmax.ops.kernels.tables import Coefficients, table_of
from sharpmax.ops.sharpen import MOST_QUERIES, QueryScale, learns, policies_of, sharpener_for
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import PerFrequency, without_frequencies
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.registry import resolve_policy
from sharpmax.stats.call import check_mask, check_tensors, hidden_by, layout, remember
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
    """Attention of the newest Lq tokens of each sequence, q `[B, H, Lq, D]`, to a cache, with β chosen by `policy`.

    The cache is contiguous, k `[B, Hkv, Lk, D]` and v `[B, Hkv, Lk, Dv]`, or paged, k `[pages, page_size, Hkv, D]` and
    v `[pages, page_size, Hkv, Dv]` with `block_table` `[B, n]`, the pages of each sequence in order. `lengths` `[B]`
    is the number of filled keys of each sequence, including the newest tokens (None: all). Row i sees the keys before
    length − (Lq − 1 − i). Other keys have no effect, even if they are NaN. A mask (contiguous caches only) broadcasts
    to `[B, H, Lq, Lk]`; it is boolean (True = visible) or float (added). `policy` is one policy for all heads, or a
    sequence with one per query head.

    On CUDA keys and values are read once and nothing waits for the device, so a CUDA graph of the call can be captured
    and serves every length. `impl="torch"` computes the same in plain torch. `auto` takes it on the CPU, for inputs
    that require gradients, and for policies that the kernels do not know (`LogScale` and your own). `impl="triton"`
    raises an error instead. The output of a row without visible keys is 0. With `return_stats` the statistics of the
    rows *before* sharpening are returned too.

    >>> import torch, sharpmax as sm
    >>> q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    >>> sm.decode(q, k, v, lengths=torch.tensor([5, 16]), policy="paper").shape
    torch.Size([2, 4, 1, 8])
    """
    known = None
    usual = not return_stats and impl == "auto" and is_number(scale) and isinstance(policy, (Policy, str, NoneType))
    if usual and is_plain(q, k, v, lengths, block_table, attn_mask) and on_gpu(q):
        policy = resolve_policy(policy)  # type: ignore[arg-type]
        given = (layout(lengths), layout(block_table), layout(attn_mask))
        known = (id(policy), scale, layout(q), layout(k), layout(v), *given)
        if (earlier := _known.get(known)) is not None:
            q = q if earlier.query_scale is None else earlier.query_scale(q)
            mask = None if attn_mask is None else attn_mask.view(earlier.mask_shape)
            return run_decode(q, k, v, lengths, block_table, mask, earlier.scale, *earlier.table, False)[0]
    _check(q, k, v, lengths, block_table, attn_mask)
    policies = _policies(policy, q.shape[1])
    query_scale = None
    if any(isinstance(one, PerFrequency) for one in policies):
        query_scale, policies = sharpener_for(policies).query_scale, without_frequencies(policies)
        q = q if query_scale is None else query_scale(q)
    mask = None if attn_mask is None else attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    table = table_of(policies, q.device) if _with_kernels(q, k, v, mask, impl) else None
    if table is None:
        if impl == "triton":
            raise UnsupportedError(
                "impl: 'triton' cannot do this: the kernel does not know the policy; use impl='torch'"
            )
        return _plain(q, k, v, lengths, block_table, mask, scale, policies, return_stats)
    scale = q.shape[-1] ** -0.5 if scale is None else check_scale(scale, q.shape[-1])
    if known is not None:
        shape = None if mask is None else mask.shape
        remember(_known, known, _KnownDecode(policy, query_scale, scale, table, shape))
    run = run_decode if is_plain(q, k, v, lengths, block_table, mask) else decode_op
    found = run(q, k, v, lengths, block_table, mask, scale, *table, return_stats)
    if not return_stats:
        return found[0]
    out, _, count, peak, log_mass, shortfall, var = found
    return out, RowStats.anchored(count, peak, log_mass, shortfall, max=peak, var=var)


class _KnownDecode(NamedTuple):
    """A checked call, kept for tensors of the same layout. Holding the policy keeps its id from being reused."""

    policy: Any
    query_scale: QueryScale | None
    scale: float
    table: Coefficients
    mask_shape: Any


_known: dict[Any, _KnownDecode] = {}


def _policies(policy: Policies, heads: int) -> tuple[Policy, ...]:
    """One policy for all heads, or one per head."""
    if policy is None or isinstance(policy, (Policy, str)):
        one = resolve_policy(policy)
        if not isinstance(one, PerHead):
            return (one,)
        if one.layers != 1:
            reject("policy", f"{one.layers} layers", "one layer", "use policy.for_layer(index)")
        policy = policies_of(one)
    if not isinstance(policy, Sequence):
        reject_type("policy", type(policy).__name__, "a policy, its name, None, or a sequence with one per query head")
    if len(policy) != heads:
        reject("policy", f"{len(policy)} policies for {heads} query heads", "one policy, or one per query head")
    return tuple(resolve_policy(one) for one in policy)


def _with_kernels(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, impl: str) -> bool:
    """Whether the kernels compute this call. Raises UnsupportedError if `impl` asks for them and they cannot."""
    if impl not in ("auto", "triton", "torch"):
        reject("impl", repr(impl), "one of ['auto', 'triton', 'torch']")
    if impl == "torch" or not (q.numel() and k.numel() and v.numel()):
        return False
    reason = obstacle(q, v)
    if reason is None and q.shape[2] > MOST_QUERIES:
        reason = f"q has {q.shape[2]} tokens per sequence, and the kernel takes 1 to {MOST_QUERIES}"
    if reason is None and learns(q, k, v, mask):
        reason = "an input requires a gradient, and the kernel has none"
    if impl == "triton":
        if reason is not None:
            raise UnsupportedError(f"impl: 'triton' cannot do this: {reason}; use impl='torch'")
        return True
    # Triton's interpreter is for tests. On the CPU plain torch is far faster.
    return reason is None and on_gpu(q)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, pages: Tensor | None, mask: Tensor | None,
    scale: float | None, policies: tuple[Policy, ...], return_stats: bool,
) -> Tensor | tuple[Tensor, RowStats]:  # fmt: skip
    """`decode` through `attention`: gather the pages, turn lengths into a mask, and set what it hides to 0."""
    if pages is not None:
        places = pages.long().clamp(0, max(0, k.shape[0] - 1))
        k, v = (x[places].flatten(1, 2).transpose(1, 2) for x in (k, v))
    batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    place = torch.arange(keys, device=q.device)
    filled = torch.full((batch,), keys, device=q.device) if lengths is None else lengths.clamp(0, keys)
    if lengths is not None:
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
    policy = policies[0] if len(policies) == 1 else PerHead((policies,))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": True, "policy": policy}
    stats: RowStats | None = None
    if return_stats:
        out, stats = attention(q, k, v, mask, return_stats=True, **options)
    else:
        out = attention(q, k, v, mask, **options)
    # Without a policy this is PyTorch's own function, which does not always give 0 for such rows.
    out = out.masked_fill(hidden_by(mask).all(-1, keepdim=True), 0.0)
    return out if stats is None else (out, stats)


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
        check_mask(mask, q, (*q.shape[:3], k.shape[2]), "attn_mask")
        check_mask_dtype(mask, q)


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
