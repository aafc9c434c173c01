"""Entropy, softmax and attention with a policy for JAX arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from sharpmax.arrays import check_heads, check_scale, check_width, ops_for
from sharpmax.errors import reject, reject_type
from sharpmax.ops.softmax import rows_of, sharpen
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import check_frequencies, query_factors, without_frequencies
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.registry import resolve_policy
from sharpmax.stats.statistics import RowStats, dense_stats

__all__: list[str] = []

jax.tree_util.register_pytree_node(RowStats, RowStats.flatten, RowStats.unflatten)


_BLOCK_LOGITS = 1 << 24
_LEAST_ROWS = 16


def as_array(name: str, x: object) -> jax.Array:
    """Return a JAX or numpy array as a JAX array; raise ArgumentTypeError for anything else."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        reject_type(name, type(x).__name__, "a JAX or numpy array")
    return jnp.asarray(x)


def check_arrays(q: jax.Array, k: jax.Array, v: jax.Array, enable_gqa: bool) -> None:
    """Raise unless arrays are q `[..., H, Lq, D]`, k `[..., Hkv, Lk, D]` and v `[..., Hkv, Lk, Dv]`."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            reject_type(name, f"dtype {x.dtype}", "a floating dtype", f"convert it first: {name}.astype(jnp.float32)")
        if x.ndim < 2:
            reject(name, f"shape {x.shape}", "two or more dimensions, [..., H, L, D]")
        if x.dtype != q.dtype:
            reject_type(name, f"dtype {x.dtype}", f"the dtype of q, {q.dtype}")
    check_width(q, k)
    check_heads(q, k, enable_gqa)
    if v.shape[:-1] != k.shape[:-1]:
        reject("v", f"shape {v.shape}", f"the shape of k {k.shape}, but for the last dimension")
    if not _broadcasts(k.shape[:-3], q.shape[:-3]):
        reject("k", f"batch {k.shape[:-3]}", f"a batch that broadcasts to the query's {q.shape[:-3]}")


def as_mask(mask: object, is_causal: bool, logits: tuple[int, ...]) -> jax.Array | None:
    """Return the mask as an array, checked against the shape of the logits `[..., H, Lq, Lk]`."""
    if mask is None:
        return None
    if is_causal:
        given_both, remedy = "a mask together with is_causal=True", "put the causal limit into the mask"
        reject("attn_mask", given_both, "one of the two", remedy)
    given = as_array("attn_mask", mask)
    if given.dtype != jnp.bool and not jnp.issubdtype(given.dtype, jnp.floating):
        reject_type("attn_mask", f"dtype {given.dtype}", "bool (True = visible) or a floating dtype (added)")
    if not _broadcasts(given.shape, logits):
        reject("attn_mask", f"shape {given.shape}", f"a shape that broadcasts to {logits}, [..., H, Lq, Lk]")
    return given


def rows_per_block(block: int | None, logits: tuple[int, ...]) -> int:
    """Return the number of query rows per block: `block`, or as many as keep their logits within 64 MiB."""
    if block is None:
        return max(_LEAST_ROWS, _BLOCK_LOGITS // max(1, math.prod(logits) // max(1, logits[-2])))
    if isinstance(block, bool) or not isinstance(block, int):
        reject_type("block", type(block).__name__, "a number of query rows or None")
    if block < 1:
        reject("block", block, "1 or more query rows, or None")
    return block


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


def entropy(logits: ArrayLike, *, axis: int = -1, mask: ArrayLike | None = None) -> jax.Array:
    """Shannon entropy, in nats, of softmax(logits) along `axis`: logits `[..., n]` give `[...]` in float32 or better.

    Logits of −inf (or `finfo.min`) and positions where the boolean `mask` is False are masked. A row that is masked
    throughout has entropy 0.

    >>> import jax.numpy as jnp
    >>> entropy(jnp.array([0.0, 0.0, -jnp.inf]))
    Array(0.6931472, dtype=float32)
    """
    found: jax.Array = _entropy(as_array("logits", logits), _mask(mask), axis=axis)
    return found


def softmax(
    logits: ArrayLike, *, policy: Policy | str | None = None, axis: int = -1, mask: ArrayLike | None = None
) -> jax.Array:
    """softmax(β·logits) along `axis`, with β from `policy` and the row's own statistics; logits `[..., n]` keep shape.

    Masked positions get weight 0, also in a row that is masked throughout. `policy=None` is plain softmax. First and
    second derivatives flow through β.

    >>> import jax.numpy as jnp
    >>> logits = jnp.array([2.0, 1.0, 0.0, 0.0])
    >>> softmax(logits, policy=None).max() < softmax(logits, policy="paper").max()
    Array(True, dtype=bool)
    """
    chosen = resolve_policy(policy)
    weights: jax.Array
    weights, stats = _softmax(as_array("logits", logits), _mask(mask), axis=axis, policy=chosen)
    if stats is not None:
        chosen.warn_outside(stats)  # compiled code has no values to warn about
    return weights


def _mask(mask: ArrayLike | None) -> jax.Array | None:
    return None if mask is None else as_array("mask", mask)


@partial(jax.jit, static_argnames="axis")
def _entropy(logits: jax.Array, mask: jax.Array | None, *, axis: int) -> jax.Array:
    return dense_stats(*rows_of(logits, axis, mask, name="axis")).entropy  # type: ignore[no-any-return]


@partial(jax.jit, static_argnames=("axis", "policy"))
def _softmax(
    logits: jax.Array, mask: jax.Array | None, *, axis: int, policy: Policy
) -> tuple[jax.Array, RowStats | None]:
    weights, stats = sharpen(*rows_of(logits, axis, mask, name="axis"), policy)
    return jnp.moveaxis(weights.astype(logits.dtype), -1, axis), stats


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, attn_mask: ArrayLike | None = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ..., policy: Policy | str | None = ...,
    return_stats: Literal[False] = ..., block: int | None = ...,
) -> jax.Array: ...  # fmt: skip
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, attn_mask: ArrayLike | None = ..., is_causal: bool = ...,
    scale: float | None = ..., enable_gqa: bool = ..., policy: Policy | str | None = ..., return_stats: Literal[True],
    block: int | None = ...,
) -> tuple[jax.Array, RowStats]: ...  # fmt: skip
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    attn_mask: ArrayLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    policy: Policy | str | None = None,
    return_stats: bool = False,
    block: int | None = None,
) -> jax.Array | tuple[jax.Array, RowStats]:
    """softmax(β·(scale·q·kᵀ + mask))·v with a β per row, chosen by `policy` from the row's own statistics.

    q `[..., H, Lq, D]`, k `[..., Hkv, Lk, D]`, v `[..., Hkv, Lk, Dv]` give `[..., H, Lq, Dv]` in the dtype of q,
    computed in float32 or better. Arguments are those of `sharpmax.attention`: a boolean mask is True for visible keys,
    a float mask is added and hides a key where it is −inf (or `finfo.min`), and `is_causal` is aligned top-left (row i
    sees keys 0 … i). With a cache, pass `jnp.tri(Lq, Lk, Lk - Lq, dtype=bool)` as mask instead.

    Attention is computed for `block` query rows at a time, and again in the backward pass, so memory grows with
    Lq + Lk; None chooses a block size. With `return_stats` the row statistics *before* sharpening are returned too. A
    row without visible keys is 0. A row that sees a key or value that is not finite is NaN, with gradient 0. What is
    hidden has no effect.

    >>> import jax.numpy as jnp
    >>> q = k = v = jnp.ones((1, 2, 16, 8))
    >>> attention(q, k, v, is_causal=True, policy="paper").shape
    (1, 2, 16, 8)
    """
    chosen = resolve_policy(policy)
    q, k, v = as_array("q", q), as_array("k", k), as_array("v", v)
    check_arrays(q, k, v, enable_gqa)
    policies = chosen.policies[0] if isinstance(chosen, PerHead) else (chosen,)
    if (factors := query_factors(policies)) is not None:
        check_frequencies(len(factors[0]), q.shape[-1])
        q = (q * jnp.asarray(factors, jnp.promote_types(q.dtype, jnp.float32))[:, None]).astype(q.dtype)
        rest = without_frequencies(policies)
        chosen = PerHead((rest,)) if isinstance(chosen, PerHead) else rest[0]
    logits = (*q.shape[:-1], k.shape[-2])
    mask, factor = as_mask(attn_mask, is_causal, logits), check_scale(scale, q.shape[-1])
    options: dict[str, Any] = {"is_causal": is_causal, "policy": chosen, "measured": return_stats}
    out, stats = _attend(q, k, v, mask, factor, block=rows_per_block(block, logits), **options)
    if stats is not None:
        chosen.warn_outside(stats)  # compiled code has no values to warn about
    return (out, stats) if return_stats else out


# Without jit, every call would compile the loop again.
@partial(jax.jit, static_argnames=("is_causal", "policy", "block", "measured"))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, scale: jax.Array, *, is_causal: bool,
    policy: Policy, block: int, measured: bool,
) -> tuple[jax.Array, RowStats | None]:  # fmt: skip
    """Return the output, and statistics `[..., H, Lq]` if they are requested or the policy needs them."""
    count = q.shape[-2]
    steps = max(1, math.ceil(count / block))
    size = math.ceil(count / steps)  # the same number of blocks with the least padding
    split = partial(_split, steps=steps, size=size)
    mask_blocks = split(mask) if mask is not None and mask.ndim > 1 and mask.shape[-2] != 1 else None
    attend = _block_attention(q, k, v, scale, policy, measured)

    # The backward pass recomputes each block. Inside a loop, XLA cannot merge the two (common subexpressions).
    @partial(jax.checkpoint, prevent_cse=False)
    def one_block(part: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[jax.Array, RowStats | None]:
        first, queries, mask_rows = part
        positions = first + jnp.arange(size)
        return attend(queries, *_visible(mask if mask_rows is None else mask_rows, is_causal, positions, k.shape[-2]))

    parts = (size * jnp.arange(steps), split(q), mask_blocks)
    out, stats = jax.lax.map(one_block, parts)
    if stats is not None:
        stats = stats.map(lambda part: _join(part[..., None], count)[..., 0])
    return _join(out, count).astype(q.dtype), stats


def _visible(mask: jax.Array | None, is_causal: bool, rows: jax.Array, keys: int) -> tuple[jax.Array, jax.Array | None]:
    """Return which keys the rows at these positions see, and what is added to their logits."""
    if is_causal:
        return jnp.arange(keys) <= rows[:, None], None
    if mask is None:
        return jnp.array(True), None
    if mask.dtype == jnp.bool:
        return mask, None
    # Masks often use finfo.min for −inf.
    return ~(mask <= ops_for(mask).lowest(mask.dtype) / 2), mask


def _block_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array, policy: Policy, measured: bool
) -> Callable[..., tuple[jax.Array, RowStats | None]]:
    """Return a function for the attention of some query rows to all keys.

    Entries that are not finite are replaced by 0 before any product, and their rows set to NaN afterwards. As 0 · NaN
    is NaN, masking them after the product would leave NaN in the gradient.
    """
    lead = q.shape[:-2]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    dot = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)
    if not lead:
        k, v = k[None], v[None]
    key_heads = k.shape[-3]
    grouped = (*lead[:-1], key_heads, math.prod(lead[-1:]) // max(1, key_heads))

    def per_query_head(broken: jax.Array) -> jax.Array:
        """Repeat `[..., Hkv, Lk]` for every query head, `[..., H, 1, Lk]`."""
        every = jnp.repeat(broken, grouped[-1], axis=-2)
        return every.reshape(*broken.shape[:-2], *lead[-1:], 1, broken.shape[-1])

    (k, broken_keys), (v, broken_values) = _finite(k.astype(dtype)), _finite(v.astype(dtype))
    broken_keys, broken_values = per_query_head(broken_keys), per_query_head(broken_values)

    def attend(queries: jax.Array, visible: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, RowStats | None]:
        rows, broken_rows = _finite(queries.astype(dtype))
        here = rows.shape[-2]
        logits = scale * dot("...hgqd,...hkd->...hgqk", rows.reshape(*grouped, *rows.shape[-2:]), k)
        logits = logits.reshape(*lead, here, k.shape[-2])
        if bias is not None:
            logits = logits + bias.astype(dtype)
        visible = jnp.broadcast_to(visible, logits.shape)
        # A product that overflows to −inf has weight 0. Other values that are not finite make the row NaN.
        odd = jnp.isnan(logits) | (logits == jnp.inf) | broken_keys | broken_rows[..., None]
        logits = jnp.where(odd, 0.0, logits)
        weights, stats = sharpen(logits, visible, policy)
        if measured and stats is None:
            stats = dense_stats(logits, visible)
        out = dot("...hgqk,...hkd->...hgqd", weights.reshape(*grouped, *weights.shape[-2:]), v)
        out = out.reshape(*lead, here, v.shape[-1])
        unknown = jnp.any(visible & odd, axis=-1)
        invalid = jnp.any(visible & (odd | broken_values), axis=-1)
        if stats is not None:
            stats = stats.map(partial(_nan_where, unknown))
        return _nan_where(invalid[..., None], out), stats

    return attend


def _finite(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replace vectors `[..., D]` that are not finite by 0; return which they are, `[...]`."""
    broken = ~jnp.isfinite(x).all(-1)
    return jnp.where(broken[..., None], 0.0, x), broken


def _nan_where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """Return NaN where the condition holds; leave integers unchanged."""
    return jnp.where(condition, jnp.nan, x) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _split(x: jax.Array, *, steps: int, size: int) -> jax.Array:
    """Split rows `[..., L, n]` into blocks `[steps, ..., size, n]`, padded with zeros."""
    padding = [(0, 0)] * (x.ndim - 2) + [(0, steps * size - x.shape[-2]), (0, 0)]
    blocks = jnp.pad(x, padding).reshape(*x.shape[:-2], steps, size, x.shape[-1])
    return jnp.moveaxis(blocks, -3, 0)


def _join(blocks: Any, count: int) -> jax.Array:
    """Join blocks `[steps, ..., size, n]` to rows `[..., count, n]`."""
    rows = jnp.moveaxis(blocks, 0, -3)
    return rows.reshape(*rows.shape[:-3], math.prod(rows.shape[-3:-1]), rows.shape[-1])[..., :count, :]
