"""What all figures for the screen share: texts, axes' names, and a layout in the looks of the page."""

from __future__ import annotations

import html
from typing import Any

from sharpmax.report.looks import GRID, INK, PAGE

__all__ = ["FONT", "base_layout", "domain_of", "nth", "safe"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
"""The fonts of the reader's own system, in text and figures alike."""


def safe(text: str) -> str:
    """Plotly reads a little HTML in texts; ours never mean any."""
    return html.escape(text, quote=False)


def nth(name: str, place: int) -> str:
    """What plotly calls an axis: the first has no number."""
    return name if place == 1 else f"{name}{place}"


def base_layout(height: int, *, together: bool) -> dict[str, Any]:
    """A layout without axes; `together` shows all lines at once when one hovers."""
    return {
        "height": height,
        "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12.5, "color": INK.light},
        "hovermode": "x unified" if together else "closest",
        "hoverlabel": {
            "font": {"family": FONT, "size": 12.5, "color": INK.light},
            "bgcolor": PAGE.light,
            "bordercolor": GRID.light,
        },
        "dragmode": False,
        "annotations": [],
        "shapes": [],
    }


def domain_of(place: int, count: int, gap: float) -> list[float]:
    """Where a panel lies among `count` of them, in shares of the whole."""
    share = (1.0 - gap * (count - 1)) / count
    start = place * (share + gap)
    return [round(start, 4), round(min(1.0, start + share), 4)]
