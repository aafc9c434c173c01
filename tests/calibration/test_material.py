"""What is read: the same for the same seed, and nothing of an exam in a lesson."""

from __future__ import annotations

from typing import Any

import pytest

from sharpmax.calibration.data import KINDS, PROFILES, Lessons, everyday, profile_for
from sharpmax.errors import ArgumentError
from sharpmax.models.scoring import judge
from sharpmax.tasks.chat import chat_questions
from sharpmax.tasks.prompt import Part
from sharpmax.tasks.registry import get_task
from tests.calibration.small import TEXT, profile
from tests.experiments.evaluate import tiny

FILLED = {"filled": 2, "fillers": (30, 100), "validation_prompts": 6, "sizes": (4, 8, 16)}


def lessons(seed: int = 0, **changes: Any) -> Lessons:
    return Lessons(tiny.tokenizer(), get_task("kv"), profile(**(FILLED | changes)), seed, TEXT)


def test_no_step_sees_an_exam() -> None:
    for seed in (0, 1):
        practised = {reply.ids for step in range(60) for group in lessons(seed).at(step) for reply in group}
        assert len(practised) > 250
        assert not practised & {reply.ids for reply in lessons(seed).exam()}


def test_the_same_seed_gives_the_same_and_another_gives_others() -> None:
    for step in range(4):
        assert lessons().at(step) == lessons().at(step)
        assert lessons().at(step) != lessons(seed=1).at(step)
        assert lessons().at(step) != lessons().at(step + 1)
    assert lessons().exam() == lessons().exam()
    assert lessons().exam() != lessons(seed=1).exam()


def test_some_prompts_come_after_text_that_is_there() -> None:
    words = tiny.tokenizer()
    for step in range(6):
        alone, after = lessons().at(step)
        assert (len(alone), len(after)) == (3, 2)
        for reply in after:
            read = words.decode(reply.ids)
            piece, _, rest = read.partition("\n\n")
            assert piece in TEXT
            assert len(piece) in (30, 100)
            assert words.decode(reply.ids[reply.start :]) in rest
        assert not any(words.decode(reply.ids)[:30] in TEXT for reply in alone)


def test_the_exam_has_as_many_prompts_as_it_should() -> None:
    assert len(lessons().exam()) == 6
    assert len(lessons(filled=0, fillers=()).exam()) == 6


def test_everyday_material_of_two_parts_shares_no_question() -> None:
    model, words = tiny.model(), tiny.tokenizer()
    names: tuple[Part, Part] = ("calibration", "validation")
    parts = {part: everyday(model, words, profile(), part, TEXT) for part in names}
    for part, one in parts.items():
        assert {n: [len(piece) for piece in pieces] for n, pieces in one.text.items()} == {40: [40] * 8, 64: [64] * 5}
        asked = [words.decode(reply.ids[: reply.start]).strip() for reply in one.answers]
        assert asked == list(chat_questions(part)[:3])
        assert all(judged.right for judged in judge(model, one.answers))
    assert not {r.ids for r in parts["calibration"].answers} & {r.ids for r in parts["validation"].answers}


class TestProfiles:
    @pytest.mark.parametrize("name", PROFILES)
    def test_by_name_with_changes(self, name: str) -> None:
        assert profile_for(name) == PROFILES[name]
        changed = profile_for(name, steps=3, sizes=(4,), kinds=None)
        assert (changed.steps, changed.sizes, changed.kinds) == (3, (4,), PROFILES[name].kinds)
        assert set(PROFILES[name].kinds) <= set(KINDS)

    @pytest.mark.parametrize(
        ("name", "changes", "says"),
        [
            ("large", {}, "profile: got 'large'; allowed: one of ['full', 'small']"),
            ("small", {"kinds": ("constant", "best")}, "kinds: got 'best'; allowed: some of ['constant', 'length',"),
            ("small", {"steps": 0}, "steps: got 0; allowed: 1 or more"),
            ("small", {"sizes": ()}, "sizes: got none"),
        ],
    )
    def test_refuses(self, name: str, changes: dict[str, Any], says: str) -> None:
        with pytest.raises(ArgumentError) as caught:
            profile_for(name, **changes)
        assert str(caught.value).startswith(says)


def test_a_crowd_is_no_larger_than_the_model_can_read() -> None:
    whole = lessons(crowds=(1, 8), filled=0, fillers=())
    longest = max(len(reply.ids) for reply in whole.exam())
    for context, most in ((None, 8), (3 * longest, 3), (longest, 1), (1, 1)):
        capped = Lessons(whole.tokenizer, whole.task, whole.profile, whole.seed, whole.text, context)
        counts = {n for reply in capped.exam() for n in getattr(reply, "times", (1,))}
        assert max(counts) == most
