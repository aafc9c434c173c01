"""Profiles, training prompts, the test set and regularisation data."""

from __future__ import annotations

from typing import Any

import pytest

from sharpmax.calibration.data import KINDS, PROFILES, TrainingPrompts, profile_for, regularisation_data
from sharpmax.errors import ArgumentError
from sharpmax.models.scoring import judge
from sharpmax.tasks.chat import chat_questions
from sharpmax.tasks.prompt import Part
from sharpmax.tasks.registry import get_task
from tests.calibration.small import TEXT, profile
from tests.experiments.evaluate import tiny

FILLED = {"filled": 2, "fillers": (30, 100), "validation_prompts": 6, "sizes": (4, 8, 16)}


def prompts(seed: int = 0, context: int | None = None, **changes: Any) -> TrainingPrompts:
    return TrainingPrompts(tiny.tokenizer(), get_task("kv"), profile(**(FILLED | changes)), seed, TEXT, context)


def test_training_never_reads_the_test_set() -> None:
    trained = {reply.ids for step in range(60) for group in prompts().at(step) for reply in group}
    assert len(trained) > 250
    test_set = prompts().test_set()
    assert len(test_set) == len(prompts(filled=0, fillers=()).test_set()) == 6
    assert not trained & {reply.ids for reply in test_set}


def test_prompts_depend_on_seed_and_step_alone() -> None:
    for step in range(2):
        assert prompts().at(step) == prompts().at(step)
        assert prompts().at(step) != prompts(seed=1).at(step)
        assert prompts().at(step) != prompts().at(step + 1)
    assert prompts().test_set() == prompts().test_set() != prompts(seed=1).test_set()


def test_some_prompts_come_after_plain_text() -> None:
    words = tiny.tokenizer()
    for step in range(3):
        alone, after = prompts().at(step)
        assert (len(alone), len(after)) == (3, 2)
        for reply in after:
            piece, _, rest = words.decode(reply.ids).partition("\n\n")
            assert piece in TEXT
            assert len(piece) in (30, 100)
            assert words.decode(reply.ids[reply.start :]) in rest
        assert not any(words.decode(reply.ids)[:30] in TEXT for reply in alone)


def test_key_replication_stays_within_the_context() -> None:
    options: dict[str, Any] = {"replications": (1, 8), "filled": 0, "fillers": ()}
    longest = max(len(reply.ids) for reply in prompts(**options).test_set())
    for context, most in ((None, 8), (3 * longest, 3), (longest, 1), (1, 1)):
        test_set = prompts(context=context, **options).test_set()
        assert max(n for reply in test_set for n in getattr(reply, "times", (1,))) == most


def test_two_parts_of_the_regularisation_data_share_no_question() -> None:
    model, words = tiny.model(), tiny.tokenizer()
    names: tuple[Part, Part] = ("calibration", "validation")
    parts = {part: regularisation_data(model, words, profile(), part, TEXT) for part in names}
    for part, one in parts.items():
        assert {n: [len(piece) for piece in pieces] for n, pieces in one.text.items()} == {40: [40] * 8, 64: [64] * 5}
        asked = [words.decode(reply.ids[: reply.start]).strip() for reply in one.answers]
        assert asked == list(chat_questions(part)[:3])
        assert all(judged.right for judged in judge(model, one.answers))
    assert not {r.ids for r in parts["calibration"].answers} & {r.ids for r in parts["validation"].answers}


def test_a_profile_by_name_with_changes() -> None:
    for name, known in PROFILES.items():
        assert profile_for(name) == known
        changed = profile_for(name, steps=3, sizes=(4,), kinds=None)
        assert (changed.steps, changed.sizes, changed.kinds) == (3, (4,), known.kinds)
        assert set(known.kinds) <= set(KINDS)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("large", {}, "profile: got 'large'; allowed: one of ['full', 'small']"),
        ("small", {"kinds": ("constant", "best")}, "kinds: got 'best'; allowed: some of ['constant', 'length',"),
        ("small", {"steps": 0}, "steps: got 0; allowed: 1 or more"),
        ("small", {"sizes": ()}, "sizes: got none"),
    ],
)
def test_a_profile_that_cannot_be(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        profile_for(name, **changes)
    assert str(caught.value).startswith(message)
