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
from tests.jax.numbers import normal

ROWS, KEYS, BAD = 7, 9, 4


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
    q, k, v = normal(2, ROWS, 4, seed=0), normal(1, KEYS, 4, seed=1, scale=1.5), normal(1, KEYS, 3, seed=2)
    return q, k, v, np.ones((2, ROWS, KEYS), bool), normal(2, ROWS, 3, seed=3)


# What is set to what, the entries of the mask that hide keys beforehand, and the rows that see it.
EVERY, LATER, TWO = np.s_[:, :, BAD], np.s_[:, 3:, BAD], np.s_[0, 2]
BROKEN = {
    "a hidden key": ("k", np.s_[0, BAD, 1], np.nan, EVERY, None),
    "a hidden value": ("v", np.s_[0, BAD, 1], np.inf, EVERY, None),
    "a key of three rows": ("k", np.s_[0, BAD, 1], np.nan, LATER, np.s_[:, :3]),
    "a value of three rows": ("v", np.s_[0, BAD, 1], np.nan, LATER, np.s_[:, :3]),
    "a query": ("q", np.s_[0, 2, 1], np.inf, None, TWO),
    "a query without keys": ("q", TWO, np.nan, TWO, None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_only_rows_that_see_something_broken_are_broken(name):
    """And a loss that leaves them out can be trained; a row without keys is 0, so padding may hold anything."""
    which, place, value, hidden, rows = BROKEN[name]
    q, k, v, mask, weigh = problem()
    if hidden is not None:
        mask[hidden] = False
    if rows is not None:
        weigh[rows] = 0.0
    clean, clean_slopes, clean_stats = attend(q, k, v, mask, weigh)
    {"q": q, "k": k, "v": v}[which][place] = value
    out, slopes, stats = attend(q, k, v, mask, weigh)
    desired, entropy = np.array(clean), np.array(clean_stats.entropy)
    if rows is not None:
        desired[rows] = np.nan
        if which != "v":  # the values are no part of the logits
            entropy[rows] = np.nan
    np.testing.assert_array_equal(np.asarray(out), desired)
    np.testing.assert_array_equal(np.asarray(stats.entropy), entropy)
    np.testing.assert_array_equal(np.asarray(stats.count), mask.sum(-1))
    jax.tree.map(np.testing.assert_array_equal, slopes, clean_slopes)
    assert all(np.isfinite(slope).all() for slope in slopes)
    blind = ~mask.any(-1)
    for nothing in (np.asarray(out)[blind], np.asarray(slopes[0])[blind], np.asarray(stats.entropy)[blind]):
        assert not nothing.any()
    given = [torch.tensor(x) for x in (q, k, v)]
    same = sm.attention(given[0], given[1], given[2], attn_mask=torch.tensor(mask), enable_gqa=True, policy="paper")
    np.testing.assert_array_equal(np.isnan(np.asarray(out)), np.isnan(same.numpy()))


def test_products_out_of_range_and_masks_of_nan():
    """−inf is a key without weight and +inf a row without meaning, as in PyTorch's own function."""
    q, k, v, mask, weigh = problem()
    added = np.zeros((ROWS, KEYS), np.float32)
    clean = np.array(attend(q, k, v, added, weigh)[0])
    added[3, 2], clean[:, 3] = np.nan, np.nan
    np.testing.assert_array_equal(np.asarray(attend(q, k, v, added, weigh)[0]), clean)
    q[0, 1] = k[0, BAD] = [3e30, 0.0, 0.0, 0.0]
    q[1, 1] = [-3e30, 0.0, 0.0, 0.0]
    k[0, :, 0] *= np.where(np.arange(KEYS) == BAD, 1.0, 1e-30)
    weigh[0, 1] = 0.0
    out, slopes, _ = attend(q, k, v, mask, weigh)
    assert np.argwhere(np.isnan(np.asarray(out)).any(-1)).tolist() == [[0, 1]]
    assert np.isfinite(np.asarray(slopes[1])).all()
    mask[1, 1, BAD] = False
    np.testing.assert_allclose(np.asarray(out)[1, 1], np.asarray(attend(q, k, v, mask, weigh)[0])[1, 1], rtol=1e-6)


@pytest.mark.parametrize(("dtype", "width"), [(jnp.bfloat16, 59), (jnp.float32, 8)])
def test_low_precision_and_large_logits(dtype, width):
    """Computed in float32, so only the result is rounded; float64 torch on the same inputs is the truth."""
    q, k, v = (jnp.asarray(normal(2, 33, width, seed=i), dtype) for i in range(3))
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
