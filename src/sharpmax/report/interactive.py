"""Figures as data for plotly."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from sharpmax.report.plot import SMALL_TITLE, Axis, Heat, Panel, Plot, Series, thinned
from sharpmax.report.theme import DIVERGING_SCALE, GRID, HEAT_SCALE, INK, PAGE, SOFT, Colour

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
