"""Retrieval from prose about things: what one of the goods in a shop costs."""

from __future__ import annotations

import random

from sharpmax.tasks.numbered import SIZES, numbered
from sharpmax.tasks.prompt import Prompt, Task

__all__ = ["TASK", "THINGS"]

_KINDS = """
    wooden silver golden red blue green yellow white black brown pink purple heavy light small large round square tall
    narrow soft smooth plain striped painted polished folding portable
"""
_GOODS = """
    lamp table chair mirror clock basket blanket pillow carpet curtain bottle kettle bowl plate spoon knife drum flute
    guitar kite ball doll puzzle box bag belt hat coat scarf jacket
"""
THINGS: tuple[str, ...] = tuple(f"{kind} {good}" for kind in _KINDS.split() for good in _GOODS.split())
"""Distinct things for sale; the article of each is "a"."""


def _make(size: int, rng: random.Random) -> Prompt:
    goods = numbered(THINGS, size, rng)
    thing, price = rng.choice(goods)
    prose = " ".join(f"A {good} costs {number} dollars." for good, number in goods)
    return Prompt(f"{prose}\n\nHow much does the {thing} cost?", f"The {thing} costs", f" {price}")


TASK = Task(
    name="prices",
    version=1,
    summary="the price of one thing among n, in sentences",
    sizes=SIZES,
    most=len(THINGS),
    make=_make,
)
