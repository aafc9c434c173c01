"""Profiles, training and validation prompts, and domains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sharpmax.calibration.data import PROFILES, TrainingPrompts, profile_for, sizes_for
from sharpmax.calibration.learnable import KINDS
from sharpmax.errors import ArgumentError
from sharpmax.models.scoring import judge
from sharpmax.tasks.formats import CONTROLS, TRAINING
from sharpmax.tasks.registry import get_task
from sharpmax.tasks.text import chat_questions
from tests.calibration.small import domains, profile
from tests.experiments.evaluate import tiny


def prompts(seed: int = 0, context: int | None = None, **changes: Any) -> TrainingPrompts:
    amounts = profile(**({"sizes": (4, 8), "controls": 2, "formats": 2, "longest": 900} | changes))
    return TrainingPrompts(tiny.tokenizer(), (get_task("kv"), *TRAINING), CONTROLS, amounts, seed, context)


def test_training_never_reads_the_validation_prompts() -> None:
    trained = {reply.ids for step in range(30) for reply in prompts().at(step)}
    assert len(trained) > 200
    assert not trained & {reply.ids for reply in prompts().validation()}


def test_prompts_depend_on_seed_and_step_alone() -> None:
    assert len(prompts().at(1)) == 2 * 3 + 2
    assert prompts(seed=1).at(1) != prompts().at(1) == prompts().at(1) != prompts().at(2)
    assert prompts().validation() == prompts().validation() != prompts(seed=1).validation()


def test_key_replication_stays_within_the_context() -> None:
    options: dict[str, Any] = {"replications": (1, 8), "sizes": (4,)}
    one = TrainingPrompts(tiny.tokenizer(), (get_task("kv"),), (), profile(**options), 0)
    longest = max(len(reply.ids) for reply in one.validation())
    for context, most in ((None, 8), (3 * longest, 3), (longest, 1), (1, 1)):
        replies = replace(one, context=context).validation()
        assert max(n for reply in replies for n in reply.times or (1,)) == most


def test_domains_are_in_two_parts_without_a_common_text() -> None:
    model, words = tiny.model(), tiny.tokenizer()
    found = {domain.name: domain for domain in domains(model)}
    texts = [f"{name}/{length}" for name in ("docs", "code", "words") for length in (40, 64)]
    assert list(found) == ["sampled/24", *texts, "chat"]
    assert [name for name, domain in found.items() if not domain.trained] == ["code/40", "code/64"]
    for name, domain in found.items():
        assert not {reply.ids for reply in domain.training} & {reply.ids for reply in domain.validation}
        if name != "chat":
            length = int(name.rpartition("/")[2])
            assert {len(reply.ids) for reply in domain.training + domain.validation} == {length}
            assert (len(domain.training), len(domain.validation)) == (5, 4)
    for part, answers in (("calibration", found["chat"].training), ("validation", found["chat"].validation)):
        asked = [words.decode(reply.ids[: reply.start]).strip() for reply in answers]
        assert asked == list(chat_questions(part)[:3])  # type: ignore[arg-type]
        assert all(judged.right for judged in judge(model, answers))


def test_sizes_end_where_the_model_fails() -> None:
    model, words = tiny.model(), tiny.tokenizer()
    # Of letters about half are guessed, whatever the size: prompts become too long. Numbers are never right.
    assert sizes_for(model, words, [tiny.LETTERS], profile(longest=300, scanned=20)) == (8, 16, 32, 64)
    assert sizes_for(model, words, [get_task("kv")], profile(longest=300, scanned=3)) == (4,)
    with pytest.raises(ArgumentError, match=r"^task: got prompts of more than 20 tokens"):
        sizes_for(model, words, [get_task("kv")], profile(longest=20))


def test_a_profile_by_name_with_changes() -> None:
    for name, known in PROFILES.items():
        assert profile_for(name, steps=3, sizes=(4,), kinds=None) == replace(known, steps=3, sizes=(4,))
        assert set(known.kinds) <= set(KINDS)
