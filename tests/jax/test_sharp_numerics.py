"""Inputs that break naive attention: nothing visible, NaN, huge logits, half precision, no rows at all, nonsense."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sharpmax as sm
import sharpmax.jax as sj
from sharpmax.errors import OutOfRangeWarning

ROWS, KEYS, BAD = 7, 9, 4

# Compiled as a whole: what is done with a result outside would be compiled operation by operation.
attention = jax.jit(sj.attention, static_argnames=("is_causal", "enable_gqa", "policy", "return_stats", "block"))


def numbers(*shape: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype=np.float32)


@jax.jit
def compiled(q, k, v, mask, weigh):
    def function(q, k, v):
        return sj.attention(q, k, v, attn_mask=mask, enable_gqa=True, return_stats=True, block=4, policy="paper")

    out, pull, stats = jax.vjp(function, q, k, v, has_aux=True)
    return out, pull(weigh), stats


def attend(*arguments: np.ndarray) -> tuple[jax.Array, tuple[jax.Array, ...], sj.RowStats]:
    """Result, gradients and statistics, in two blocks; waited for, as JAX reads numpy's memory when it gets to it."""
    return jax.block_until_ready(compiled(*arguments))  # type: ignore[no-any-return]


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = numbers(2, ROWS, 4, seed=0), numbers(1, KEYS, 4, seed=1, scale=1.5), numbers(1, KEYS, 3, seed=2)
    return q, k, v, np.ones((2, ROWS, KEYS), bool), numbers(2, ROWS, 3, seed=3)


@pytest.mark.parametrize(("which", "value"), [("k", np.nan), ("v", np.inf)])
def test_a_hidden_key_has_no_effect(which, value):
    q, k, v, mask, weigh = problem()
    mask[:, :, BAD] = False
    desired = attend(q, k, v, mask, weigh)
    {"k": k, "v": v}[which][0, BAD, 1] = value
    actual = attend(q, k, v, mask, weigh)
    jax.tree.map(np.testing.assert_array_equal, actual, desired)
    assert all(np.isfinite(slope).all() for slope in actual[1])


@pytest.mark.parametrize("which", ["k", "v"])
def test_only_rows_that_see_a_broken_key_are_broken(which):
    q, k, v, mask, weigh = problem()
    mask[:, 3:, BAD] = False
    weigh[:, :3] = 0.0  # a loss that leaves the broken rows out must be able to train
    clean, clean_slopes, clean_stats = attend(q, k, v, mask, weigh)
    {"k": k, "v": v}[which][0, BAD, 1] = np.nan
    out, slopes, stats = attend(q, k, v, mask, weigh)
    desired = np.array(clean)
    desired[:, :3] = np.nan
    np.testing.assert_array_equal(np.asarray(out), desired)
    jax.tree.map(np.testing.assert_array_equal, slopes, clean_slopes)
    entropy = np.array(clean_stats.entropy)
    if which == "k":  # the values are no part of the logits
        entropy[:, :3] = np.nan
    np.testing.assert_array_equal(np.asarray(stats.entropy), entropy)
    np.testing.assert_array_equal(np.asarray(stats.count), np.asarray(clean_stats.count))
    given = [torch.tensor(x) for x in (q, k, v)]
    same = sm.attention(given[0], given[1], given[2], attn_mask=torch.tensor(mask), enable_gqa=True, policy="paper")
    np.testing.assert_array_equal(np.isnan(np.asarray(out)), np.isnan(same.numpy()))


def test_a_broken_query_breaks_its_row_only():
    q, k, v, mask, weigh = problem()
    weigh[0, 2] = 0.0
    clean, clean_slopes, _ = attend(q, k, v, mask, weigh)
    q[0, 2, 1] = np.inf
    out, slopes, stats = attend(q, k, v, mask, weigh)
    desired = np.array(clean)
    desired[0, 2] = np.nan
    np.testing.assert_array_equal(np.asarray(out), desired)
    jax.tree.map(np.testing.assert_array_equal, slopes, clean_slopes)
    assert np.argwhere(np.isnan(np.asarray(stats.lse))).tolist() == [[0, 2]]


