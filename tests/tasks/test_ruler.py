"""RULER's tasks: the published wording, answers that follow from the text, and lengths in tokens."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from sharpmax.tasks.prompt import Prompt
from sharpmax.tasks.registry import get_task, get_tasks

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NIAH = (
    r"A special magic {0} is hidden within the following text\. Make sure to memorize it\. I will quiz you about "
    r"the {0} afterwards\.\n(?P<text>.*)\nWhat is the special magic {0} for (?P<key>\S+) mentioned in the "
    r"provided text\?"
)
VT = (
    r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n(?P<text>.*)\n"
    r"Question: Find all variables that are assigned the value (?P<value>\d{5}) in the text above\."
)
CWE = (
    r"Below is a numbered list of words\. In these words, some appear more often than others\. Memorize the ones that "
    r"appear most often\.\n(?P<text>.*)\nQuestion: What are the 10 most common words in the above list\?"
)
FWE = (
    r"Read the following coded text and track the frequency of each coded word\. Find the three most frequently "
    r"appeared coded words\. (?P<text>.*)\nQuestion: Do not provide any explanation\. Please ignore the "
    r"dots '\.\.\.\.'\. What are the three most frequently appeared words in the above coded text\?"
)
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def prompt(name: str, size: int, seed: int = 0) -> Prompt:
    return get_task(f"ruler/{name}").prompts(size, 1, seed)[0]


def parts(pattern: str, text: str) -> dict[str, str]:
    found = re.fullmatch(pattern, text, re.DOTALL)
    assert found, text[:300]
    return found.groupdict()


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
    found = parts(NIAH.format(kind), one.user)
    lines = found["text"].split("\n")
    needle = re.compile(rf"One of the special magic {kind}s for ({key}) is: ({value})\.")
    pairs = dict(found for line in lines if line != NOISE for found in needle.findall(line))
    assert len(pairs) == needles
    assert lines.count(NOISE) == len(lines) - needles == (30 if name == "niah_single_1" else 0)
    assert one.references == (pairs[found["key"]],)
    assert one.opening == f"The special magic {kind} for {found['key']} mentioned in the provided text is"
    assert one.answer == f" {one.references[0]}"
    assert one.evidence in lines


def test_variable_tracking() -> None:
    """One example, then one chain of four hops in order, among noise."""
    one = prompt("vt", 40)
    example, rest = one.user.split("\n\nMemorize", 1)
    known = parts(VT + r" Answer: (?P<answer>.*)", example)
    assert known["value"] == "12345"
    found = parts(VT, "Memorize" + rest)
    opening = (
        "Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the value"
    )
    assert one.opening == f"{opening} {found['value']}, they are:"
    for text, value, answer in (
        (found["text"], found["value"], list(one.references)),
        (known["text"], "12345", known["answer"].rpartition(": ")[2].split()),
    ):
        assigned: dict[str, str] = {}
        for line in text.split("\n"):
            if line != NOISE:
                new, old = re.fullmatch(r"VAR ([A-Z]+) = (?:VAR )?(\w+) ?", line).groups()  # type: ignore[union-attr]
                assigned[new] = assigned.get(old, old)
        assert list(assigned) == answer
        assert set(assigned.values()) == {value}
        assert len(answer) == 5
    assert found["text"].count(NOISE) == 40
    assert {len(name) for name in one.references} == {5}


def test_common_words() -> None:
    one = prompt("cwe", 50)
    assert one.opening == "Answer: The top 10 words that appear most often in the list are:"
    example, rest = one.user.split("\nBelow", 1)
    parts(CWE + r" Answer: The top 10 words that appear most often in the list are:(?: \d+\. [a-z]+){10}", example)
    words = re.findall(r"(\d+)\. ([a-z]+)", parts(CWE, "Below" + rest)["text"])
    assert [int(place) for place, _ in words] == list(range(1, 10 * 30 + 40 * 3 + 1))
    counts = Counter(word for _, word in words)
    assert {word for word, count in counts.items() if count == 30} == set(one.references)
    assert sorted(set(counts.values())) == [3, 30]


def test_frequent_words() -> None:
    """Zeta-distributed with exponent 2; the most frequent are dots."""
    one = prompt("fwe", 1000)
    counts = Counter(parts(FWE, one.user)["text"].split())
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked == ["...", *one.references]
    assert [counts[word] for word in ranked] == [int(1000 / 1.6449340668 / rank**2) for rank in (1, 2, 3, 4)]
    assert one.opening == "Answer: According to the coded text above, the three most frequently appeared words are:"


@pytest.mark.parametrize("task", get_tasks("ruler"), ids=lambda task: task.name)
def test_by_length_a_prompt_is_as_long_as_it_can_be(task: Any) -> None:
    def tokens(one: Prompt) -> int:
        return len(one.user.split())

    for length in (2000, 3000):
        found = task.of_length(tokens).prompts(length, 2, 1)
        assert all(0.9 * length < tokens(one) <= length for one in found)
        assert found[0] != found[1]
