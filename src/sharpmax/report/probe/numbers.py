"""Numbers of heads as they are written, those that are not known among them."""

from __future__ import annotations

from collections.abc import Callable

from sharpmax.report.grid import NOTHING
from sharpmax.report.words import count, points

__all__ = ["keys", "said", "signed", "weight"]


def said(value: float | None, words: Callable[[float], str]) -> str:
    """A number in its words, or the sign for none."""
    return NOTHING if value is None else words(value)


def signed(value: float | None) -> str:
    """A slope or a bias.

    >>> signed(0.744), signed(None)
    ('+0.74', '–')
    """
    return said(value, lambda one: points(one, 2))


def weight(value: float | None) -> str:
    """A weight between 0 and 1, in percent without its sign; among many keys most are next to nothing.

    >>> weight(0.25), weight(0.00001), weight(0.0)
    ('25.0', '< 0.1', '0.0')
    """
    return said(value, lambda one: "< 0.1" if 0.0 < one < 0.001 else f"{100.0 * one:.1f}")


def keys(value: float | None) -> str:
    """A number of keys that need not be whole.

    >>> keys(3.14), keys(1234.5)
    ('3.1', '1,234')
    """
    return said(value, lambda one: f"{one:.1f}" if one < 100.0 else count(one))