def test_a_row_without_keys_is_zero():
    """Even when everything in it is NaN: so padding may hold anything."""
    q, k, v, mask, weigh = problem()
    mask[0, 2] = mask[1, ROWS - 1] = False
    clean = attend(q, k, v, mask, weigh)
    q[0, 2] = np.nan
    out, slopes, stats = attend(q, k, v, mask, weigh)
    jax.tree.map(np.testing.assert_array_equal, (out, slopes, stats), clean)
    for row in ((0, 2), (1, ROWS - 1)):
        assert not np.asarray(out)[row].any()
        assert not np.asarray(slopes[0])[row].any()
        assert float(stats.entropy[row]) == 0.0
        assert int(stats.count[row]) == 0
    assert all(np.isfinite(slope).all() for slope in slopes)


def test_products_out_of_range():
    """−inf is a key without weight and +inf a row without meaning, as in PyTorch's own function."""
    q, k, v, mask, weigh = problem()
    q[0, 1] = k[0, BAD] = [3e30, 0.0, 0.0, 0.0]
    q[1, 1] = [-3e30, 0.0, 0.0, 0.0]
    k[0, :, 0] *= np.where(np.arange(KEYS) == BAD, 1.0, 1e-30)
    weigh[0, 1] = 0.0
    out, slopes, _ = attend(q, k, v, mask, weigh)
    broken = np.isnan(np.asarray(out)).any(-1)
    assert np.argwhere(broken).tolist() == [[0, 1]]
    assert np.isfinite(np.asarray(slopes[1])).all()
    assert np.isfinite(np.asarray(slopes[2])).all()
    mask[1, 1, BAD] = False
    np.testing.assert_allclose(np.asarray(out)[1, 1], np.asarray(attend(q, k, v, mask, weigh)[0])[1, 1], rtol=1e-6)


def test_a_mask_that_is_not_a_number():
    q, k, v, _, weigh = problem()
    added = np.zeros((ROWS, KEYS), np.float32)
    clean = np.array(attend(q, k, v, added, weigh)[0])
    added[3, 2] = np.nan
    out = np.asarray(attend(q, k, v, added, weigh)[0])
    clean[:, 3] = np.nan
    np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize(("dtype", "width"), [(jnp.bfloat16, 59), (jnp.float32, 8)])
def test_low_precision_and_large_logits(dtype, width):
    """Computed in float32, so only the result is rounded; float64 torch on the same inputs is the truth."""
    q, k, v = (jnp.asarray(numbers(2, 33, width, seed=i), dtype) for i in range(3))
    eps = float(jnp.finfo(dtype).eps)
    # Logits of ±1000 carry an error of some 1000 · 2⁻²⁴ · √width in float32, and the weights as much relative to them.
    for scale, error in ((None, 2e-6), (60.0, 1e-3)):
        out = sj.attention(q, k, v, is_causal=True, scale=scale, block=16, policy="paper")
        assert out.dtype == dtype
        given = [torch.tensor(np.asarray(x, np.float64)) for x in (q, k, v)]
        desired = sm.attention(given[0], given[1], given[2], is_causal=True, scale=scale, policy="paper").numpy()
        np.testing.assert_allclose(np.asarray(out, np.float64), desired, rtol=eps, atol=error)


@jax.jit
def measured(q, k, v):
    out, stats = sj.attention(q, k, v, enable_gqa=True, return_stats=True, policy="paper")
    return out, stats.entropy, stats.lse


def test_one_key_and_no_keys_and_no_rows():
    q, k, v, _, _ = problem()
    one, entropy, _ = measured(q, k[:, :1], v[:, :1])
    np.testing.assert_array_equal(np.asarray(one), np.broadcast_to(v[:, :1], one.shape))
    np.testing.assert_array_equal(np.asarray(entropy), 0.0)
    none, entropy, lse = measured(q, k[:, :0], v[:, :0])
    np.testing.assert_array_equal(np.asarray(none), np.zeros((2, ROWS, 3), np.float32))
    np.testing.assert_array_equal(np.asarray(entropy), 0.0)
    np.testing.assert_array_equal(np.asarray(lse), -np.inf)
    assert measured(q[None][:0, :, :0], k[None][:0], v[None][:0])[0].shape == (0, 2, 0, 3)


def test_rows_outside_the_fitted_range_are_reported():
    """Though inside the loop over blocks no policy can see a value; not while tracing, where there is none at all."""
    q, k, v, _, _ = problem()
    policy = sj.Curve((0.0, 0.125), (1.0, 1.03125))  # met nowhere else: a policy speaks once

    def function(q):
        return sj.attention(q, k, v, enable_gqa=True, policy=policy, block=4)

    jax.eval_shape(function, q)
    with pytest.warns(OutOfRangeWarning, match=r"rows have entropy outside 0 … 0.125"):
        function(q)
