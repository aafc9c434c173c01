"""A needle in a haystack: one fact somewhere in n paragraphs about other things."""

from __future__ import annotations

import random

from sharpmax.tasks.filler import paragraph
from sharpmax.tasks.prompt import Prompt, Task

__all__ = ["TASK"]

_PLACES = """
    lighthouse library museum castle harbour theatre station hospital observatory laboratory palace airport bakery
    brewery cathedral embassy factory gallery hotel monastery prison school stadium warehouse
"""


def _make(size: int, rng: random.Random) -> Prompt:
    paragraphs = [paragraph(rng) for _ in range(size)]
    subject = f"secret code of the {rng.choice(_PLACES.split())}"
    code = rng.randint(1000, 9999)
    sentences = rng.choice(paragraphs)
    sentences.insert(rng.randint(0, len(sentences)), f"The {subject} is {code}.")
    text = "\n\n".join(map(" ".join, paragraphs))
    return Prompt(f"{text}\n\nWhat is the {subject}?", f"The {subject} is", f" {code}")


TASK = Task(
    name="needle",
    version=1,
    summary="one fact in n paragraphs of filler",
    sizes=(4, 8, 16, 32, 64, 128),
    most=4096,
    make=_make,
)
