"""Things with a number each, which retrieval tasks list and ask about."""

from __future__ import annotations

import random
from collections.abc import Sequence

__all__ = ["SIZES", "numbered"]

SIZES = (8, 16, 32, 64, 128, 256, 512)
"""How many things to list unless told otherwise."""


def numbered(things: Sequence[str], size: int, rng: random.Random) -> list[tuple[str, int]]:
    """`size` different things in random order, each with a number of two digits; numbers may repeat."""
    return [(thing, rng.randint(10, 99)) for thing in rng.sample(things, size)]
