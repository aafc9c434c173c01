"""The budget holds for what is returned, and the policy is as strong as it allows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.calibration.budget import HELD_OUT_FACTOR, Budget, Change, select_best
from sharpmax.calibration.data import KINDS, policy_from
from sharpmax.integrations import transformers as hf
from sharpmax.models.scoring import Reply, encode
from tests.calibration.small import domains
from tests.experiments.evaluate import tiny

LIMIT = 0.002


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model()


@pytest.fixture(scope="module")
def budget(model: Any) -> Budget:
    return Budget(domains(model, lengths=(40,)), LIMIT, 500)


@pytest.fixture(scope="module")
def prompts() -> list[Reply]:
    return [encode(tiny.tokenizer(), prompt) for prompt in tiny.LETTERS.prompts(8, 12, 7)]


def coefficients(kind: str, scale: float) -> torch.Tensor:
    shape = (tiny.LAYERS, tiny.HEADS, len(KINDS[kind]))
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))


def divergence(model: Any, policy: Any, replies: tuple[Reply, ...]) -> tuple[float, float]:
    """KL and rise of the loss by hand, one text at a time, in float64."""
    kl = rise = count = 0.0
    for reply in replies:
        ids = torch.tensor([reply.ids])
        before = model(input_ids=ids).logits[0, reply.start - 1 : -1].double().log_softmax(-1)
        with hf.applied(model, policy):
            after = model(input_ids=ids).logits[0, reply.start - 1 : -1].double().log_softmax(-1)
        answer = ids[0, reply.start :, None]
        kl += float((before.exp() * (before - after)).sum())
        rise += float((before.gather(1, answer) - after.gather(1, answer)).sum())
        count += len(answer)
    return kl / count, rise / count


def test_divergence_is_the_mean_over_tokens_of_each_domain(model: Any, budget: Budget) -> None:
    policy = policy_from("constant", coefficients("constant", 0.5))
    changes = budget.changes(model, policy)
    assert list(changes) == ["sampled/24", "docs/40", "code/40", "words/40", "chat"]
    for domain in budget.domains:
        kl, rise = divergence(model, policy, domain.validation)
        assert changes[domain.name].kl == pytest.approx(kl, rel=1e-3, abs=1e-7)
        assert changes[domain.name].rise == pytest.approx(rise, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("kind", ["constant", "rows"])
def test_a_policy_beyond_the_budget_is_weakened_no_more_than_needed(
    kind: str, model: Any, budget: Budget, prompts: list[Reply], tmp_path: Path
) -> None:
    wanted = coefficients(kind, 0.3)
    assert budget.used(budget.changes(model, policy_from(kind, wanted))) > 1.0
    found = select_best(model, kind, wanted, budget, prompts)
    assert found is not None
    assert 0 < found.strength < 1
    assert found.policy == policy_from(kind, wanted, found.strength)
    # Read back from its file it is what was measured.
    saved: Any = sm.load_policy(found.policy.save(tmp_path / "policy.json"))
    assert budget.changes(model, saved) == found.changes
    assert 0.8 < budget.used(found.changes) <= 1.0
    assert hf.policy_of(model) is None


def test_a_policy_is_strengthened_only_if_the_loss_falls(model: Any, budget: Budget, prompts: list[Reply]) -> None:
    wide = dataclasses.replace(budget, limit=1.0)
    strengths = set()
    for sign in (0.2, -0.2):
        found = select_best(model, "constant", coefficients("constant", sign), wide, prompts)
        assert found is not None
        strengths.add(found.strength)
    assert strengths == {1.0, 1.4}


@pytest.mark.parametrize("name", ["sampled/24", "code/40", "chat"])
def test_every_domain_counts_and_the_one_held_out_may_diverge_more(name: str, budget: Budget) -> None:
    """Up to the limit, not beyond it, and not with a number that is none."""
    limit = LIMIT * (HELD_OUT_FACTOR if name.startswith("code") else 1)
    for kl, within in ((limit, True), (math.nextafter(limit, 1), False), (math.nan, False)):
        changes = {domain.name: Change(0.0, -3.0) for domain in budget.domains} | {name: Change(kl, 0.0)}
        assert (budget.used(changes) <= 1.0) == within
