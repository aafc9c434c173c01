"""A number that a reader in a hurry should take away."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tile"]


@dataclass(frozen=True)
class Tile:
    """A number, what it is, and what is to be known about it."""

    value: str
    label: str
    detail: str
