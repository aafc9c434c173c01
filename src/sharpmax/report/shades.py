"""The colours of a board, in steps, each with an ink that can be read on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Shade", "contrast", "shades"]

_INKS = ("#000000", "#ffffff")


@dataclass(frozen=True)
class Shade:
    """A colour and the ink that stands out on it."""

    fill: str
    ink: str


def shades(scale: Sequence[str], steps: int) -> list[Shade]:
    """So many colours, evenly along a scale of colours.

    >>> [shade.fill for shade in shades(("#000000", "#ffffff"), 3)]
    ['#000000', '#808080', '#ffffff']
    """
    fills = [_between(scale, place / (steps - 1)) for place in range(steps)]
    return [Shade(fill, max(_INKS, key=lambda ink: contrast(ink, fill))) for fill in fills]


def contrast(one: str, other: str) -> float:
    """How far two colours stand apart, from 1 to 21, as the guidelines for accessible pages reckon it.

    >>> round(contrast("#ffffff", "#000000"))
    21
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _between(scale: Sequence[str], share: float) -> str:
    at = share * (len(scale) - 1)
    left = min(int(at), len(scale) - 2)
    ends = zip(_channels(scale[left]), _channels(scale[left + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - left)):02x}" for a, b in ends)


def _channels(colour: str) -> list[int]:
    return [int(colour[start : start + 2], 16) for start in (1, 3, 5)]


def _luminance(colour: str) -> float:
    shares = [value / 255 for value in _channels(colour)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in shares]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
