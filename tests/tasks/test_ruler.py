"""RULER's tasks: answers that follow from the text, and lengths in tokens. `golden.json` pins the wording."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from sharpmax.tasks.prompt import Prompt
from sharpmax.tasks.registry import get_task, get_tasks

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def prompt(name: str, size: int, seed: int = 0) -> Prompt:
    return get_task(f"ruler/{name}").prompts(size, 1, seed)[0]


@pytest.mark.parametrize(
    ("name", "kind", "key", "value", "needles"),
    [
        ("niah_single_1", "number", r"[a-z]+-[a-z]+", r"\d{7}", 1),
        ("niah_multikey_2", "number", r"[a-z]+-[a-z]+", r"\d{7}", 30),
        ("niah_multikey_3", "uuid", UUID, UUID, 30),
    ],
)
def test_needles(name: str, kind: str, key: str, value: str, needles: int) -> None:
    one = prompt(name, 30)
    _, *lines, question = one.user.split("\n")
    needle = re.compile(rf"One of the special magic {kind}s for ({key}) is: ({value})\.")
    pairs = dict(found for line in lines if line != NOISE for found in needle.findall(line))
    assert len(pairs) == needles
    assert lines.count(NOISE) == len(lines) - needles == (30 if name == "niah_single_1" else 0)
    asked = question.removeprefix(f"What is the special magic {kind} for ").partition(" ")[0]
    assert one.references == (pairs[asked],)
    assert one.opening == f"The special magic {kind} for {asked} mentioned in the provided text is"
    assert one.answer == f" {one.references[0]}"
    assert one.evidence in lines


def test_variable_tracking() -> None:
    """One example, then one chain of four hops in order, among noise."""
    one = prompt("vt", 40)
    example, asked = one.user.split("\n\nMemorize")
    value = one.opening.split()[-3].rstrip(",")
    shown = example.rpartition("they are: ")[2].split()
    for text, wanted, answer in ((asked, value, list(one.references)), (example, "12345", shown)):
        assigned: dict[str, str] = {}
        for new, old in re.findall(r"^VAR ([A-Z]+) = (?:VAR )?(\w+) ?$", text, re.MULTILINE):
            assigned[new] = assigned.get(old, old)
        assert list(assigned) == answer
        assert set(assigned.values()) == {wanted}
        assert len(answer) == 5
        assert f"assigned the value {wanted} in the text above." in text
    assert asked.count(NOISE) == 40
    assert {len(name) for name in one.references} == {5}


def test_common_words() -> None:
    one = prompt("cwe", 50)
    example, asked = one.user.split("\nBelow")
    assert re.search(re.escape(one.opening) + r"(?: \d+\. [a-z]+){10}$", example)
    words = re.findall(r"(\d+)\. ([a-z]+)", asked)
    assert [int(place) for place, _ in words] == list(range(1, 10 * 30 + 40 * 3 + 1))
    counts = Counter(word for _, word in words)
    assert {word for word, count in counts.items() if count == 30} == set(one.references)
    assert sorted(set(counts.values())) == [3, 30]


def test_frequent_words() -> None:
    """Zeta-distributed with exponent 2; the most frequent are dots."""
    one = prompt("fwe", 1000)
    counts = Counter(one.user.partition("frequently appeared coded words. ")[2].partition("\n")[0].split())
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked == ["...", *one.references]
    assert [counts[word] for word in ranked] == [int(1000 / 1.6449340668 / rank**2) for rank in (1, 2, 3, 4)]


@pytest.mark.parametrize("task", get_tasks("ruler"), ids=lambda task: task.name)
def test_by_length_a_prompt_is_as_long_as_it_can_be(task: Any) -> None:
    def tokens(one: Prompt) -> int:
        return len(one.user.split())

    for length in (2000, 3000):
        found = task.of_length(tokens).prompts(length, 2, 1)
        assert all(0.9 * length < tokens(one) <= length for one in found)
        assert found[0] != found[1]
