"""What all figures for the screen share: texts, axes, and a layout in the looks of the page."""

from __future__ import annotations

import html
import math
from typing import Any

from sharpmax.report.looks import GRID, INK, PAGE, SOFT
from sharpmax.report.plot import Axis, thinned

__all__ = ["FONT", "axis_of", "base_layout", "domain_of", "nth", "safe"]

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


def axis_of(axis: Axis, domain: list[float], anchor: str, ticks: int) -> dict[str, Any]:
    """An axis of a panel that lies within `domain`."""
    spec: dict[str, Any] = {
        "title": {"text": safe(axis.label), "font": {"size": 12.5, "color": SOFT.light}, "standoff": 8},
        "domain": domain,
        "anchor": anchor,
        "automargin": True,
        # A finger that scrolls the page must not drag the axes instead.
        "fixedrange": True,
        "range": [math.log10(end) for end in axis.limits] if axis.log else list(axis.limits),
        "type": "log" if axis.log else "linear",
        "hoverformat": ",.0f" if axis.log else "",
        "showline": True,
        "linecolor": SOFT.light,
        "gridcolor": GRID.light,
        "zeroline": False,
        "tickfont": {"size": 11.5},
        "tickangle": 0,
    }
    if axis.hover:
        spec["unifiedhovertitle"] = {"text": axis.hover}
    if axis.ticks is not None:
        shown = thinned(axis.ticks, ticks)
        spec |= {"tickvals": [at for at, _ in shown], "ticktext": [safe(text) for _, text in shown]}
    return spec
