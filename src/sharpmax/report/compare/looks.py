"""How methods look: a few stand out, the others stand back."""

from __future__ import annotations

from sharpmax.report.compare.facts import highlighted, methods
from sharpmax.report.looks import PALE, Look, in_turn
from sharpmax.report.tables import Tables

__all__ = ["looks_of"]


def looks_of(tables: Tables) -> dict[str, Look]:
    """The look of every method, those that stand out first."""
    chosen = highlighted(tables)
    found = {method: in_turn(method, place) for place, method in enumerate(chosen)}
    others = [method for method in methods(tables) if method not in found]
    return found | {method: Look(method, PALE, None, method, width=1.1, layer=1.5) for method in others}
