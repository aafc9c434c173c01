"""Entropy and sharpened softmax of logits that are already there."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import sharpmax.jax.trees  # noqa: F401  (RowStats leaves jit below)
from sharpmax.attention.dense import rows_of, sharpen
from sharpmax.jax.layout import as_array
from sharpmax.policies import Policy, resolve_policy
from sharpmax.rows.dense import dense_stats
from sharpmax.rows.stats import RowStats

__all__ = ["entropy", "softmax"]


def entropy(logits: ArrayLike, *, axis: int = -1, mask: ArrayLike | None = None) -> jax.Array:
    """Shannon entropy, in nats, of softmax(logits) along `axis`: logits `[..., n]` give `[...]` in float32 or better.

    Logits of −inf (or `finfo.min`) and positions where the boolean `mask` is False are not part of their row; a
    row without any has entropy 0.

    >>> import jax.numpy as jnp
    >>> entropy(jnp.array([0.0, 0.0, -jnp.inf]))
    Array(0.6931472, dtype=float32)
    """
    found: jax.Array = _entropy(as_array("logits", logits), _mask(mask), axis=axis)
    return found


def softmax(
    logits: ArrayLike, *, policy: Policy | str | None = "paper", axis: int = -1, mask: ArrayLike | None = None
) -> jax.Array:
    """softmax(β·logits) along `axis`, with β from `policy` and the row's own statistics; logits `[..., n]` keep shape.

    Masked positions get weight 0, and so does all of a row that is masked throughout. `policy=None` is the plain
    softmax. Gradients flow through β, first and second derivatives alike.

    >>> import jax.numpy as jnp
    >>> logits = jnp.array([2.0, 1.0, 0.0, 0.0])
    >>> softmax(logits, policy=None).max() < softmax(logits, policy="paper").max()
    Array(True, dtype=bool)
    """
    chosen = resolve_policy(policy)
    weights: jax.Array
    weights, stats = _softmax(as_array("logits", logits), _mask(mask), axis=axis, policy=chosen)
    if stats is not None:
        chosen.warn_outside(stats)  # while compiling nothing has a value yet, so nothing was said there
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
