"""Names, words and filler paragraphs for prompts. A change here changes the version of the tasks that use it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"

NAMES: tuple[str, ...] = tuple((DATA / "names.txt").read_text(encoding="utf-8").split())
"""Distinct given names of one word."""

WORDS: tuple[str, ...] = tuple((DATA / "words.txt").read_text(encoding="utf-8").split())
"""Distinct common words of four to nine letters."""

_LISTS = json.loads((DATA / "vocabulary.json").read_text(encoding="utf-8"))
ADJECTIVES: tuple[str, ...] = tuple(_LISTS["adjectives"].split())
NOUNS: tuple[str, ...] = tuple(_LISTS["nouns"].split())
PLACES: tuple[str, ...] = tuple(_LISTS["places"].split())
GOODS: tuple[str, ...] = tuple(
    f"{quality} {good}" for quality in _LISTS["qualities"].split() for good in _LISTS["goods"].split()
)
"""Things to buy, each a quality and a good."""

_SENTENCES: tuple[str, ...] = tuple(_LISTS["sentences"])
_SLOTS: dict[str, tuple[str, ...]] = {slot: tuple(words.split()) for slot, words in _LISTS["slots"].items()}


def paragraph(rng: random.Random) -> list[str]:
    """Return the three or four sentences of a filler paragraph of about fifty tokens."""
    patterns = rng.sample(_SENTENCES, rng.randint(3, 4))
    return [re.sub(r"{(\w+)}", lambda slot: rng.choice(_SLOTS[slot[1]]), pattern) + "." for pattern in patterns]
