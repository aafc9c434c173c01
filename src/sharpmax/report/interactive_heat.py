"""Heat maps for the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharpmax.report.looks import DIVERGING_SCALE, HEAT_SCALE, INK, SOFT, Colour
from sharpmax.report.plot import Heat
from sharpmax.report.plotly_parts import base_layout, domain_of, nth, safe

__all__ = ["interactive_heat"]


def interactive_heat(plot: Heat) -> dict[str, Any]:
    """Heat maps of all arms in the same places, of which one is shown at a time."""
    count = max(len(panels) for panels in plot.arms.values())
    traces = [
        {
            "type": "heatmap",
            "z": [list(line) for line in panel.values],
            "x0": plot.first,
            "y0": plot.first,
            "xaxis": nth("x", place),
            "yaxis": nth("y", place),
            "coloraxis": "coloraxis",
            "hovertemplate": ", ".join(filter(None, [safe(panel.title), plot.hover])) + "<extra></extra>",
            "meta": {"arm": arm},
        }
        for arm, panels in plot.arms.items()
        for place, panel in enumerate(panels, start=1)
    ]
    titles = [panel.title for panel in next(iter(plot.arms.values()))]
    narrow = 3 if count > 3 else count
    return {
        "data": traces,
        "wide": _heat_layout(plot, titles, count, height=400),
        "narrow": _heat_layout(plot, titles, narrow, height=150 + 200 * -(-count // narrow)),
        "one_at_a_time": True,
    }


def _heat_layout(plot: Heat, titles: Sequence[str], columns: int, height: int) -> dict[str, Any]:
    rows = -(-len(titles) // columns)
    layout = base_layout(height, together=False)
    layout["margin"] = {"l": 34, "r": 14, "t": 26, "b": 104}
    layout["coloraxis"] = {
        "cmin": plot.limits[0],
        "cmax": plot.limits[1],
        "colorscale": _diverging() if plot.diverging else HEAT_SCALE.capitalize(),
        "colorbar": {
            "title": {"text": safe(plot.scale_label), "side": "top", "font": {"size": 12.5, "color": SOFT.light}},
            "orientation": "h",
            "thickness": 10,
            "len": 0.6,
            "x": 0.5,
            "xanchor": "center",
            "y": -46 / (height - 130),  # in shares of the height that the margins leave
            "ypad": 0,
            "yref": "paper",
            "yanchor": "top",
            "outlinewidth": 0,
        },
    }
    lines = next(iter(plot.arms.values()))[0].values
    for place, title in enumerate(titles, start=1):
        column, line = (place - 1) % columns, (place - 1) // columns
        x, y = domain_of(column, columns, 0.025), domain_of(rows - 1 - line, rows, 0.16)
        plain = {"fixedrange": True, "showgrid": False, "zeroline": False, "ticks": "", "tickfont": {"size": 11}}
        layout[nth("xaxis", place)] = {
            **plain,
            "domain": x,
            "anchor": nth("y", place),
            "tickvals": [plot.first, plot.first + len(lines[0]) - 1],
        }
        layout[nth("yaxis", place)] = {
            **plain,
            "domain": y,
            "anchor": nth("x", place),
            "tickvals": [plot.first, plot.first + len(lines) - 1] if column == 0 else [],
            "range": [plot.first + len(lines) - 0.5, plot.first - 0.5],
        }
        layout["annotations"].append(_centred(safe(title), x=sum(x) / 2, y=y[1], shift=3, anchor="bottom", colour=INK))
    layout["annotations"].append(_centred(safe(plot.x_label), x=0.5, y=0.0, shift=-20, anchor="top", colour=SOFT))
    layout["annotations"].append(
        {
            **_centred(safe(plot.y_label), x=0.0, y=0.5, shift=0, anchor="middle", colour=SOFT),
            "xshift": -26,
            "textangle": -90,
        }
    )
    return layout


def _diverging() -> list[list[Any]]:
    return [[place / (len(DIVERGING_SCALE) - 1), colour] for place, colour in enumerate(DIVERGING_SCALE)]


def _centred(text: str, *, x: float, y: float, shift: int, anchor: str, colour: Colour) -> dict[str, Any]:
    return {
        "text": text,
        "xref": "paper",
        "yref": "paper",
        "x": x,
        "y": y,
        "xanchor": "center",
        "yanchor": anchor,
        "yshift": shift,
        "showarrow": False,
        "font": {"size": 12.5, "color": colour.light},
    }
