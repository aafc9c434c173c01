"""What a measurement is held to, and whether it got there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def held_to(limits: Mapping[str, float], entry: Mapping[str, Any], judged: bool = True) -> dict[str, dict[str, Any]]:
    """Each quantity's limit and whether the entry keeps it (a list by its length); None where this run cannot tell.

    >>> held_to({"ratio": 1.5}, {"ratio": 1.2})
    {'ratio': {'at_most': 1.5, 'reached': True}}
    """
    found = {}
    for quantity, limit in limits.items():
        value = entry.get(quantity)
        number = len(value) if isinstance(value, list) else value
        found[quantity] = {"at_most": limit, "reached": number <= limit if judged and number is not None else None}
    return found
