"""The arguments of `sharpmax.jax.attention`: what is allowed, and what they mean."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sharpmax.errors import reject, reject_type

__all__ = ["as_array", "as_mask", "check_arrays", "check_scale", "rows_per_block"]

_BLOCK_LOGITS = 1 << 24
_LEAST_ROWS = 16


def as_array(name: str, x: object) -> jax.Array:
    """A JAX or numpy array as a JAX array, or an error that names the argument."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        reject_type(name, type(x).__name__, "a JAX or numpy array")
    return jnp.asarray(x)


def check_arrays(q: jax.Array, k: jax.Array, v: jax.Array, enable_gqa: bool) -> None:
    """Refuse arrays that are not q `[..., H, Lq, D]`, k `[..., Hkv, Lk, D]` and v `[..., Hkv, Lk, Dv]`."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            reject_type(name, f"dtype {x.dtype}", "a floating dtype", f"convert it first: {name}.astype(jnp.float32)")
        if x.ndim < 2:
            reject(name, f"shape {x.shape}", "two or more dimensions, [..., H, L, D]")
        if x.dtype != q.dtype:
            reject_type(name, f"dtype {x.dtype}", f"the dtype of q, {q.dtype}")
    if q.shape[-1] != k.shape[-1]:
        reject("k", f"head size {k.shape[-1]}", f"the head size of q, {q.shape[-1]}")
    if q.shape[-1] == 0:
        reject("q", "head size 0", "a head size of 1 or more")
    if k.ndim != q.ndim:
        reject("k", f"shape {k.shape}", f"{q.ndim} dimensions, as q has {q.shape}")
    if v.shape[:-1] != k.shape[:-1]:
        reject("v", f"shape {v.shape}", f"the shape of k {k.shape}, but for the last dimension")
    heads, key_heads = q.shape[-3:-2], k.shape[-3:-2]
    if heads != key_heads:
        given = f"{key_heads[0]} heads for {heads[0]} query heads"
        if not enable_gqa:
            reject("k", given, f"{heads[0]} heads", "pass enable_gqa=True if heads share keys")
        if key_heads[0] == 0 or heads[0] % key_heads[0]:
            reject("k", given, "a number of heads that divides the query's")
    if not _broadcasts(k.shape[:-3], q.shape[:-3]):
        reject("k", f"batch {k.shape[:-3]}", f"a batch that broadcasts to the query's {q.shape[:-3]}")


def as_mask(mask: object, is_causal: bool, logits: tuple[int, ...]) -> jax.Array | None:
    """The mask as an array, checked against the shape of the logits `[..., H, Lq, Lk]`."""
    if mask is None:
        return None
    if is_causal:
        reject(
            "attn_mask",
            "a mask together with is_causal=True",
            "one of the two",
            "put the causal limit into the mask",
        )
    given = as_array("attn_mask", mask)
    if given.dtype != jnp.bool and not jnp.issubdtype(given.dtype, jnp.floating):
        reject_type("attn_mask", f"dtype {given.dtype}", "bool (True = visible) or a floating dtype (added)")
    if not _broadcasts(given.shape, logits):
        reject("attn_mask", f"shape {given.shape}", f"a shape that broadcasts to {logits}, [..., H, Lq, Lk]")
    return given


def check_scale(scale: Any, width: int) -> float:
    """The factor of the logits, 1/√head size unless told otherwise."""
    if scale is None:
        return 1.0 / math.sqrt(width)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        reject_type("scale", type(scale).__name__, "a number or None (1/√head size)")
    if not math.isfinite(scale):
        reject("scale", scale, "a finite number or None (1/√head size)")
    return float(scale)


def rows_per_block(block: int | None, logits: tuple[int, ...]) -> int:
    """How many query rows are worked on at a time: `block`, or as many as keep their logits in a few dozen MiB."""
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
