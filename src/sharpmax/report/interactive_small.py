"""Many small panels for the screen: rows of them, the scale of y at the left of each row, labels written once."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from sharpmax.report.looks import SOFT
from sharpmax.report.plot import SMALL_TITLE, Panel
from sharpmax.report.plotly_parts import axis_of, base_layout, domain_of, nth, safe

__all__ = ["small_layout"]

_BODY, _BETWEEN = {1: 220, 2: 150}, 62
"""Pixels of a panel, by the number of rows, and those below it that hold its ticks and the title of the next."""

_BODY_OF_MANY = 112

_MARGIN = {"l": 32, "r": 10, "t": 66, "b": 28}
_TICKS = 4


def small_layout(panels: Sequence[Panel], most: int) -> dict[str, Any]:
    """Panels in rows of up to `most`."""
    columns = min(most, len(panels))
    rows = -(-len(panels) // columns)
    height = rows * _BODY.get(rows, _BODY_OF_MANY) + (rows - 1) * _BETWEEN
    layout = base_layout(height + _MARGIN["t"] + _MARGIN["b"], together=all(panel.together for panel in panels))
    layout["margin"] = _MARGIN
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        x, y = domain_of(column, columns, 0.12 / most), domain_of(rows - 1 - row, rows, _BETWEEN / height)
        small = {"automargin": False, "title": None, "tickfont": {"size": 10.5}}
        across, up = nth("x", place + 1), nth("y", place + 1)
        layout[nth("xaxis", place + 1)] = axis_of(panel.x, x, up, _TICKS) | small
        layout[nth("yaxis", place + 1)] = axis_of(panel.y, y, across, _TICKS) | small | {"showticklabels": column == 0}
        layout["annotations"].append(_title(panel, x, y))
    layout["annotations"].append(_labels(panels[0]))
    return layout


def _title(panel: Panel, x: list[float], y: list[float]) -> dict[str, Any]:
    lines = (safe(line) for line in textwrap.wrap(panel.title, SMALL_TITLE))
    at = {"xref": "paper", "x": x[0], "xanchor": "left", "yref": "paper", "y": y[1], "yanchor": "bottom"}
    return {
        **at, "yshift": 2, "align": "left", "showarrow": False, "font": {"size": 11.5},
        "text": f"<b>{'<br>'.join(lines)}</b>",
    }  # fmt: skip


def _labels(panel: Panel) -> dict[str, Any]:
    """What the axes measure, above everything: on a phone, the middle of the figure is far away."""
    at = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": 1, "yanchor": "bottom", "yshift": 38}
    words = f"↑ {safe(panel.y.label)}    → {safe(panel.x.label)}"
    return {**at, "showarrow": False, "font": {"size": 12.5, "color": SOFT.light}, "text": words}
