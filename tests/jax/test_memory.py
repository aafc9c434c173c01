"""Attention never holds a matrix of Lq · Lk numbers, forwards or backwards: read off the program, not measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sharpmax.jax as sj


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
