"""Gradients through the temperature against finite differences, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharpmax.jax as sj
from sharpmax.policies.log_linear import LogLinear

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
