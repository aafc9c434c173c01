"""Training: coefficients in a running model, constraints, pruning, prices, resuming."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.calibration.budget import TrainingSetup
from sharpmax.calibration.data import TrainingPrompts
from sharpmax.calibration.learnable import KINDS, TrainablePolicy, policy_from
from sharpmax.calibration.trainer import Trainer, checkpointed, plan_memory
from sharpmax.errors import FileFormatError
from sharpmax.integrations import transformers as hf
from sharpmax.models.weights import load_tensors, save_tensors
from sharpmax.policies.basic import Constant
from sharpmax.policies.log_linear import LogLinear
from tests.calibration.small import same, snapshot, training_setup
from tests.experiments.evaluate import tiny

ABOUT = {"kind": "rows", "seed": 0, "profile": {"sizes": [4, 8], "rate": 0.1}}
IDS = torch.randint(0, 256, (2, 60), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def setup() -> TrainingSetup:
    return training_setup(tiny.model())


def trainer(kind: str = "rows", steps: int = 6, rate: float = 0.1, keep: float = 1.0) -> Trainer:
    return Trainer(TrainablePolicy(tiny.language().model, kind), steps, rate, keep)


def nothing(now: Trainer) -> None:
    """The callback that does nothing."""


def random_policy(kind: str, scale: float = 0.3, dtype: torch.dtype = torch.float32) -> TrainablePolicy:
    """Coefficients of a kind in every head, none of them 0."""
    policy = TrainablePolicy(tiny.language().model, kind)
    numbers = scale * torch.randn(policy.coefficients.shape, generator=torch.Generator().manual_seed(2))
    policy.coefficients = (policy.coefficients.detach() + numbers).to(dtype).requires_grad_()
    return policy


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_act_as_the_saved_policy_and_get_the_only_gradient(kind: str) -> None:
    model, policy = tiny.model(), random_policy(kind)
    before, plain = snapshot(model), model(input_ids=IDS).logits
    with policy.installed(model):
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
    assert same(before, snapshot(model))
    with hf.applied(model, policy_from(kind, policy.values())):
        applied = model(input_ids=IDS).logits
    assert (applied - plain).abs().max() > 0.1
    # Coefficients are rounded to five digits when they become a policy.
    torch.testing.assert_close(out.logits, applied, rtol=0, atol=2e-3)
    gradient = policy.coefficients.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    names = KINDS[kind] or ("level",) * policy.coefficients.shape[-1]
    assert (gradient[..., [i for i, name in enumerate(names) if name != "length"]] != 0).all()
    with TrainablePolicy(model, kind).installed(model):
        torch.testing.assert_close(model(input_ids=IDS).logits, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["constant", "ssmax"])
def test_the_gradient_equals_finite_differences(kind: str) -> None:
    model, policy = tiny.model().double(), random_policy(kind, dtype=torch.float64)
    for norm in model.modules():
        if hasattr(norm, "variance_epsilon"):  # float32 whatever the rest is
            shape, eps = norm.weight.shape, norm.variance_epsilon
            norm.forward = partial(F.rms_norm, normalized_shape=shape, weight=norm.weight, eps=eps)
    step = 1e-5

    def loss() -> Tensor:
        with policy.installed(model):
            logits: Tensor = model(input_ids=IDS).logits
        assert logits.dtype == torch.float64
        return -logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None]).mean()

    loss().backward()
    gradient = policy.coefficients.grad
    assert gradient is not None
    assert gradient.abs().max() > 3e-3
    for layer, head in ((0, 0), (0, 3), (1, 2)):
        sides = []
        with torch.no_grad():
            for move in (step, -2 * step):
                policy.coefficients[layer, head, 0] += move
                sides.append(float(loss()))
            policy.coefficients[layer, head, 0] += step
        slope = (sides[0] - sides[1]) / (2 * step)
        assert float(gradient[layer, head, 0]) == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_a_head_that_is_not_modified_neither_acts_nor_learns() -> None:
    model, policy = tiny.model(), random_policy("rows")
    policy.modified[0, 1] = policy.modified[1] = False
    with policy.installed(model):
        model(input_ids=IDS, labels=IDS).loss.backward()
    gradient = policy.coefficients.grad
    assert gradient is not None
    for tensor in (policy.values(), gradient):
        assert (tensor[1] == 0).all()
        assert (tensor[0, 1] == 0).all()
    assert (gradient[0, [0, 2, 3], 0] != 0).all()


def test_a_policy_is_rounded_bounded_and_scaled() -> None:
    values = torch.tensor([[[0.123456789, 0.5], [-7.0, 0.0]]])
    assert policy_from("length", values).policies == ((LogLinear(level=0.12346, length=0.5), LogLinear(level=-7.0)),)
    policy = policy_from("constant", torch.tensor([[[0.0], [0.5], [9.0], [-9.0]]]), strength=2.0)
    assert policy.policies == ((Constant(1.0), Constant(2.71828), Constant(12.0), Constant(0.2)),)
    values = torch.randn(1, 1, len(KINDS["rows"]))
    one: Any = policy_from("rows", values, 1.3).policies[0][0]
    want = LogLinear(*values[0, 0].tolist()).strengthened(1.3)
    for name in KINDS["rows"]:
        assert getattr(one, name) == pytest.approx(getattr(want, name), abs=5.1e-6)


def test_training_lowers_the_loss(setup: TrainingSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts at every step, and nothing else."""
    same_prompts = setup.prompts.at(0)
    monkeypatch.setattr(TrainingPrompts, "at", lambda self, step: same_prompts)
    one = trainer(steps=20)
    one.run(dataclasses.replace(setup, domains=[]), nothing)
    assert one.curve[-1]["nll"] < one.curve[0]["nll"] - 0.1


