"""Several keys at once: the numbers of three names in a list, in the order asked for."""

from __future__ import annotations

import random

from sharpmax.tasks.kv import listing
from sharpmax.tasks.names import NAMES
from sharpmax.tasks.numbered import SIZES, numbered
from sharpmax.tasks.prompt import Prompt, Task

__all__ = ["TASK"]


def _make(size: int, rng: random.Random) -> Prompt:
    pairs = numbered(NAMES, size, rng)
    (first, a), (second, b), (third, c) = rng.sample(pairs, 3)
    asked = f"numbers of {first}, {second} and {third}"
    return Prompt(f"{listing(pairs)}\nWhat are the {asked}?", f"The {asked} are", f" {a}, {b}, {c}")


TASK = Task(
    name="multi-kv",
    version=1,
    summary="the numbers of three names in a list of n",
    sizes=SIZES,
    least=3,
    most=len(NAMES),
    make=_make,
)
