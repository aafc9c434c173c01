"""The budget holds for what is returned, and the policy is as strong as it allows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.calibration.budget import CHAT, Budget, percent, select_best
from sharpmax.calibration.data import KINDS, policy_from, regularisation_data
from sharpmax.errors import ArgumentError
from sharpmax.integrations import transformers as hf
from sharpmax.models.scoring import Reply, encode, judge, window_losses
from tests.calibration.small import TEXT, profile, shifted
from tests.experiments.evaluate import tiny

LIMIT, WIDE = 0.02, 1.0


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model()


@pytest.fixture(scope="module")
def budget(model: Any) -> Budget:
    return Budget.of(model, regularisation_data(model, tiny.tokenizer(), profile(), "validation", TEXT), LIMIT)


@pytest.fixture(scope="module")
def test_set() -> list[Reply]:
    return [encode(tiny.tokenizer(), prompt) for prompt in tiny.LETTERS.prompts(8, 12, 7)]


def coefficients(kind: str, seed: int, scale: float) -> torch.Tensor:
    shape = (tiny.LAYERS, tiny.HEADS, len(KINDS[kind]))
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def measured(model: Any, policy: Any, budget: Budget, test_set: list[Reply]) -> tuple[dict[str, float], float]:
    with hf.applied(model, policy):
        return budget.rises(model), sum(one.nll for one in judge(model, test_set)) / len(test_set)


@pytest.mark.parametrize("kind", ["constant", "rows"])
def test_a_policy_beyond_the_budget_is_weakened_no_more_than_needed(
    kind: str, model: Any, budget: Budget, test_set: list[Reply], tmp_path: Path
) -> None:
    wanted = coefficients(kind, 0, 0.3)
    assert not budget.holds(measured(model, policy_from(kind, wanted), budget, test_set)[0])
    found = select_best(model, kind, wanted, budget, test_set)
    assert found is not None
    assert 0 < found.strength < 1
    assert found.policy == policy_from(kind, wanted, found.strength)
    # Read back from its file it is what was measured.
    saved = sm.load_policy(found.policy.save(tmp_path / "policy.json"))
    rises, nll = measured(model, saved, budget, test_set)
    assert (rises, nll) == (found.rises, found.nll)
    assert max(rises.values()) <= math.log1p(LIMIT)
    stronger = policy_from(kind, wanted, found.strength + 2**-5)
    assert not budget.holds(measured(model, stronger, budget, test_set)[0])
    assert hf.policy_of(model) is None
    assert max(map(abs, budget.rises(model).values())) == 0.0


def test_a_policy_is_strengthened_while_the_loss_falls(model: Any, budget: Budget, test_set: list[Reply]) -> None:
    wide = dataclasses.replace(budget, limit=WIDE)
    strengths = set()
    for sign in (0.2, -0.2):
        wanted = coefficients("constant", 0, sign)
        tried = {s: measured(model, policy_from("constant", wanted, s), wide, test_set) for s in (1.0, 1.15, 1.3)}
        best = 1.0
        for strength in (1.15, 1.3):
            if not (wide.holds(tried[strength][0]) and tried[strength][1] < tried[best][1]):
                break
            best = strength
        found = select_best(model, "constant", wanted, wide, test_set)
        assert found is not None
        assert (found.strength, found.nll) == (best, tried[best][1])
        strengths.add(best)
    assert len(strengths) == 2


@pytest.mark.parametrize("part", ["40", "64", CHAT])
def test_every_part_of_the_data_has_to_stay_within_the_budget(
    part: str, model: Any, budget: Budget, test_set: list[Reply]
) -> None:
    """Against a baseline one nat lower not even the model without a policy does."""
    lower = shifted(budget.baseline, budget.data, -1.0)[part]
    harder = dataclasses.replace(budget, baseline={**budget.baseline, part: lower})
    assert select_best(model, "constant", coefficients("constant", 0, 0.1), harder, test_set) is None


def test_rises_are_means_over_tokens(model: Any, budget: Budget) -> None:
    """Windows count alike; answers by their tokens, as one text."""
    with hf.applied(model, sm.policies.Constant(3.0)):
        rises = budget.rises(model)
        windows = {str(n): float(window_losses(model, pieces).mean()) for n, pieces in budget.data.text.items()}
        chat = judge(model, budget.data.answers)
    for n, loss in windows.items():
        assert rises[n] == pytest.approx(loss - sum(budget.baseline[n]) / len(budget.baseline[n]), abs=1e-6)
    tokens = sum(one.tokens for one in chat)
    assert rises[CHAT] == pytest.approx((sum(one.nll for one in chat) - sum(budget.baseline[CHAT])) / tokens, abs=1e-6)
    assert set(rises) == {"40", "64", "chat"}


def test_holds_up_to_the_limit_and_not_with_nan(budget: Budget) -> None:
    assert budget.nats == pytest.approx(math.log(1 + LIMIT))
    assert budget.holds({"40": budget.nats, CHAT: -3.0})
    assert not budget.holds({"40": math.nextafter(budget.nats, 1), CHAT: -3.0})
    assert not budget.holds({"40": math.nan, CHAT: 0.0})
    assert percent(budget.nats) == pytest.approx(100 * LIMIT)


def test_a_model_without_finite_losses_is_refused(budget: Budget) -> None:
    broken = tiny.model()
    broken.model.norm.weight[0] = math.nan
    with pytest.raises(ArgumentError, match="model: got a loss on 40 that is not finite"):
        Budget.of(broken, budget.data, 0.01)
