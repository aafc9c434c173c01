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


class Case(NamedTuple):
    q: tuple[int, ...] = (2, 4, 21, 8)
    k: tuple[int, ...] = (2, 2, 29, 8)
    policy: Any = "paper"
    mask: str | None = None
    is_causal: bool = False
    scale: float | None = None
    block: int | None = 8


MIXED = sj.PerHead(((sj.Constant(2.0), sj.PAPER, sj.LogLength(4.0), sj.Curve((0.0, 5.0), (1.0, 3.0))),))
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


def numbers(*shape: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype=np.float32)


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
    added = numbers(*shape, seed=7)
    added[~visible] = -np.inf
    if per_row:
        added[1:][~visible[1:]] = np.finfo(np.float32).min
    return added


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_statistics_equal_torch(name, agree):
    case = CASES[name]
    q, k = numbers(*case.q, seed=0), numbers(*case.k, seed=1, scale=1.8)
    v, weigh = numbers(*case.k[:-1], 5, seed=2), numbers(*case.q[:-1], 5, seed=3)
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


def test_transformations_change_nothing(agree):
    q, k, v = (jnp.asarray(numbers(3, 2, 9, 4, seed=i, scale=1.5)) for i in range(3))

    def function(q, k, v):
        return sj.attention(q, k, v, is_causal=True, block=4, return_stats=True, policy="paper")

    def loss(q, k, v):
        out, stats = function(q, k, v)
        return (out**2).sum() + stats.entropy.sum()

    plain, stats = function(q, k, v)
    for transformed in (jax.jit(function), jax.vmap(function)):
        out, found = transformed(q, k, v)
        agree(out, plain, rtol=1e-6)
        jax.tree.map(lambda a, b: agree(a, b, rtol=1e-6), found, stats)
    slopes = jax.grad(jax.jit(loss), (0, 1, 2))(q, k, v)
    batched = jax.jit(jax.grad(lambda *x: jax.vmap(loss)(*x).sum(), (0, 1, 2)))(q, k, v)
    for slope, same in zip(slopes, batched, strict=True):
        assert np.abs(np.asarray(slope)).max() > 1e-2
        agree(same, slope)


def test_statistics_are_a_tree():
    q, k = numbers(1, 3, 4, seed=0), numbers(1, 6, 4, seed=1)
    _, stats = sj.attention(q, k, k, policy=None, return_stats=True)
    leaves, shape = jax.tree.flatten(stats)
    assert len(leaves) == 7
    again = jax.tree.unflatten(shape, leaves)
    assert isinstance(again, sj.RowStats)
    np.testing.assert_array_equal(np.asarray(again.entropy), np.asarray(stats.entropy))
    counted = sj.RowStats.anchored(jnp.arange(3))
    assert jax.jit(lambda s: s)(counted).measured == ("count",)


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


def test_the_measure_sees_a_full_matrix():
    def full(q, k, v):
        return (jax.jit(jax.checkpoint(lambda q, k: jax.nn.softmax(q @ k.mT)))(q, k) @ v).sum()

    assert max(sizes(jax.make_jaxpr(full)(*arrays(512)).jaxpr)) >= 512 * 512


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


POLICIES: dict[str, Any] = {
    "paper": "paper",
    "target": sj.EntropyTarget(0.6),
    "log-linear": LogLinear(level=-1.0, entropy=0.3, top=1.5, top2=-0.3, var=0.4, top_length=0.1, reference=2.0),
    "curve": sj.Curve((0.0, 1.0, 2.0, 6.0), (0.8, 1.2, 1.9, 2.5)),
}

STEP = 1e-4


def check(function: Any, point: Any) -> tuple[Any, Any, Any]:
    """Compare derivatives along a random direction, forwards and backwards; value, its weights and gradient there."""
    generator = np.random.default_rng(5)
    direction = tuple(jnp.asarray(generator.normal(size=x.shape)) for x in point)
    weigh = jnp.asarray(generator.normal(size=jax.eval_shape(function, *point).shape))

    @jax.jit
    def derivatives(*point: Any) -> Any:
        value, forwards = jax.jvp(function, point, direction)
        _, pull = jax.vjp(function, *point)
        return value, jnp.sum(weigh * value), jnp.sum(weigh * forwards), pull(weigh)

    def along(steps: int) -> float:
        return float(derivatives(*(x + steps * STEP * d for x, d in zip(point, direction, strict=True)))[1])

    # Four points: what they leave out is of the fourth order in the step, and rounding stays under 1e-11.
    numerical = (8 * (along(1) - along(-1)) - (along(2) - along(-2))) / (12 * STEP)
    value, _, forwards, gradient = derivatives(*point)
    backwards = sum(float(np.vdot(g, d)) for g, d in zip(gradient, direction, strict=True))
    assert float(forwards) == pytest.approx(numerical, rel=1e-8, abs=1e-9)
    assert backwards == pytest.approx(numerical, rel=1e-8, abs=1e-9)
    return value, weigh, gradient


@pytest.mark.parametrize("name", POLICIES)
def test_softmax(name):
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(3).normal(size=(2, 9)))
        weights, weigh, (through,) = check(lambda x: sj.softmax(x, policy=POLICIES[name]), (logits,))

        @jax.jit
        def beta_held_fixed(logits, log):
            beta = ((log[:, 0] - log[:, 1]) / (logits[:, 0] - logits[:, 1]))[:, None]
            return jax.grad(lambda x: jnp.sum(weigh * jax.nn.softmax(x * beta)))(logits)

        # It is another gradient, so the check does see β.
        other = beta_held_fixed(logits, np.log(weights))
        assert np.abs(np.asarray(other) - np.asarray(through)).max(-1).min() > 1e-3


def test_second_derivatives_of_softmax():
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(8).normal(size=(2, 9)))
        check(jax.grad(lambda x: jnp.sum(sj.softmax(x, policy=POLICIES["target"]) ** 2)), (logits,))


def test_second_derivatives_of_attention_in_blocks():
    with jax.enable_x64(True):
        draw = np.random.default_rng(8).normal
        q, k, v = (jnp.asarray(draw(size=size)) for size in ((3, 3), (7, 3), (7, 2)))
        check(jax.grad(lambda q: jnp.sum(sj.attention(q, k, v, policy="paper", block=2) ** 2)), (q,))


def test_attention():
    """To queries, keys, values and an added mask, over several blocks."""
    with jax.enable_x64(True):
        draw = np.random.default_rng(4).normal
        q, k, v, bias = draw(size=(2, 3, 4)), draw(size=(1, 7, 4)), draw(size=(1, 7, 2)), draw(size=(3, 7))
        visible = np.ones((3, 7), bool)
        visible[1, 2] = False

        def function(q, k, v, bias):
            return sj.attention(
                q, k, v, attn_mask=jnp.where(visible, bias, -jnp.inf), enable_gqa=True, block=2, policy="paper"
            )

        *_, gradient = check(function, tuple(jnp.asarray(x) for x in (q, k, v, bias)))
        slope = np.asarray(gradient[3])
        assert slope[1, 2] == 0.0
        assert slope[visible].all()
