"""Heads of the package's own weights."""

from __future__ import annotations

from sharpmax.models.stacked import SingleHeads
from sharpmax.models.weights import Trained, shipped_path


def heads_of(recipe: str, count: int = 2) -> list[SingleHeads]:
    weights = Trained.load(shipped_path(recipe))
    return [weights.heads([position]) for position in range(count)]
