"""Retrieval tasks for language models: one fact among n in lists, tables, JSON, prose and noise.

Groups are for calibration, for tests and as controls; the other tasks stand alone (`kv`, `houses`, …). No test format
shares its wording, its layout or its keys with a training format. A control has one fact in text without rivals, which
models find anyway: what works must keep working.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sharpmax.tasks.prompt import SIZES, Prompt, Task
from sharpmax.tasks.text import plain_text
from sharpmax.tasks.vocabulary import ADJECTIVES, NAMES, NOUNS, WORDS, paragraph

Draw = Callable[[random.Random, int], list[str]]
"""Draws so many texts."""

_SIZES = (16, 32, 64, 128)
_MOST = 1024


def _number(digits: int) -> Draw:
    return lambda rng, count: [str(rng.randrange(10 ** (digits - 1), 10**digits)) for _ in range(count)]


def _code(rng: random.Random, count: int) -> list[str]:
    letters, digits = "ABCDEFGHJKLMNPQRSTUVWXYZ", "23456789"
    return [rng.choice(letters) + rng.choice(letters) + rng.choice(digits) + rng.choice(digits) for _ in range(count)]


def _word(rng: random.Random, count: int) -> list[str]:
    return rng.choices(WORDS, k=count)


def _distinct(words: Sequence[str]) -> Draw:
    return lambda rng, count: rng.sample(words, count)


def _joined(first: Sequence[str], second: Sequence[str], between: str) -> Draw:
    def draw(rng: random.Random, count: int) -> list[str]:
        cells = rng.sample(range(len(first) * len(second)), count)
        return [first[cell % len(first)] + between + second[cell // len(first)] for cell in cells]

    return draw


def _mixed(*draws: Draw) -> Draw:
    return lambda rng, count: rng.choice(draws)(rng, count)


_TRAINING_KEYS = _mixed(_distinct(NAMES), _distinct(WORDS), _joined(WORDS[:900], WORDS[900:1800], " "))
_TRAINING_VALUES = _mixed(_number(2), _number(3), _number(4), _number(7), _code)


@dataclass(frozen=True)
class Format:
    """A list of items with a key and a value each, and a question about one of them.

    Templates have the places {key}, {value} and, in an item, {a} and {b}: values nobody asks for, {n}: its number.
    """

    before: str
    item: str
    between: str
    question: str
    opening: str
    answer: str = " {value}"
    keys: Draw = _TRAINING_KEYS
    values: Draw = _TRAINING_VALUES
    after: str = ""

    def __call__(self, size: int, rng: random.Random) -> Prompt:
        """A prompt with `size` items."""
        keys, values = self.keys(rng, size), self.values(rng, size)
        others = [self.values(rng, size) for name in ("{a}", "{b}") if name in self.item] or [values]
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


def _needle(noise: Callable[[int, random.Random], list[str]]) -> Callable[[int, random.Random], Prompt]:
    """One fact in `size` lines of noise."""

    def make(size: int, rng: random.Random) -> Prompt:
        key, value = _TRAINING_KEYS(rng, 1)[0], _TRAINING_VALUES(rng, 1)[0]
        fact = rng.choice((f"Remember that {key} stands for {value}.", f"Note: the entry {key} has the value {value}."))
        lines = noise(size, rng)
        lines.insert(rng.randint(0, len(lines)), fact)
        question = f"Which value belongs to {key}?"
        opening = f"The value that belongs to {key} is"
        return Prompt("\n".join([*lines, question]), opening, f" {value}", evidence=fact)

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


_TRAINING: Mapping[str, Callable[[int, random.Random], Prompt]] = {
    "pairs": Format("These codes are in use:\n", "{key} = {value}", "\n", "Which code is used for {key}?", "{key} ="),
    "object": Format("{{\n", '  "{key}": "{value}",', "\n", '}}\nPrint the entry "{key}".', '"{key}": "', "{value}"),
    "settings": Format("[main]\n", "{key}.limit={value}", "\n", "To what is {key} set?", "{key}.limit=", "{value}"),
    "table": Format(
        "| item | amount |\n|---|---|\n", "| {key} | {value} |", "\n", "Repeat the row of {key}.", "| {key} |"
    ),
    "sentences": Format("", "The rating of {key} is {value}.", " ", "\nHow is {key} rated?", "The rating of {key} is"),
    "codes": Format(
        "Codes come first.\n", "[{value}] {key}", "\n", "Which code does {key} have?", "The code of {key} is"
    ),
    "glossary": Format(
        "", "{key}: see also {value}", "\n", 'Where does the entry "{key}" point to?', "{key}: see also", values=_word,
        keys=_mixed(_distinct(NAMES), _joined(WORDS[:900], WORDS[900:1800], " ")),
    ),
    "nested": Format(
        "Stock:\n", "- {key}\n  - shelf: {a}\n  - count: {value}", "\n", "What is the count of {key}?", "count:"
    ),
    "reversed": Format("", "{value} belongs to {key}.", "\n", "What belongs to {key}?", "What belongs to {key} is"),
    "columns": Format(
        "name\tweight\theight\tdepth\n", "{key}\t{a}\t{value}\t{b}", "\n", "Give the height of {key}.",
        "The height of {key} is",
    ),
    "dialogue": Format("", "{key}: I have ticket {value}.", "\n", "What ticket has {key}?", "{key}: I have ticket"),
    "assignments": Format("", "{key} <- {value};", " ", "\nEvaluate {key}.", "{key} <-", keys=_distinct(WORDS)),
    "numbered": Format("Results:\n", "{n}. {key} ({value})", "\n", "Give the result of {key}.", "{key} (", "{value}"),
}  # fmt: skip

_CONTROLS: Mapping[str, Callable[[int, random.Random], Prompt]] = {
    "stories": _needle(_stories),
    "repeated": _needle(_repeated),
    "documentation": _needle(_documentation),
}

_TEST_KEYS = _joined(ADJECTIVES, NOUNS, " ")
_SURNAMES = tuple(noun.title() + end for noun in NOUNS for end in ("son", "ley"))
_PEOPLE = _joined([f"{letter}." for letter in "ABCDEFGHJKLMNPRSTVW"], _SURNAMES, " ")

_TEST: Mapping[str, Callable[[int, random.Random], Prompt]] = {
    "csv": Format(
        "product,units\n", "{key},{value}", "\n", "According to the CSV file, how many units of {key} are there?",
        "{key},", "{value}", keys=_TEST_KEYS, values=_number(4),
    ),
    "mapping": Format("", "{key} -> {value}", "\n", "{key} -> ?", "{key} ->", keys=_TEST_KEYS, values=_word),
    "directory": Format(
        "Telephone extensions\n\n", "{key} ....... {value}", "\n", "\nI need to call {key}. Which extension do I dial?",
        "The extension of {key} is", keys=_PEOPLE, values=_number(5),
    ),
    "markup": Format(
        "<stock>\n", '<article name="{key}"><price>{value}</price></article>', "\n",
        "</stock>\n\nHow much is the {key}?", "The price of the {key} is", keys=_TEST_KEYS, values=_number(3),
    ),
    "log": Format(
        "", "12:{a} INFO sensor={key} reading={value}", "\n", "\nWhat did the sensor {key} report?",
        "sensor={key} reading=", "{value}", keys=_joined(ADJECTIVES, NOUNS, "_"), values=_number(4),
    ),
    "letters": Format(
        "", "Dear {key}, your room is number {value}.", " ", "\n\nWhich room was {key} given?",
        "{key} was given room number", keys=_PEOPLE, values=_number(3),
    ),
}  # fmt: skip


_LISTING = "Here is a list of names and numbers.\n"
_KINDS = """
    wooden silver golden red blue green yellow white black brown pink purple heavy light small large round square tall
    narrow soft smooth plain striped painted polished folding portable
