"""The last word of the leash: what is returned keeps to it, and is as strong as it may be."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.calibration.budget import CHAT, Leash, percent, strongest
from sharpmax.calibration.data import KINDS, everyday, policy_from
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
def leash(model: Any) -> Leash:
    return Leash.of(model, everyday(model, tiny.tokenizer(), profile(), "validation", TEXT), LIMIT)


@pytest.fixture(scope="module")
def exam() -> list[Reply]:
    return [encode(tiny.tokenizer(), prompt) for prompt in tiny.LETTERS.prompts(8, 12, 7)]


def coefficients(kind: str, seed: int, scale: float) -> torch.Tensor:
    shape = (tiny.LAYERS, tiny.HEADS, len(KINDS[kind]))
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def measured(model: Any, policy: Any, leash: Leash, exam: list[Reply]) -> tuple[dict[str, float], float]:
    with hf.applied(model, policy):
        return leash.rises(model), sum(one.nll for one in judge(model, exam)) / len(exam)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_returned_keeps_to_the_leash_when_read_from_its_file(
    kind: str, model: Any, leash: Leash, exam: list[Reply], tmp_path: Path
) -> None:
    strengths = []
    for seed in range(2):
        found = strongest(model, kind, coefficients(kind, seed, 0.3), leash, exam)
        assert found is not None
        saved = sm.load_policy(found.policy.save(tmp_path / "policy.json"))
        rises, nll = measured(model, saved, leash, exam)
        assert rises == found.rises
        assert max(rises.values()) <= math.log1p(LIMIT)
        assert nll == found.nll
        strengths.append(found.strength)
    assert min(strengths) < 1


@pytest.mark.parametrize("kind", ["constant", "rows"])
def test_a_broken_leash_weakens_no_more_than_it_must(kind: str, model: Any, leash: Leash, exam: list[Reply]) -> None:
    tried = 0
    for seed in range(2):
        wanted = coefficients(kind, seed, 0.3)
        if leash.holds(measured(model, policy_from(kind, wanted), leash, exam)[0]):
            continue
        found = strongest(model, kind, wanted, leash, exam)
        assert found is not None
        assert 0 < found.strength < 1
        assert found.policy == policy_from(kind, wanted, found.strength)
        # A little stronger, and it breaks.
        stronger = policy_from(kind, wanted, found.strength + 2**-5)
        assert not leash.holds(measured(model, stronger, leash, exam)[0])
        tried += 1
    assert tried


def test_stronger_than_learned_only_where_that_is_better(model: Any, leash: Leash, exam: list[Reply]) -> None:
    wide = dataclasses.replace(leash, limit=WIDE)
    seen = set()
    for seed in range(2):
        for sign in (0.2, -0.2):
            wanted = coefficients("constant", seed, sign)
            tried = {s: measured(model, policy_from("constant", wanted, s), wide, exam) for s in (1.0, 1.15, 1.3)}
            best = 1.0
            for strength in (1.15, 1.3):
                if not (wide.holds(tried[strength][0]) and tried[strength][1] < tried[best][1]):
                    break
                best = strength
            found = strongest(model, "constant", wanted, wide, exam)
            assert found is not None
            assert found.strength == best
            assert found.nll == tried[best][1]
            seen.add(best)
    assert {1.0, 1.3} <= seen


def test_none_where_nothing_keeps_to_it(model: Any, leash: Leash, exam: list[Reply]) -> None:
    """Against losses a nat lower not even the model as it comes does."""
    harder = dataclasses.replace(leash, base=shifted(leash.base, leash.material, -1.0))
    assert strongest(model, "constant", coefficients("constant", 0, 0.1), harder, exam) is None


@pytest.mark.parametrize("piece", ["40", "64", CHAT])
def test_every_piece_counts(piece: str, model: Any, leash: Leash, exam: list[Reply]) -> None:
    lower = shifted(leash.base, leash.material, -1.0)[piece]
    harder = dataclasses.replace(leash, base={**leash.base, piece: lower})
    assert strongest(model, "constant", coefficients("constant", 0, 0.1), harder, exam) is None


def test_the_model_is_left_alone(model: Any, leash: Leash, exam: list[Reply]) -> None:
    strongest(model, "rows", coefficients("rows", 1, 0.6), leash, exam)
    assert hf.policy_of(model) is None
    assert max(map(abs, leash.rises(model).values())) == 0.0


class TestLeash:
    def test_rises_are_means_over_tokens(self, model: Any, leash: Leash) -> None:
        """Windows count alike; answers by their tokens, as one text."""
        with hf.applied(model, sm.policies.Constant(3.0)):
            rises = leash.rises(model)
            windows = {n: float(window_losses(model, pieces).mean()) for n, pieces in leash.material.text.items()}
            chat = judge(model, leash.material.answers)
        for n, loss in windows.items():
            assert rises[str(n)] == pytest.approx(loss - sum(leash.base[str(n)]) / len(leash.base[str(n)]), abs=1e-6)
        spoken = sum(one.tokens for one in chat)
        assert rises[CHAT] == pytest.approx((sum(one.nll for one in chat) - sum(leash.base[CHAT])) / spoken, abs=1e-6)
        assert set(rises) == {"40", "64", "chat"}

    def test_holds_up_to_the_limit_and_not_with_nan(self, leash: Leash) -> None:
        room = math.log(1 + LIMIT)
        assert leash.room == pytest.approx(room)
        assert leash.holds({"40": leash.room, CHAT: -3.0})
        assert not leash.holds({"40": math.nextafter(leash.room, 1), CHAT: -3.0})
        assert not leash.holds({"40": math.nan, CHAT: 0.0})
        assert percent(leash.room) == pytest.approx(100 * LIMIT)

    @pytest.mark.parametrize("limit", [0.0, -0.01, 1.01, math.nan, math.inf])
    def test_refuses(self, limit: float, model: Any, leash: Leash) -> None:
        with pytest.raises(ArgumentError, match="leash: got"):
            Leash.of(model, leash.material, limit)

    def test_a_model_without_finite_losses_is_refused(self, leash: Leash) -> None:
        broken = tiny.model()
        broken.model.norm.weight[0] = math.nan
        with pytest.raises(ArgumentError, match="model: got a loss on 40 that is not finite"):
            Leash.of(broken, leash.material, 0.01)
