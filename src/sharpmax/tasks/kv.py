"""Key and value: the number of one name in a list."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sharpmax.tasks.names import NAMES
from sharpmax.tasks.numbered import SIZES, numbered
from sharpmax.tasks.prompt import Prompt, Task

__all__ = ["TASK", "listing"]


def listing(pairs: Sequence[tuple[str, int]]) -> str:
    """A list of names and numbers, one pair a line."""
    return "Here is a list of names and numbers.\n" + "\n".join(f"{name}: {number}" for name, number in pairs)


def _make(size: int, rng: random.Random) -> Prompt:
    pairs = numbered(NAMES, size, rng)
    name, number = rng.choice(pairs)
    return Prompt(f"{listing(pairs)}\nWhat is the number of {name}?", f"{name}:", f" {number}")


TASK = Task(
    name="kv",
    version=1,
    summary="the number of one name in a list of n",
    sizes=SIZES,
    most=len(NAMES),
    make=_make,
)