"""
_GOODS = """
    lamp table chair mirror clock basket blanket pillow carpet curtain bottle kettle bowl plate spoon knife drum flute
    guitar kite ball doll puzzle box bag belt hat coat scarf jacket
"""
_THINGS = tuple(f"{kind} {good}" for kind in _KINDS.split() for good in _GOODS.split())
_PLACES = """
    lighthouse library museum castle harbour theatre station hospital observatory laboratory palace airport bakery
    brewery cathedral embassy factory gallery hotel monastery prison school stadium warehouse
"""


def _multi_kv(size: int, rng: random.Random) -> Prompt:
    pairs = list(zip(rng.sample(NAMES, size), _number(2)(rng, size), strict=True))
    (first, a), (second, b), (third, c) = rng.sample(pairs, 3)
    asked = f"numbers of {first}, {second} and {third}"
    listed = "\n".join(f"{name}: {number}" for name, number in pairs)
    return Prompt(f"{_LISTING}{listed}\nWhat are the {asked}?", f"The {asked} are", f" {a}, {b}, {c}")


def _paragraphs(size: int, rng: random.Random) -> Prompt:
    paragraphs = [paragraph(rng) for _ in range(size)]
    subject = f"secret code of the {rng.choice(_PLACES.split())}"
    code = rng.randint(1000, 9999)
    sentences = rng.choice(paragraphs)
    sentences.insert(rng.randint(0, len(sentences)), f"The {subject} is {code}.")
    text = "\n\n".join(map(" ".join, paragraphs))
    return Prompt(f"{text}\n\nWhat is the {subject}?", f"The {subject} is", f" {code}")


_SMALLEST, _LARGEST = 10, 999


def _max_of(size: int, rng: random.Random) -> Prompt:
    # The answer is drawn first, evenly: the largest of many even draws would nearly always be one of the last few.
    answer = rng.randint(_SMALLEST + size - 1, _LARGEST)
    numbers = [answer, *rng.sample(range(_SMALLEST, answer), size - 1)]
    rng.shuffle(numbers)
    listed = ", ".join(map(str, numbers))
    return Prompt(f"Which of these numbers is the largest?\n{listed}", "The largest number is", f" {answer}")


_TWO_DIGITS, _ANY_NAME = _number(2), _distinct(NAMES)
_KV = Format(
    _LISTING, "{key}: {value}", "\n", "What is the number of {key}?", "{key}:", keys=_ANY_NAME, values=_TWO_DIGITS
)
_HOUSES = Format(
    "", "{key} lives in house {value}.", " ", "\nIn which house does {key} live?", "{key} lives in house",
    keys=_ANY_NAME, values=_TWO_DIGITS,
)  # fmt: skip
_PRICES = Format(
    "", "A {key} costs {value} dollars.", " ", "\nHow much does the {key} cost?", "The {key} costs",
    keys=_distinct(_THINGS), values=_TWO_DIGITS,
)  # fmt: skip
_JSON = Format(
    "{{", '"{key}": {value}', ", ", 'What is the value of "{key}"?', '"{key}":', keys=_ANY_NAME, values=_TWO_DIGITS,
    after="}",
)  # fmt: skip

SINGLE: tuple[Task, ...] = (
    Task("kv", 1, "the number of one name in a list of n", SIZES, len(NAMES), _KV),
    Task("max", 1, "the largest of n different numbers", SIZES, 640, _max_of),
    Task("needle", 1, "one fact in n paragraphs of filler", (4, 8, 16, 32, 64, 128), 4096, _paragraphs),
    Task("multi-kv", 1, "the numbers of three names in a list of n", SIZES, len(NAMES), _multi_kv, least=3),
    Task("houses", 1, "the house of one person among n, in sentences", SIZES, len(NAMES), _HOUSES),
    Task("prices", 1, "the price of one thing among n, in sentences", SIZES, len(_THINGS), _PRICES),
    Task("json", 1, "the value of one key of a JSON object with n", SIZES, len(NAMES), _JSON),
)
"""Tasks that belong to no group."""


def _tasks(kind: str, makers: Mapping[str, Callable[[int, random.Random], Prompt]], what: str) -> tuple[Task, ...]:
    return tuple(Task(f"{kind}/{name}", 1, f"{what} ({name})", _SIZES, _MOST, make) for name, make in makers.items())


TRAINING: tuple[Task, ...] = _tasks("training", _TRAINING, "one of n items")
"""The formats that `sharpmax.calibrate` trains on by default."""

CONTROLS: tuple[Task, ...] = _tasks("control", _CONTROLS, "one fact in n lines")
"""Prompts without rival items, which `sharpmax.calibrate` trains on as well: they must not get worse."""

FORMATS: tuple[Task, ...] = _tasks("formats", _TEST, "one of n items")
"""The formats to test with; nothing is ever trained on them."""
