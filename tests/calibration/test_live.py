"""Coefficients at work: what they do is what a saved policy does, and they alone learn."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.calibration import trainer as live_module
from sharpmax.calibration.data import FOLDABLE, KINDS, policy_from
from sharpmax.calibration.trainer import Live, grid_of
from sharpmax.errors import ArgumentError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers import interface
from sharpmax.policies.constant import Constant
from sharpmax.policies.log_linear import LogLinear
from tests.calibration.small import same, snapshot
from tests.experiments.evaluate import tiny

IDS = torch.randint(0, 256, (2, 60), generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def live_with(kind: str, scale: float = 0.3, dtype: torch.dtype = torch.float32) -> Live:
    """Coefficients of every kind in every head, none of them 0."""
    live = Live(kind, tiny.LAYERS, tiny.HEADS, CPU)
    numbers = scale * torch.randn(live.coefficients.shape, generator=torch.Generator().manual_seed(2))
    live.coefficients = numbers.to(dtype).requires_grad_()
    return live


@pytest.mark.parametrize("kind", KINDS)
def test_acts_as_the_policy_that_is_saved_of_it(kind: str) -> None:
    model, live = tiny.model(), live_with(kind)
    plain = model(input_ids=IDS).logits
    with live.at_work(model):
        learned = model(input_ids=IDS).logits
    with hf.applied(model, policy_from(kind, live.values())):
        applied = model(input_ids=IDS).logits
    assert (applied - plain).abs().max() > 0.1
    # Coefficients are rounded to five digits when they become a policy.
    torch.testing.assert_close(learned, applied, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_into_the_coefficients_alone(kind: str) -> None:
    model, live = tiny.model(), live_with(kind)
    before = snapshot(model)
    with live.at_work(model):
        model(input_ids=IDS, labels=IDS).loss.backward()
    gradient = live.coefficients.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    names = [i for i, name in enumerate(KINDS[kind]) if name != "length"]
    assert (gradient[..., names] != 0).all()
    assert same(before, snapshot(model))
    assert before["gradients"] == [None] * len(before["gradients"])


def test_the_gradient_of_a_level_is_that_of_finite_differences() -> None:
    model, live = tiny.model().double(), live_with("constant", dtype=torch.float64)
    for norm in model.modules():
        if hasattr(norm, "variance_epsilon"):  # in float32 whatever the rest is
            shape, eps = norm.weight.shape, norm.variance_epsilon
            norm.forward = partial(F.rms_norm, normalized_shape=shape, weight=norm.weight, eps=eps)
    step = 1e-5

    def loss() -> Tensor:
        with live.at_work(model):
            logits: Tensor = model(input_ids=IDS).logits
        assert logits.dtype == torch.float64
        return -logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).mean()

    loss().backward()
    gradient = live.coefficients.grad
    assert gradient is not None
    assert gradient.abs().max() > 3e-3
    for layer in range(tiny.LAYERS):
        for head in range(tiny.HEADS):
            sides = []
            for move in (step, -2 * step):
                with torch.no_grad():
                    live.coefficients[layer, head, 0] += move
                sides.append(float(loss().detach()))
            with torch.no_grad():
                live.coefficients[layer, head, 0] += step
            slope = (sides[0] - sides[1]) / (2 * step)
            assert float(gradient[layer, head, 0]) == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_a_head_that_is_not_touched_neither_acts_nor_learns() -> None:
    model, live = tiny.model(), live_with("rows")
    live.touched[0, 1] = live.touched[1] = False
    assert (live.values()[1] == 0).all()
    assert (live.values()[0, 1] == 0).all()
    with live.at_work(model):
        model(input_ids=IDS, labels=IDS).loss.backward()
    gradient = live.coefficients.grad
    assert gradient is not None
    assert (gradient[1] == 0).all()
    assert (gradient[0, 1] == 0).all()
    assert (gradient[0, [0, 2, 3], 0] != 0).all()


def test_coefficients_of_0_change_nothing() -> None:
    model = tiny.model()
    plain = model(input_ids=IDS).logits
    for kind in KINDS:
        with Live(kind, tiny.LAYERS, tiny.HEADS, CPU).at_work(model):
            torch.testing.assert_close(model(input_ids=IDS).logits, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", [None, Constant(2.0)])
def test_the_model_is_as_before_also_after_an_exception(policy: Any) -> None:
    model = tiny.model()
    if policy is not None:
        hf.apply(model, policy)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt), live_with("rows").at_work(model):
        raise KeyboardInterrupt
    assert same(before, snapshot(model))
    assert hf.policy_of(model) == policy


def test_layers_and_heads() -> None:
    assert grid_of(tiny.model()) == (tiny.LAYERS, tiny.HEADS)


def test_layers_of_different_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grid of policies could be applied to such a model in the end."""
    first, second = interface.modules_of(model := tiny.model())
    monkeypatch.setattr(live_module, "modules_of", lambda model: [first, dataclasses.replace(second, heads=6)])
    with pytest.raises(ArgumentError, match=r"model: got layers of \[4, 6\] heads; allowed: a model with as many"):
        grid_of(model)


class TestPolicyFrom:
    def test_is_rounded_to_what_a_file_holds(self) -> None:
        values = torch.tensor([[[0.123456789, 0.5], [-7.0, 0.0]]])
        policy = policy_from("length", values)
        assert policy.policies == ((LogLinear(level=0.12346, length=0.5), LogLinear(level=-7.0)),)

    def test_constants_are_constants_within_the_bounds(self) -> None:
        values = torch.tensor([[[0.0], [0.5], [9.0], [-9.0]]])
        policy = policy_from(FOLDABLE, values, strength=2.0)
        assert policy.policies == ((Constant(1.0), Constant(2.71828), Constant(12.0), Constant(0.2)),)
        assert all(not one.needs for one in policy.policies[0])

    @pytest.mark.parametrize("strength", [0.25, 1.3])
    def test_strength_multiplies_ln_beta(self, strength: float) -> None:
        values = torch.randn(2, 3, len(KINDS["rows"]))
        for layer, heads in enumerate(policy_from("rows", values, strength).policies):
            for head, one in enumerate(heads):
                want = LogLinear(*values[layer, head].tolist()).strengthened(strength)
                got = [getattr(one, name) for name in KINDS["rows"]]
                assert got == pytest.approx([getattr(want, name) for name in KINDS["rows"]], abs=5.1e-6)
