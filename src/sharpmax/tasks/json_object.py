"""Retrieval from data: the value of one key of a JSON object."""

from __future__ import annotations

import json
import random

from sharpmax.tasks.names import NAMES
from sharpmax.tasks.numbered import SIZES, numbered
from sharpmax.tasks.prompt import Prompt, Task

__all__ = ["TASK"]


def _make(size: int, rng: random.Random) -> Prompt:
    pairs = numbered(NAMES, size, rng)
    key, value = rng.choice(pairs)
    return Prompt(f'{json.dumps(dict(pairs))}\nWhat is the value of "{key}"?', f'"{key}":', f" {value}")


TASK = Task(
    name="json",
    version=1,
    summary="the value of one key of a JSON object with n",
    sizes=SIZES,
    most=len(NAMES),
    make=_make,
)
