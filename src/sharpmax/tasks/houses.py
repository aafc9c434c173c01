"""Retrieval from prose about people: the house that somebody lives in."""

from __future__ import annotations

import random

from sharpmax.tasks.names import NAMES
from sharpmax.tasks.numbered import SIZES, numbered
from sharpmax.tasks.prompt import Prompt, Task

__all__ = ["TASK"]


def _make(size: int, rng: random.Random) -> Prompt:
    residents = numbered(NAMES, size, rng)
    name, house = rng.choice(residents)
    prose = " ".join(f"{resident} lives in house {number}." for resident, number in residents)
    return Prompt(f"{prose}\n\nIn which house does {name} live?", f"{name} lives in house", f" {house}")


TASK = Task(
    name="houses",
    version=1,
    summary="the house of one person among n, in sentences",
    sizes=SIZES,
    most=len(NAMES),
    make=_make,
)
