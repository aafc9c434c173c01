"""Calibration, validation and test: which material belongs to which, once and for all."""

from __future__ import annotations

import hashlib
from typing import Literal, get_args

from sharpmax.errors import reject

__all__ = ["PARTS", "Part", "check_part", "part_of", "part_of_index"]

Part = Literal["calibration", "validation", "test"]

PARTS: tuple[Part, ...] = get_args(Part)

_ROUND: tuple[Part, ...] = ("calibration", "validation", "calibration", "test")


def part_of_index(index: int) -> Part:
    """The part of the item at a place in a list: half are for calibration, a quarter each for the others.

    >>> [part_of_index(i) for i in range(4)]
    ['calibration', 'validation', 'calibration', 'test']
    """
    return _ROUND[index % len(_ROUND)]


def part_of(name: str) -> Part:
    """The part of an item by its name, whatever other items there are; the same in every process and version."""
    return part_of_index(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def check_part(part: str) -> None:
    """Refuse what is not the name of a part."""
    if part not in PARTS:
        reject("part", repr(part), f"one of {list(PARTS)}")
