"""Gradients through the temperature against finite differences, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax.jax as sj

POLICIES = {
    "paper": "paper",
    "target": sj.EntropyTarget(0.6),
    "curve": sj.Curve((0.0, 1.0, 2.0, 6.0), (0.8, 1.2, 1.9, 2.5)),
}
STEP = 1e-4


def check(function: Any, point: Any, seed: int = 5) -> Any:
    """Compare derivatives along a random direction, forwards and backwards, and return the gradient."""
    generator = np.random.default_rng(seed)
    direction = jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape)), point)
    weigh = jnp.asarray(generator.normal(size=jax.eval_shape(function, *point).shape))

    @jax.jit
    def slopes(*point: Any) -> Any:
        _, forwards = jax.jvp(function, point, direction)
        _, pull = jax.vjp(function, *point)
        return jnp.sum(weigh * forwards), pull(weigh)

    value = jax.jit(function)
    # Four points, so that what is left is of the fourth order in the step and rounding stays far under 1e-8.
    above, below, further, lower = (
        float(jnp.sum(weigh * value(*jax.tree.map(lambda x, d, s=step: x + s * STEP * d, point, direction))))
        for step in (1, -1, 2, -2)
    )
    numerical = (8 * (above - below) - (further - lower)) / (12 * STEP)
    forwards, gradient = slopes(*point)
    backwards = sum(float(np.vdot(g, d)) for g, d in zip(gradient, direction, strict=True))
    assert float(forwards) == pytest.approx(numerical, rel=1e-8, abs=1e-9)
    assert backwards == pytest.approx(numerical, rel=1e-8, abs=1e-9)
    return gradient, weigh


@pytest.mark.parametrize("name", POLICIES)
def test_softmax(name):
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(3).normal(size=(2, 9)))
        (through,), weigh = check(lambda x: sj.softmax(x, policy=POLICIES[name]), (logits,))
        # With β held fixed the gradient is another one, so the check above does see β.
        log = jnp.log(sj.softmax(logits, policy=POLICIES[name]))
        fixed = ((log[:, 0] - log[:, 1]) / (logits[:, 0] - logits[:, 1]))[:, None]
        plain = jax.jit(jax.grad(lambda x: jnp.sum(weigh * jax.nn.softmax(x * fixed))))(logits)
        assert np.abs(np.asarray(plain) - np.asarray(through)).max(-1).min() > 1e-3


def test_attention():
    """To queries, keys, values and an added mask, over several blocks."""
    with jax.enable_x64(True):
        draw = np.random.default_rng(4).normal
        q, k, v, bias = draw(size=(2, 3, 4)), draw(size=(1, 7, 4)), draw(size=(1, 7, 2)), draw(size=(3, 7))
        live = np.ones((3, 7), bool)
        live[1, 2] = False

        def function(q, k, v, bias):
            return sj.attention(q, k, v, attn_mask=jnp.where(live, bias, -jnp.inf), enable_gqa=True, block=2)

        gradient, _ = check(function, tuple(jnp.asarray(x) for x in (q, k, v, bias)))
        slope = np.asarray(gradient[3])
        assert slope[1, 2] == 0.0
        assert slope[live].all()
