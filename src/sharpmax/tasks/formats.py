"""Retrieval tasks for language models: one fact among n in lists, tables, JSON, prose and noise.

There are training formats, test formats and controls; the other tasks (`kv`, `houses`, …) belong to no group. Test
formats share no wording, layout or keys with training formats. A control hides one fact in text without similar facts.
Models solve controls without a policy, and must still solve them with one.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sharpmax.tasks.prompt import SIZES, Make, Prompt, Task
from sharpmax.tasks.text import plain_text
from sharpmax.tasks.vocabulary import ADJECTIVES, DATA, GOODS, NAMES, NOUNS, PLACES, WORDS, paragraph

Draw = Callable[[random.Random, int], list[str]]
"""Draws a number of texts."""


def _number(digits: int) -> Draw:
    return lambda rng, count: [str(rng.randrange(10 ** (digits - 1), 10**digits)) for _ in range(count)]


def _code(rng: random.Random, count: int) -> list[str]:
    letters, digits = "ABCDEFGHJKLMNPQRSTUVWXYZ", "23456789"
    return [rng.choice(letters) + rng.choice(letters) + rng.choice(digits) + rng.choice(digits) for _ in range(count)]


def _distinct(words: Sequence[str]) -> Draw:
    return lambda rng, count: rng.sample(words, count)


def _joined(first: Sequence[str], second: Sequence[str], between: str) -> Draw:
    def draw(rng: random.Random, count: int) -> list[str]:
        cells = rng.sample(range(len(first) * len(second)), count)
        return [first[cell % len(first)] + between + second[cell // len(first)] for cell in cells]

    return draw


def _mixed(*draws: Draw) -> Draw:
    return lambda rng, count: rng.choice(draws)(rng, count)


_TWO_WORDS = _joined(WORDS[:900], WORDS[900:1800], " ")
_KEYS: dict[str, Draw] = {
    "training": _mixed(_distinct(NAMES), _distinct(WORDS), _TWO_WORDS),
    "name or two words": _mixed(_distinct(NAMES), _TWO_WORDS),
    "distinct word": _distinct(WORDS),
    "name": _distinct(NAMES),
    "good": _distinct(GOODS),
    "thing": _joined(ADJECTIVES, NOUNS, " "),
    "sensor": _joined(ADJECTIVES, NOUNS, "_"),
    "person": _joined(
        [f"{letter}." for letter in "ABCDEFGHJKLMNPRSTVW"],
        [noun.title() + end for noun in NOUNS for end in ("son", "ley")],
        " ",
    ),
}
_VALUES: dict[str | int, Draw] = {
    "training": _mixed(_number(2), _number(3), _number(4), _number(7), _code),
    "word": lambda rng, count: rng.choices(WORDS, k=count),
    **{digits: _number(digits) for digits in (2, 3, 4, 5)},
}


@dataclass(frozen=True)
class Format:
    """A list of items with a key and a value each, and a question about one of them, as in `data/formats.json`.

    Templates have the fields {key} and {value}, and in `item` {a} and {b}, more values, and {n}, its number.
    """

    item: str
    question: str
    opening: str
    answer: str = " {value}"
    before: str = ""
    between: str = "\n"
    after: str = ""
    keys: str = "training"
    values: str | int = "training"

    def __call__(self, size: int, rng: random.Random) -> Prompt:
        """Make a prompt with `size` items."""
        draw = _VALUES[self.values]
        keys, values = _KEYS[self.keys](rng, size), draw(rng, size)
        others = [draw(rng, size) for name in ("{a}", "{b}") if name in self.item] or [values]
        items = [
            self.item.format(key=key, value=value, a=a, b=b, n=n)
            for n, (key, value, a, b) in enumerate(zip(keys, values, others[0], others[-1], strict=True), 1)
        ]
        asked = rng.randrange(size)
        about = {"key": keys[asked], "value": values[asked]}
        return Prompt(
            f"{self.before.format(**about)}{self.between.join(items)}{self.after}\n{self.question.format(**about)}",
            self.opening.format(**about),
            self.answer.format(**about),
            evidence=items[asked],
        )


def _needle(noise: Callable[[int, random.Random], list[str]]) -> Make:
    """Make prompts with one fact in `size` lines of noise."""

    def make(size: int, rng: random.Random) -> Prompt:
        key, value = _KEYS["training"](rng, 1)[0], _VALUES["training"](rng, 1)[0]
        fact = rng.choice((f"Remember that {key} stands for {value}.", f"Note: the entry {key} has the value {value}."))
        lines = noise(size, rng)
        lines.insert(rng.randint(0, len(lines)), fact)
        text = "\n".join([*lines, f"Which value belongs to {key}?"])
        return Prompt(text, f"The value that belongs to {key} is", f" {value}", evidence=fact)

    return make


def _stories(size: int, rng: random.Random) -> list[str]:
    return [" ".join(paragraph(rng)) for _ in range(size)]


def _repeated(size: int, rng: random.Random) -> list[str]:
    return [" ".join(paragraph(rng)[:2])] * size


@functools.cache
def _lines_of_documentation() -> list[str]:
    return plain_text("calibration").splitlines()


def _documentation(size: int, rng: random.Random) -> list[str]:
    lines = _lines_of_documentation()
    start = rng.randrange(max(1, len(lines) - size))
    return lines[start : start + size]


def _multi_kv(size: int, rng: random.Random) -> Prompt:
    pairs = list(zip(rng.sample(NAMES, size), _number(2)(rng, size), strict=True))
    (first, a), (second, b), (third, c) = rng.sample(pairs, 3)
    asked = f"numbers of {first}, {second} and {third}"
    listed = "\n".join(f"{name}: {number}" for name, number in pairs)
    return Prompt(
        f"Here is a list of names and numbers.\n{listed}\nWhat are the {asked}?", f"The {asked} are", f" {a}, {b}, {c}"
    )


def _paragraphs(size: int, rng: random.Random) -> Prompt:
    paragraphs = [paragraph(rng) for _ in range(size)]
    subject = f"secret code of the {rng.choice(PLACES)}"
    code = rng.randint(1000, 9999)
    sentences = rng.choice(paragraphs)
    sentences.insert(rng.randint(0, len(sentences)), f"The {subject} is {code}.")
    text = "\n\n".join(map(" ".join, paragraphs))
    return Prompt(f"{text}\n\nWhat is the {subject}?", f"The {subject} is", f" {code}")


def _max_of(size: int, rng: random.Random) -> Prompt:
    # Draw the answer first: the largest of many uniform draws would nearly always be close to 999.
    answer = rng.randint(10 + size - 1, 999)
    numbers = [answer, *rng.sample(range(10, answer), size - 1)]
    rng.shuffle(numbers)
    listed = ", ".join(map(str, numbers))
    return Prompt(f"Which of these numbers is the largest?\n{listed}", "The largest number is", f" {answer}")


_FORMATS: dict[str, dict[str, Format]] = {
    group: {name: Format(**fields) for name, fields in formats.items()}
    for group, formats in json.loads((DATA / "formats.json").read_text(encoding="utf-8")).items()
}
_ONE = _FORMATS["single"]

SINGLE: tuple[Task, ...] = (
    Task("kv", 1, "the number of one name in a list of n", SIZES, len(NAMES), _ONE["kv"]),
    Task("max", 1, "the largest of n different numbers", SIZES, 640, _max_of),
    Task("needle", 1, "one fact in n paragraphs of filler", (4, 8, 16, 32, 64, 128), 4096, _paragraphs),
    Task("multi-kv", 1, "the numbers of three names in a list of n", SIZES, len(NAMES), _multi_kv, least=3),
    Task("houses", 1, "the house of one person among n, in sentences", SIZES, len(NAMES), _ONE["houses"]),
    Task("prices", 1, "the price of one thing among n, in sentences", SIZES, len(GOODS), _ONE["prices"]),
    Task("json", 1, "the value of one key of a JSON object with n", SIZES, len(NAMES), _ONE["json"]),
)
"""Tasks outside the groups."""


def _tasks(kind: str, makers: dict[str, Format] | dict[str, Make], what: str) -> tuple[Task, ...]:
    return tuple(
        Task(f"{kind}/{name}", 1, f"{what} ({name})", (16, 32, 64, 128), 1024, make) for name, make in makers.items()
    )


TRAINING: tuple[Task, ...] = _tasks("training", _FORMATS["training"], "one of n items")
"""The formats that `sharpmax.calibrate` trains on by default."""

CONTROLS: tuple[Task, ...] = _tasks(
    "control",
    {"stories": _needle(_stories), "repeated": _needle(_repeated), "documentation": _needle(_documentation)},
    "one fact in n lines",
)
"""Prompts without similar items, which `sharpmax.calibrate` trains on too, so that they do not get worse."""

FORMATS: tuple[Task, ...] = _tasks("formats", _FORMATS["formats"], "one of n items")
"""The formats to test on. No policy is trained on them."""
