"""Formats: what is asked is in the text once, and tests share nothing with training."""

from __future__ import annotations

from typing import Any

import pytest

from sharpmax.tasks.formats import CONTROLS, FORMATS, TRAINING
from sharpmax.tasks.registry import GROUPS, TASKS, get_tasks

EVERY = [*TRAINING, *CONTROLS, *FORMATS]


@pytest.mark.parametrize("task", EVERY, ids=lambda task: task.name)
def test_the_evidence_holds_the_answer_and_occurs_once(task: Any) -> None:
    for size in (1, 7, 200):
        for prompt in task.prompts(size, 5, seed=3):
            assert prompt.user.count(prompt.evidence) == 1
            assert prompt.answer.strip() in prompt.evidence
            assert prompt.answer.strip() not in prompt.opening


@pytest.mark.parametrize("task", [*TRAINING, *FORMATS], ids=lambda task: task.name)
def test_a_size_is_a_number_of_items_and_any_of_them_is_asked_for(task: Any) -> None:
    prompts = task.prompts(20, 60, seed=1)
    places = {prompt.user.index(prompt.evidence) * 4 // len(prompt.user) for prompt in prompts}
    assert places >= {0, 1, 2}
    short, long = (sum(len(prompt.user) for prompt in task.prompts(size, 20, 0)) for size in (50, 100))
    assert 1.6 < long / short < 2.4


def test_there_are_enough_formats_and_none_is_in_two_groups() -> None:
    assert len(TRAINING) >= 10
    assert len(FORMATS) >= 6
    names = [task.name for group in GROUPS.values() for task in group]
    assert len(names) == len(set(names))
    assert set(names) <= set(TASKS)
    assert get_tasks("kv, ruler,formats")[1:7] == GROUPS["ruler"]


def test_test_formats_share_no_wording_and_no_key_with_training() -> None:
    def pieces(tasks: Any) -> set[str]:
        """Every four words in a row of questions and openings, and every key."""
        found = set()
        for task in tasks:
            for prompt in task.prompts(3, 30, seed=5):
                words = f"{prompt.user.splitlines()[-1]} {prompt.opening}".split()
                found |= {" ".join(words[i : i + 4]) for i in range(len(words) - 3)}
        return found

    assert not pieces([*TRAINING, *CONTROLS]) & pieces(FORMATS)
