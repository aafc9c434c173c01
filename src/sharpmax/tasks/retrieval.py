"""Retrieval tasks for language models: one fact among n in lists, JSON, prose and noise."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from sharpmax.tasks.prompt import SIZES, Prompt, Task, numbered
from sharpmax.tasks.vocabulary import NAMES, paragraph


def listing(pairs: Sequence[tuple[str, int]]) -> str:
    """A list of names and numbers, one pair a line."""
    return "Here is a list of names and numbers.\n" + "\n".join(f"{name}: {number}" for name, number in pairs)


def _make_kv(size: int, rng: random.Random) -> Prompt:
    pairs = numbered(NAMES, size, rng)
    name, number = rng.choice(pairs)
    return Prompt(f"{listing(pairs)}\nWhat is the number of {name}?", f"{name}:", f" {number}")


KV = Task("kv", 1, "the number of one name in a list of n", SIZES, len(NAMES), _make_kv)


def _make_multi_kv(size: int, rng: random.Random) -> Prompt:
    pairs = numbered(NAMES, size, rng)
    (first, a), (second, b), (third, c) = rng.sample(pairs, 3)
    asked = f"numbers of {first}, {second} and {third}"
    return Prompt(f"{listing(pairs)}\nWhat are the {asked}?", f"The {asked} are", f" {a}, {b}, {c}")


MULTI_KV = Task("multi-kv", 1, "the numbers of three names in a list of n", SIZES, len(NAMES), _make_multi_kv, least=3)


def _make_json_object(size: int, rng: random.Random) -> Prompt:
    pairs = numbered(NAMES, size, rng)
    key, value = rng.choice(pairs)
    return Prompt(f'{json.dumps(dict(pairs))}\nWhat is the value of "{key}"?', f'"{key}":', f" {value}")


JSON_OBJECT = Task("json", 1, "the value of one key of a JSON object with n", SIZES, len(NAMES), _make_json_object)


def _make_houses(size: int, rng: random.Random) -> Prompt:
    residents = numbered(NAMES, size, rng)
    name, house = rng.choice(residents)
    prose = " ".join(f"{resident} lives in house {number}." for resident, number in residents)
    return Prompt(f"{prose}\n\nIn which house does {name} live?", f"{name} lives in house", f" {house}")


HOUSES = Task("houses", 1, "the house of one person among n, in sentences", SIZES, len(NAMES), _make_houses)


_KINDS = """
    wooden silver golden red blue green yellow white black brown pink purple heavy light small large round square tall
    narrow soft smooth plain striped painted polished folding portable
"""
_GOODS = """
    lamp table chair mirror clock basket blanket pillow carpet curtain bottle kettle bowl plate spoon knife drum flute
    guitar kite ball doll puzzle box bag belt hat coat scarf jacket
"""
THINGS: tuple[str, ...] = tuple(f"{kind} {good}" for kind in _KINDS.split() for good in _GOODS.split())
"""Distinct things for sale; the article of each is "a"."""


def _make_prices(size: int, rng: random.Random) -> Prompt:
    goods = numbered(THINGS, size, rng)
    thing, price = rng.choice(goods)
    prose = " ".join(f"A {good} costs {number} dollars." for good, number in goods)
    return Prompt(f"{prose}\n\nHow much does the {thing} cost?", f"The {thing} costs", f" {price}")


PRICES = Task("prices", 1, "the price of one thing among n, in sentences", SIZES, len(THINGS), _make_prices)


_PLACES = """
    lighthouse library museum castle harbour theatre station hospital observatory laboratory palace airport bakery
    brewery cathedral embassy factory gallery hotel monastery prison school stadium warehouse
"""


def _make_needle(size: int, rng: random.Random) -> Prompt:
    paragraphs = [paragraph(rng) for _ in range(size)]
    subject = f"secret code of the {rng.choice(_PLACES.split())}"
    code = rng.randint(1000, 9999)
    sentences = rng.choice(paragraphs)
    sentences.insert(rng.randint(0, len(sentences)), f"The {subject} is {code}.")
    text = "\n\n".join(map(" ".join, paragraphs))
    return Prompt(f"{text}\n\nWhat is the {subject}?", f"The {subject} is", f" {code}")


NEEDLE = Task("needle", 1, "one fact in n paragraphs of filler", (4, 8, 16, 32, 64, 128), 4096, _make_needle)


_SMALLEST, _LARGEST = 10, 999


def _make_max_of(size: int, rng: random.Random) -> Prompt:
    # The answer is drawn first, evenly: the largest of many even draws would nearly always be one of the last few.
    answer = rng.randint(_SMALLEST + size - 1, _LARGEST)
    numbers = [answer, *rng.sample(range(_SMALLEST, answer), size - 1)]
    rng.shuffle(numbers)
    listed = ", ".join(map(str, numbers))
    return Prompt(f"Which of these numbers is the largest?\n{listed}", "The largest number is", f" {answer}")


MAX_OF = Task("max", 1, "the largest of n different numbers", (8, 16, 32, 64, 128, 256, 512), 640, _make_max_of)
