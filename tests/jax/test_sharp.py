"""Attention in JAX against attention in torch: values, gradients, transformations and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import sharpmax as sm
import sharpmax.jax as sj
from sharpmax.policies.log_linear import LogLinear
from sharpmax.stats.statistics import FIELDS
from tests.jax.numbers import agree, normal


class Case(NamedTuple):
    q: tuple[int, ...] = (2, 4, 21, 8)
    k: tuple[int, ...] = (2, 2, 29, 8)
    policy: Any = "paper"
    mask: str | None = None
    is_causal: bool = False
    scale: float | None = None
    block: int | None = 8


MIXED = sj.PerHead(((sj.Constant(2.0), sj.PAPER, sj.LogLength(4.0), sj.Curve((0.0, 5.0), (1.0, 3.0))),))
LINEAR = LogLinear(level=-1.0, entropy=0.3, top=1.5, top2=-0.3, var=0.4, top_length=0.1, reference=2.0)
CASES = {
    "plain": Case(policy=None, scale=0.7, mask="added per row"),
    "paper causal, more rows than keys": Case(q=(2, 4, 29, 8), k=(2, 2, 17, 8), is_causal=True),
    "paper, rows without keys": Case(mask="visible per head"),
    "paper, no heads": Case(q=(9, 8), k=(12, 8), block=None),
    "paper, one batch of keys": Case(q=(3, 1, 2, 9, 8), k=(1, 1, 2, 12, 8), mask="visible"),
    "entropy target": Case(policy=sj.EntropyTarget(1.3), mask="visible"),
    "curve": Case(policy=sj.Curve((0.0, 1.0, 2.0, 6.0), (0.8, 1.2, 1.9, 2.5)), mask="added", block=1),
    "per head, mixed": Case(policy=MIXED, is_causal=True),
}


def make_mask(kind: str | None, rows: tuple[int, ...], keys: int) -> np.ndarray | None:
    """Visibility of half the keys or more; per head there is also a row that sees nothing."""
    if kind is None:
        return None
    per_row = kind.endswith(("row", "head"))
    shape = {"row": (*rows[-1:], keys), "head": (*rows, keys)}.get(kind.split()[-1], (1, keys))
    visible = np.random.default_rng(6).random(shape) < 0.7
    visible[..., 0] = True
    if kind.endswith("head"):
        visible[..., 0, 5, :] = False
    if kind.startswith("visible"):
        return visible
    added = normal(*shape, seed=7)
    added[~visible] = -np.inf
    if per_row:
        added[1:][~visible[1:]] = np.finfo(np.float32).min
    return added


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_statistics_equal_torch(name):
    case = CASES[name]
    q, k = normal(*case.q, seed=0), normal(*case.k, seed=1, scale=1.8)
    v, weigh = normal(*case.k[:-1], 5, seed=2), normal(*case.q[:-1], 5, seed=3)
    mask = make_mask(case.mask, case.q[:-1], case.k[-2])
    options = {"is_causal": case.is_causal, "scale": case.scale, "policy": case.policy}
    options["enable_gqa"] = case.q[-3:-2] != case.k[-3:-2]
    added = mask is not None and mask.dtype == np.float32
    given = [q, k, v, *([mask] if added else [])]

    tensors: Any = [torch.tensor(x, requires_grad=True) for x in given]
    seen = tensors[3] if added else None if mask is None else torch.tensor(mask)
    desired, stats = sm.attention(tensors[0], tensors[1], tensors[2], attn_mask=seen, return_stats=True, **options)
    (desired * torch.tensor(weigh)).sum().backward()

    @jax.jit
    def everything(*given):
        def function(q, k, v, bias=mask):
            return sj.attention(q, k, v, attn_mask=bias, return_stats=True, block=case.block, **options)

        out, pull, stats = jax.vjp(function, *given, has_aux=True)
        return out, pull(jnp.asarray(weigh)), {field: getattr(stats, field) for field in (*FIELDS, "entropy")}

    actual, slopes, found = everything(*given)
    assert actual.dtype == jnp.float32
    agree(actual, desired.detach())
    for slope, tensor in zip(slopes, tensors, strict=True):
        agree(slope, tensor.grad)
        assert np.abs(np.asarray(slope)).max() > 1e-2
    for field, values in found.items():
        agree(values, getattr(stats, field).detach())


def test_transformations_change_nothing():
    q, k, v = (jnp.asarray(normal(3, 2, 9, 4, seed=i, scale=1.5)) for i in range(3))

    def function(q, k, v):
        return sj.attention(q, k, v, is_causal=True, block=4, return_stats=True, policy="paper")

    def loss(q, k, v):
        out, stats = function(q, k, v)
        return (out**2).sum() + stats.entropy.sum()

    plain, stats = function(q, k, v)
    out, found = jax.vmap(function)(q, k, v)
    agree(out, plain, rtol=1e-6)
    jax.tree.map(lambda a, b: agree(a, b, rtol=1e-6), found, stats)
    slopes = jax.grad(jax.jit(loss), (0, 1, 2))(q, k, v)
    batched = jax.jit(jax.grad(lambda *x: jax.vmap(loss)(*x).sum(), (0, 1, 2)))(q, k, v)
    for slope, same in zip(slopes, batched, strict=True):
        assert np.abs(np.asarray(slope)).max() > 1e-2
        agree(same, slope)


def sizes(program: Any) -> Iterator[int]:
    """The number of entries of every array in a program, inner programs included."""
    for equation in program.eqns:
        yield from (math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(inner):
                yield from sizes(getattr(inner, "jaxpr", inner))


def _is_program(x: object) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def arrays(length: int, heads: int = 1, width: int = 8) -> tuple[jax.ShapeDtypeStruct, ...]:
    return (jax.ShapeDtypeStruct((heads, length, width), jnp.float32),) * 3


def loss(block: int | None, **options: Any) -> Any:
    def total(q, k, v):
        out, stats = sj.attention(q, k, v, policy="paper", block=block, return_stats=True, **options)
        return (out**2).sum() + stats.entropy.sum()

    return total


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_array_is_larger_than_a_block_of_rows(is_causal):
    length, block = 4096, 32
    for function in (loss(block, is_causal=is_causal), jax.grad(loss(block, is_causal=is_causal), (0, 1, 2))):
        assert max(sizes(jax.make_jaxpr(function)(*arrays(length)).jaxpr)) == block * length


def test_the_block_chosen_for_long_inputs_is_small():
    length, heads = 1 << 16, 4
    found = max(sizes(jax.make_jaxpr(jax.grad(loss(None)))(*arrays(length, heads)).jaxpr))
    assert found <= 1 << 24
    assert found < heads * length * length / 1000


@pytest.mark.parametrize("policy", [LINEAR, sj.EntropyTarget(0.6)], ids=["log-linear", "target"])
def test_second_derivatives_of_softmax_equal_torch(policy):
    logits, weigh = np.random.default_rng(3).normal(size=(2, 2, 9))

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return (sm.softmax(x, policy=policy) * torch.tensor(weigh)).sum()

    desired = torch.autograd.functional.hessian(weighted, torch.tensor(logits))
    with jax.enable_x64(True):
        found = jax.hessian(lambda x: jnp.sum(sj.softmax(x, policy=policy) * weigh))(jnp.asarray(logits))
        np.testing.assert_allclose(np.asarray(found), desired.numpy(), rtol=1e-6, atol=1e-8)
