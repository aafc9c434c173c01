"""Prompts: the answer is in the text, the size is honoured, and the same seed gives the same prompts for good."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sharpmax.tasks.formats import CONTROLS, FORMATS, SINGLE, TRAINING, Format
from sharpmax.tasks.prompt import Prompt, Task
from sharpmax.tasks.registry import TASKS, get_task


def solve_multi_kv(user: str) -> tuple[int, str]:
    pairs = re.findall(r"^(\w+): (\d\d)$", user, flags=re.MULTILINE)
    asked = re.search(r"\nWhat are the numbers of (\w+), (\w+) and (\w+)\?$", user)
    assert asked
    assert len(set(asked.groups())) == 3
    numbers = ", ".join(dict(pairs)[name] for name in asked.groups())
    return len(pairs), f"The numbers of {asked[1]}, {asked[2]} and {asked[3]} are {numbers}"


def solve_max(user: str) -> tuple[int, str]:
    question, listed = user.split("\n")
    assert question == "Which of these numbers is the largest?"
    numbers = [int(number) for number in listed.split(", ")]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 10
    return len(numbers), f"The largest number is {sorted(numbers)[-1]}"


def solve_needle(user: str) -> tuple[int, str]:
    *paragraphs, question = user.split("\n\n")
    asked = re.fullmatch(r"What is the secret code of the (\w+)\?", question)
    assert asked
    facts = re.findall(r"The secret code of the (\w+) is (\d{4})\.", "\n".join(paragraphs))
    assert len(facts) == 1
    assert facts[0][0] == asked[1]
    rest = "\n".join(paragraphs).replace(f"The secret code of the {asked[1]} is {facts[0][1]}.", "").lower()
    assert not re.search(r"\d|\b(code|secret|number|one|two|three|four|five|six|seven|eight|nine|ten)\b", rest)
    assert asked[1] not in rest
    return len(paragraphs), f"The secret code of the {asked[1]} is {facts[0][1]}"


SOLVE = {"max": solve_max, "needle": solve_needle, "multi-kv": solve_multi_kv}
"""Solvers of tasks that are not a `Format`."""


@pytest.mark.parametrize("name", SOLVE)
def test_the_answer_is_in_the_text_and_the_size_is_honoured(name: str) -> None:
    task = TASKS[name]
    for size in {task.least, 5, *task.sizes, min(task.most, 1000)}:
        for prompt in task.prompts(size, count=3, seed=size):
            found, reply = SOLVE[name](prompt.user)
            assert found == size
            assert prompt.opening + prompt.answer == reply
            assert prompt.answer.startswith(" ")
            assert prompt.user.isascii()


@pytest.mark.parametrize("task", SINGLE, ids=lambda task: task.name)
def test_the_answer_cannot_be_guessed(task: Task) -> None:
    """No answer is common, at the largest size either: the largest of many even draws would nearly always be 999."""
    prompts = task.prompts(task.sizes[-1], count=100, seed=0)
    _, times = Counter(prompt.answer for prompt in prompts).most_common(1)[0]
    assert times <= 8


def test_prompts_depend_on_their_index_and_not_on_the_count() -> None:
    many = TASKS["kv"].prompts(8, count=20, seed=3)
    assert TASKS["kv"].prompts(8, count=4, seed=3) == many[:4] != TASKS["kv"].prompts(8, count=4, seed=4)
    assert len({prompt.user for prompt in many}) == 20


def test_the_same_prompts_for_good() -> None:
    """If one of these changes, so must the task's version: results made before could no longer be compared."""
    golden = json.loads((Path(__file__).parent / "golden.json").read_text(encoding="utf-8"))["prompts"]
    found = {}
    for name, task in TASKS.items():
        if name != "control/documentation":  # Python's documentation changes with Python
            prompts = [task.prompts(size, count=3, seed=7) for size in task.sizes]
            found[name] = [task.version, hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]]
    assert found == golden


def test_the_task_in_the_guide(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    path = tmp_path / "balls.py"
    path.write_text(guide.split("```python\n")[1].split("```")[0], encoding="utf-8")
    task = get_task(path)
    assert (task.name, task.sizes) == ("balls", (8, 32, 128))
    for prompt in task.prompts(8, count=20, seed=0):
        assert isinstance(prompt, Prompt)
        assert f"{prompt.opening}{prompt.answer}." in prompt.user
    assert list(tmp_path.iterdir()) == [path], "running a user's file leaves nothing beside it"


ITEMS = [task for task in (*SINGLE, *TRAINING, *FORMATS) if isinstance(task.make, Format)]


@pytest.mark.parametrize("task", [*ITEMS, *CONTROLS], ids=lambda task: task.name)
def test_the_evidence_holds_the_question_and_the_answer_and_occurs_once(task: Any) -> None:
    for size in (1, 7, 200):
        for prompt in task.prompts(size, 3, seed=3):
            assert prompt.user.count(prompt.evidence) == 1
            assert prompt.answer.strip() in prompt.evidence
            assert prompt.answer.strip() not in prompt.opening
            if task in ITEMS:
                question = re.escape(task.make.question.format(key="KEY")).replace("KEY", "(.+)")
                asked = re.search(f"\n{question}$", prompt.user)
                assert asked
                assert asked[1] in prompt.evidence


@pytest.mark.parametrize("task", ITEMS, ids=lambda task: task.name)
def test_a_size_is_a_number_of_items_and_any_of_them_is_asked_for(task: Any) -> None:
    prompts = task.prompts(20, 60, seed=1)
    places = {prompt.user.index(prompt.evidence) * 4 // len(prompt.user) for prompt in prompts}
    assert places >= {0, 1, 2}
    short, long = (sum(len(prompt.user) for prompt in task.prompts(size, 20, 0)) for size in (50, 100))
    assert 1.6 < long / short < 2.4


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
