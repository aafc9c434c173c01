"""Entropy and softmax of JAX arrays: the paper's function, the torch functions, and inputs that break naive code."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sharpmax as sm
import sharpmax.jax as sj
from tests.jax.numbers import agree, normal

POLICIES = {
    "none": None,
    "paper": "paper",
    "target": sj.EntropyTarget(1.0),
    "per-head": sj.PerHead.of(sj.LogLength, reference=[[2.0, 4.0, 8.0]]),
}


# Compiled as a whole: what is done with a result outside would be compiled operation by operation.
softmax = jax.jit(sj.softmax, static_argnames=("policy", "axis"))


numbers = partial(normal, seed=0, scale=1.5)


def paper_softmax(logits: jax.Array) -> jax.Array:
    """The function as the paper prints it."""
    p = jax.nn.softmax(logits)
    entropy = jnp.sum(-p * jnp.log(p + 1e-9), axis=-1, keepdims=True)
    polynomial = jnp.polyval(jnp.array([-0.037, 0.481, -2.3, 4.917, -1.791]), entropy)
    beta = jnp.where(entropy > 0.5, jnp.maximum(polynomial, 1.0), 1.0)
    return jax.nn.softmax(logits * beta)


def test_paper_function_is_one_line():
    logits = jnp.asarray(numbers(40, 64) * np.linspace(0.0, 4.0, 40, dtype=np.float32)[:, None])
    agree(softmax(logits, policy="paper"), jax.jit(paper_softmax)(logits))


@pytest.mark.parametrize("name", ["none", "paper", "target", "per-head"])
def test_softmax_and_gradient_equal_torch(name):
    """Ordinary rows, rows without keys and rows of one key; then with a row of NaN, which changes no other."""
    logits, weigh = numbers(2, 3, 11, 5), numbers(2, 3, 11, 5, seed=1)
    mask = np.random.default_rng(2).random((3, 11, 5)) < 0.7
    mask[0, :, 0] = mask[1, :, 0] = False
    mask[1, 3, 0] = True

    @jax.jit
    def everything(x):
        out, pull = jax.vjp(lambda x: sj.softmax(x, policy=POLICIES[name], axis=2, mask=mask), x)
        return out, *pull(jnp.asarray(weigh))

    given = torch.tensor(logits, requires_grad=True)
    desired = sm.softmax(given, policy=POLICIES[name], dim=2, mask=torch.tensor(mask))
    desired.backward(torch.tensor(weigh))
    actual, slope = (np.array(x) for x in everything(logits))
    agree(actual, desired.detach())
    agree(slope, given.grad)
    for nothing in (actual[:, 0, :, 0], slope[:, 0, :, 0], slope[:, 1, :, 0], slope[:, ~mask]):
        assert not nothing.any()
    np.testing.assert_array_equal(actual[:, 1, 3, 0], 1.0)
    logits[1, 2, mask[2, :, 3].argmax(), 3] = np.nan
    broken, broken_slope = everything(logits)
    assert np.isnan(np.asarray(broken)[1, 2, :, 3]).all()
    actual[1, 2, :, 3] = np.nan
    np.testing.assert_array_equal(np.asarray(broken), actual)
    assert np.isfinite(np.delete(np.asarray(broken_slope)[1, 2], 3, axis=-1)).all()


@pytest.mark.parametrize("axis", [-1, 0])
def test_entropy_and_gradient_equal_torch(axis):
    logits = numbers(7, 4, 9)
    logits[2, 1] = -np.inf
    logits[0, 0, :4] = np.finfo(np.float32).min
    given = torch.tensor(logits, requires_grad=True)
    desired = sm.entropy(given, dim=axis)
    desired.sum().backward()
    agree(sj.entropy(logits, axis=axis), desired.detach())
    agree(jax.jit(jax.grad(lambda x: sj.entropy(x, axis=axis).sum()))(logits), given.grad)


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 1023), (jnp.bfloat16, 1025)])
def test_large_logits_stay_within_the_contract(dtype, size):
    logits = jnp.asarray(np.random.default_rng(size).choice([-1000.0, 0.0, 3.0, 1000.0], size=(5, size)), dtype)
    for policy in (None, "paper", sj.Constant(1.7)):
        weights = softmax(logits, policy=policy)
        assert weights.dtype == dtype
        wide = np.asarray(weights, dtype=np.float64)
        assert (wide >= 0).all()
        np.testing.assert_allclose(wide.sum(-1), 1.0, atol=4 * float(jnp.finfo(dtype).eps) * math.sqrt(size))
    entropy = sj.entropy(logits)
    assert entropy.dtype == jnp.float32
    ties = (np.asarray(logits) == 1000.0).sum(-1)
    np.testing.assert_allclose(np.asarray(entropy), np.log(ties), rtol=1e-6, atol=1e-7)


def test_lengths_one_and_none():
    np.testing.assert_array_equal(np.asarray(softmax(numbers(3, 1, scale=100.0))), 1.0)
    assert softmax(np.zeros((0, 4), np.float32)).shape == (0, 4)
    assert softmax(np.zeros((4, 0), np.float32)).shape == (4, 0)
    np.testing.assert_array_equal(np.asarray(sj.entropy(numbers(3, 1))), 0.0)
    np.testing.assert_array_equal(np.asarray(sj.entropy(jnp.zeros((3, 0)))), 0.0)
    assert sj.entropy(jnp.zeros((0, 3))).shape == (0,)


def test_wide_numbers_switched_on_and_off():
    """The width of numbers is a setting of the moment, not of the first call."""
    narrow = softmax(numbers(4, 6), policy=sj.LogLength(2.0))
    with jax.enable_x64(True):
        logits = jnp.asarray(numbers(4, 6), jnp.float64)
        wide = softmax(logits, policy=sj.LogLength(2.0))
        desired = jax.nn.softmax(logits * (math.log(6) / math.log(2)))
        assert wide.dtype == jnp.float64
        np.testing.assert_allclose(np.asarray(wide), np.asarray(desired), rtol=1e-13)
    again = softmax(numbers(4, 6), policy=sj.LogLength(2.0))
    assert again.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(again), np.asarray(narrow))
