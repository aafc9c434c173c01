"""Prompts with known answers, and tasks that generate them at any size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sharpmax.errors import reject, reject_type


@dataclass(frozen=True)
class Prompt:
    """A question to a chat model and its answer."""

    user: str
    """The user's message."""

    opening: str
    """The beginning of the reply; part of the input."""

    answer: str
    """The text that the model must generate next, with its leading space."""

    evidence: str = field(default="", repr=False)
    """The part of `user` that holds the answer, if there is one such part."""

    references: tuple[str, ...] = field(default=(), repr=False)
    """Texts that a generated answer should contain. Its score is the share of them that it contains."""


Make = Callable[[int, random.Random], Prompt]
"""Makes a prompt of a given size."""


@dataclass(frozen=True)
class Task:
    """A family of prompts of any size: `make(size, rng)` returns one of them.

    >>> def make(size: int, rng: random.Random) -> Prompt:
    ...     return Prompt(f"Count to {size}.", "1", "".join(f", {n}" for n in range(2, size + 1)))
    >>> task = Task("count", version=1, summary="count to n", sizes=(2, 4), most=100, make=make)
    >>> task.prompts(4, count=1, seed=0)
    [Prompt(user='Count to 4.', opening='1', answer=', 2, 3, 4')]
    """

    name: str

    version: int
    """Increases when the same seed no longer gives the same prompts."""

    summary: str
    """What is asked, in a few words."""

    sizes: tuple[int, ...]
    """The default sizes."""

    most: int
    """The largest possible size."""

    make: Make

    least: int = 1
    """The smallest possible size."""

    new_tokens: int = 0
    """The number of tokens to generate and score by `Prompt.references`; 0: the next tokens must be the answer."""

    def prompts(self, size: int, count: int, seed: int) -> list[Prompt]:
        """Return `count` prompts. The i-th depends on nothing but the task, its version, the size, the seed and i."""
        self.check_size(size)
        for argument, value in (("count", count), ("seed", seed)):
            if type(value) is not int:
                reject_type(argument, repr(value), "a whole number")
        if count < 1:
            reject("count", count, "1 or more")
        made = []
        for index in range(count):
            # A string seed is hashed with SHA-512: the same numbers in every process and Python version.
            prompt: Any = self.make(size, random.Random(f"{self.name}/{self.version}/{size}/{seed}/{index}"))
            if not isinstance(prompt, Prompt):
                given = f"{type(prompt).__name__} from the task {self.name!r}"
                reject_type("make", given, "a function that makes a Prompt")
            made.append(prompt)
        return made

    def check_size(self, size: int) -> None:
        """Raise ArgumentError for a size that the task does not have."""
        if type(size) is not int:
            reject_type("size", repr(size), "a whole number")
        if not self.least <= size <= self.most:
            reject("size", size, f"{self.least} … {self.most} for the task {self.name!r}")

    def of_length(self, tokens_of: Callable[[Prompt], int]) -> Task:
        """Return this task with sizes in tokens: prompts are as long as possible without exceeding the size."""

        def make(length: int, rng: random.Random) -> Prompt:
            seed = rng.random()

            def fits(size: int) -> bool:
                return tokens_of(self.make(size, random.Random(seed))) <= length

            # Search for the largest size from below: prompts that are far too long are slow to tokenize.
            low, high = self.least - 1, self.least
            while high < self.most and fits(high):
                low, high = high, min(2 * high, self.most)
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if fits(middle) else (low, middle - 1)
            if low < self.least:
                reject("length", length, f"a length that fits the smallest prompt of the task {self.name!r}")
            return self.make(low, random.Random(seed))

        return replace(self, sizes=(1024, 2048, 4096, 8192, 16384), least=1, most=1 << 20, make=make)


SIZES = (8, 16, 32, 64, 128, 256, 512)
"""The default numbers of items."""
