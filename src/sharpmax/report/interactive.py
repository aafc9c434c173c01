"""Figures for the screen: plots as the plain data that plotly draws in a browser.

Each figure comes with two layouts, panels beside each other for a desk and below each other for a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sharpmax.report.interactive_heat import interactive_heat
from sharpmax.report.interactive_small import small_layout
from sharpmax.report.plot import Heat, Panel, Plot, Series
from sharpmax.report.plotly_parts import axis_of, base_layout, domain_of, nth, safe

__all__ = ["interactive_figure", "traces"]

_WIDE_TICKS, _NARROW_TICKS = 12, 6
_WIDE_SMALL, _NARROW_SMALL = 5, 2
"""Small panels beside each other."""

_LETTER = 6.3
"""Pixels of a letter at the end of a line, more or less."""


def interactive_figure(plot: Plot | Heat) -> dict[str, Any]:
    """Traces, the two layouts, and whether one arm is shown at a time; everything is plain JSON."""
    if isinstance(plot, Heat):
        return interactive_heat(plot)
    count = len(plot.panels)
    if plot.small:
        wide, narrow = (small_layout(plot.panels, columns) for columns in (_WIDE_SMALL, _NARROW_SMALL))
    else:
        wide = _layout(plot.panels, count, _WIDE_TICKS // count, height=400)
        narrow = _layout(plot.panels, 1, _narrow_ticks(plot.panels), height=60 + 300 * count)
    return {"data": traces(plot), "wide": wide, "narrow": narrow, "one_at_a_time": False}


def traces(plot: Plot) -> list[dict[str, Any]]:
    """The lines of a plot as plotly's traces."""
    # Plotly's own zorder takes the lines of the axes away; later traces lie on top as well.
    return [
        _trace(series, place)
        for place, panel in enumerate(plot.panels, start=1)
        for series in sorted(panel.series, key=lambda series: series.look.layer)
    ]


def _trace(series: Series, place: int) -> dict[str, Any]:
    colour, style = series.look.colour.light, series.look
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": safe(series.label),
        "x": list(series.x),
        "y": list(series.y),
        **_hover(series),
        "mode": "+".join([*(["lines"] if series.stroke else []), *(["markers"] if series.marker else [])]),
        "line": {"color": colour, "width": style.width * 1.2, "dash": series.line or "solid"},
        "xaxis": nth("x", place),
        "yaxis": nth("y", place),
        "meta": {"arm": series.arm},
    }
    if series.marker and style.marker:
        hollow = series.marker == "hollow"
        trace["marker"] = {
            "color": colour,
            "symbol": style.marker.plotly + ("-open" if hollow else ""),
            "size": style.size * 1.45 + (3.0 if hollow else 0.0),
            "line": {"color": colour, "width": 1.4 if hollow else 0.0},
            "opacity": 0.4 if series.crowded else 1.0,
        }
    if series.end:
        trace["mode"] += "+text"
        trace["text"] = [""] * (len(series.x) - 1) + [safe(series.end)]
        trace |= {"textposition": "middle right", "textfont": {"color": colour, "size": 11.5}, "cliponaxis": False}
    if series.low and series.high and any(low is not None for low in series.low):
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [None if high is None else high - y for y, high in zip(series.y, series.high, strict=True)],
            "arrayminus": [None if low is None else y - low for y, low in zip(series.y, series.low, strict=True)],
            "color": colour,
            "thickness": 1.3,
            "width": 0,
        }
    return trace


def _hover(series: Series) -> dict[str, Any]:
    if not series.hover:
        return {"hoverinfo": "skip"}
    if isinstance(series.hover, str):
        return {"hovertemplate": safe(series.hover) + "<extra></extra>"}
    return {"text": [safe(words) for words in series.hover], "hovertemplate": "%{text}<extra></extra>"}


def _layout(panels: Sequence[Panel], columns: int, ticks: int, height: int) -> dict[str, Any]:
    rows = -(-len(panels) // columns)
    layout = base_layout(height, together=all(panel.together for panel in panels))
    titled = any(panel.title for panel in panels)
    layout["margin"] = {"l": 8, "r": 14 + _beside(panels), "t": 46 if titled else 24, "b": 8}
    for place, panel in enumerate(panels, start=1):
        x, y = domain_of((place - 1) % columns, columns, 0.09), domain_of(rows - 1 - (place - 1) // columns, rows, 0.2)
        layout[nth("xaxis", place)] = axis_of(panel.x, x, nth("y", place), ticks)
        layout[nth("yaxis", place)] = axis_of(panel.y, y, nth("x", place), ticks)
        layout["annotations"] += _words(panel, place, x)
        layout["shapes"] += _lines(panel, place)
    return layout


def _beside(panels: Sequence[Panel]) -> int:
    """Pixels that words at the ends of lines need beside the figure."""
    return max((round(_LETTER * len(series.end)) for panel in panels for series in panel.series), default=0)


def _narrow_ticks(panels: Sequence[Panel]) -> int:
    return _NARROW_TICKS - 2 if _beside(panels) else _NARROW_TICKS


def _words(panel: Panel, place: int, x: list[float]) -> list[dict[str, Any]]:
    """The title of a panel and what its marks mean, all of it where no data can be."""
    found: list[dict[str, Any]] = []
    top = {"yref": nth("y", place) + " domain", "y": 1.0, "yanchor": "bottom", "showarrow": False}
    raised = 18 if any(mark.axis == "x" for mark in panel.marks) else 4
    if panel.title:
        text = f"<b>{safe(panel.title)}</b>"
        found.append({**top, "xref": "paper", "x": x[0], "xanchor": "left", "yshift": raised, "text": text})
    for mark in (mark for mark in panel.marks if mark.text):
        said = {"text": safe(mark.text), "font": {"size": 11.5, "color": mark.colour.light}, "showarrow": False}
        if mark.axis == "x":
            at, *ends = (math.log10(v) if panel.x.log else v for v in (mark.at, *panel.x.limits))
            # Words about a mark near an end of a narrow figure would be cut off if they stood in the middle of it.
            share = (at - ends[0]) / (ends[1] - ends[0])
            anchor = "left" if share < 1 / 3 else "right" if share > 2 / 3 else "center"
            found.append({**top, **said, "xref": nth("x", place), "x": at, "xanchor": anchor})
        else:
            beside = {"xref": nth("x", place) + " domain", "x": 1.0, "xanchor": "right"}
            found.append({**said, **beside, "yref": nth("y", place), "y": mark.at, "yanchor": "bottom"})
    return found


def _lines(panel: Panel, place: int) -> list[dict[str, Any]]:
    shapes = []
    for mark in panel.marks:
        across, along = ("x", "y") if mark.axis == "x" else ("y", "x")
        # Unlike those of annotations, the ends of shapes on a logarithmic axis are not logarithms.
        shapes.append(
            {
                "type": "line",
                "layer": "below",
                f"{across}ref": nth(across, place),
                f"{across}0": mark.at,
                f"{across}1": mark.at,
                f"{along}ref": nth(along, place) + " domain",
                f"{along}0": 0,
                f"{along}1": 1,
                "line": {"color": mark.colour.light, "width": 1.3, "dash": "dot"},
            }
        )
    return shapes