def test_gradients_are_the_same_in_small_batches_and_with_layers_computed_again() -> None:
    model, found = tiny.model(), []
    setup = training_setup(model, replications=(1, 2))
    for most_tokens, again in ((5000, nullcontext()), (70, nullcontext()), (70, checkpointed(model))):
        one = trainer(steps=1)
        with again:
            one.run(dataclasses.replace(setup, most_tokens=most_tokens), nothing)
        assert one.policy.coefficients.grad is not None
        found.append(one.policy.coefficients.grad)
    scale = found[0].abs().max()
    assert all((other - found[0]).abs().max() <= 1e-3 * scale for other in found[1:])
    assert not any(module.training for module in model.modules())


def test_the_coefficient_of_length_stays_at_0_or_above(setup: TrainingSetup) -> None:
    one = trainer("rows", steps=8, rate=0.3)
    steps: list[Tensor] = []
    one.run(setup, lambda now: steps.append(now.policy.coefficients.detach().clone()))
    lengths = torch.stack(steps)[..., KINDS["rows"].index("length")]
    assert (lengths >= 0).all()
    # Some are held at 0, some rise, and other coefficients may fall.
    assert (lengths[-1] == 0).any()
    assert (lengths[-1] > 0).any()
    assert (torch.stack(steps)[..., 0] < 0).any()


@pytest.mark.parametrize(
    ("steps", "keep", "keep_layers", "heads"),
    [(1, 0.25, 1.0, [2]), (4, 0.01, 1.0, [1]), (5, 0.25, 1.0, [2]), (3, 1.0, 0.5, [0, 4]), (3, 0.25, 0.5, [0, 2])],
)
def test_pruning_keeps_the_share_of_heads_and_layers(
    steps: int, keep: float, keep_layers: float, heads: list[int], setup: TrainingSetup
) -> None:
    one = trainer("length", steps=steps, keep=keep)
    one.keep_layers = keep_layers
    pruned = [torch.zeros_like(one.policy.modified)]

    def after(now: Trainer) -> None:
        assert torch.equal(now.policy.modified, (now.policy.values() != 0).any(-1))
        pruned.append(~now.policy.modified)

    one.run(setup, after)
    modified = one.policy.modified
    assert (sorted(modified.sum(-1).tolist()) if keep_layers < 1.0 else [int(modified.sum())]) == heads
    assert all((later | ~earlier).all() for earlier, later in pairwise(pruned))  # a pruned head stays pruned


def test_heads_without_effect_are_pruned_first() -> None:
    model = tiny.model()
    size = model.config.head_dim
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[:, size : 3 * size] = 0.0
    one = trainer("constant", keep=0.75)
    one.run(training_setup(model), nothing)
    assert one.policy.modified.tolist() == [[True] * 4, [True, False, False, True]]


def test_prices_follow_the_budget_and_lower_the_divergence(setup: TrainingSetup) -> None:
    """Divergence is far above the budget, or below it."""
    # Chat is read at every step, the five texts take turns two at a time.
    names = [domain.name for domain in setup.domains if domain.trained and domain.name != "chat"]
    ends = []
    for budget, sign, near, bound in ((1e-12, 1, 2999.0, 3000.0), (50.0, -1, 1.01, 1.0)):
        one, bounded = trainer("constant", steps=5), trainer("constant", steps=5)
        bounded.prices.update(dict.fromkeys([*names, "chat"], near))
        for now in (one, bounded):
            now.policy.coefficients.data.fill_(0.2)
            now.run(dataclasses.replace(setup, budget=budget), nothing)
        twice, always = 50 * math.exp(sign * 0.2), 50 * math.exp(sign * 0.5)
        assert one.prices == pytest.approx(dict.fromkeys(names, twice) | {"chat": always}, rel=1e-3)
        assert set(bounded.prices.values()) == {bound}
        ends.append(sum(bounded.divergences.values()))
    assert ends[0] < 0.9 * ends[1]


def test_memory_decides_how_much_is_read_at_once() -> None:
    model = tiny.model()
    limit = int(1.25 * (sum(weight.nbytes for weight in model.parameters()) + 24 * 1024 * 257 + 455_000))
    (many, again, _), (few, computed_again, estimate) = (plan_memory(model, 100, most) for most in (8 << 30, limit))
    assert (again, computed_again) == (False, True)
    assert many == 16_384 > few >= 100
    assert estimate <= limit
    assert plan_memory(model, 100, None) == plan_memory(model, 100, 8 << 30)


def test_a_damaged_state_is_one_line(setup: TrainingSetup, tmp_path: Path) -> None:
    path, one = tmp_path / "state", trainer(steps=1)
    one.run(setup, nothing)
    one.save(path, ABOUT)
    assert trainer().resume(path, ABOUT)
    assert not trainer().resume(tmp_path / "none", ABOUT)
    tensors, about = load_tensors(path, "calibration")
    for damaged in (
        (tensors, ABOUT),
        ({"coefficients": tensors["coefficients"]}, about),
        (tensors, about | {"state": {"step": "x"}}),
        (tensors | {"coefficients": torch.ones(7, 7, 7)}, about),
    ):
        save_tensors(path, "calibration", *damaged)
        with pytest.raises(FileFormatError, match="does not fit this version of calibration") as caught:
            trainer().resume(path, ABOUT)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
