"""The largest of n numbers."""

from __future__ import annotations

import random

from sharpmax.tasks.prompt import Prompt, Task

__all__ = ["TASK"]

_SMALLEST, _LARGEST = 10, 999


def _make(size: int, rng: random.Random) -> Prompt:
    # The answer is drawn first, evenly: the largest of many even draws would nearly always be one of the last few.
    answer = rng.randint(_SMALLEST + size - 1, _LARGEST)
    numbers = [answer, *rng.sample(range(_SMALLEST, answer), size - 1)]
    rng.shuffle(numbers)
    listed = ", ".join(map(str, numbers))
    return Prompt(f"Which of these numbers is the largest?\n{listed}", "The largest number is", f" {answer}")


TASK = Task(
    name="max",
    version=1,
    summary="the largest of n different numbers",
    sizes=(8, 16, 32, 64, 128, 256, 512),
    most=640,
    make=_make,
)
