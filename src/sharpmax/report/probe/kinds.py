"""The kinds of heads: their order and the letters that stand for them."""

from __future__ import annotations

from collections.abc import Iterable

from sharpmax.report.probe.facts import UNKNOWN

__all__ = ["in_order", "letter_of"]

_LETTERS = {"dispersing": "D", "uniform": "U", "sharp": "S", "local": "L", "sink": "K", UNKNOWN: "?"}
"""From the least focused to those that hold on to something; sharp and sink cannot both be S."""


def letter_of(kind: str) -> str:
    """The letter of a kind; one that nobody knows has its first.

    >>> letter_of("sink"), letter_of("wide")
    ('K', 'W')
    """
    return _LETTERS.get(kind, kind[:1].upper())


def in_order(kinds: Iterable[str]) -> list[str]:
    """Kinds in their order, each once, those that nobody knows last.

    >>> in_order(["sink", "wide", "dispersing", "sink"])
    ['dispersing', 'sink', 'wide']
    """
    known = set(kinds)
    return [kind for kind in _LETTERS if kind in known] + sorted(known - _LETTERS.keys())
