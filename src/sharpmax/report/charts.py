"""Altair charts in one theme: panels of lines, points, heat maps and rules, as specs, SVG and PNG.

A figure is a concatenation of panels. Its spec goes into the page, where a script sets the width of the panels, and
through vl-convert into files. Data are CSV, a third of the size of JSON rows.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.files import write_bytes, write_text
from sharpmax.lazy import require

INK, SOFT, GRID, PALE = "#1b2026", "#5b6570", "#e3e6ea", "#a9b1ba"
PAGE, PANEL, LINK = "#ffffff", "#f6f7f9", "#005a8c"
BLACK, ORANGE, GREEN = "#333333", "#e69f00", "#009e73"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"

DARK = {
    INK: "#e9ecef", SOFT: "#a5afba", GRID: "#343b43", PALE: "#66717c", PAGE: "#15191e", PANEL: "#1d2228",
    LINK: "#7cc4f0", BLACK: "#f2f2f2", ORANGE: "#f0b73a", GREEN: "#2cc79c", BLUE: "#56b4e9", VERMILLION: "#ff8a3d",
    PURPLE: "#e6a0c8", "#2166ac": "#6fb1ee", "#92c5de": "#2c5f8f", "#eceef0": "#2b3138", "#f4a582": "#9a4b2c",
    "#b2182b": "#ff8d6b",
}  # fmt: skip
"""The colour that replaces each on a dark page."""

DIVERGING = ("#2166ac", "#92c5de", "#eceef0", "#f4a582", "#b2182b")
"""Colours of heat maps around zero, from negative to positive."""

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

_COLOURS = (BLACK, VERMILLION, BLUE, GREEN, PURPLE, ORANGE)
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left", "triangle-right")
LINE = "stroke"
"""The `shape` of lines without markers."""

Rows = Sequence[Mapping[str, Any]]
"""The data of a chart; lines and points have `variant`, `x` and `y`, and `low` and `high` where they have bars."""

_WIDTH = 760
"""Width in pixels of a figure in a file."""

PICK, HEAD = "pick", "head"
"""The selection of the legend, and the parameter of the attention head that is shown."""


@dataclass(frozen=True)
class Style:
    """Colour, marker and dash of a legend entry."""

    colour: str
    shape: str = "circle"
    dash: Sequence[int] = (1, 0)


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """A style for each name; no two of the first 24 share both colour and marker."""
    return {
        name: Style(_COLOURS[place % len(_COLOURS)], _SHAPES[place % len(_SHAPES)]) for place, name in enumerate(names)
    }


def altair() -> Any:
    """The altair module, or MissingExtraError."""
    return require("altair", "report", "drawing figures")


def data(rows: Rows) -> Any:
    """Rows as inline CSV data of a chart, with numbers of five digits; None is an empty cell."""
    alt = altair()
    names = list(dict.fromkeys(name for row in rows for name in row))
    numbers = {name for name in names if all(isinstance(row.get(name), int | float | None) for row in rows)}
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    known = ([row.get(name) for name in names] for row in rows)
    writer.writerows([float(f"{one:.5g}") if isinstance(one, float) else one for one in row] for row in known)
    parse = {name: "number" if name in numbers else "string" for name in names}
    return alt.InlineData(values=buffer.getvalue(), format=alt.CsvDataFormat(type="csv", parse=parse))


def size_axis(sizes: Sequence[float], title: str, more: Sequence[float] = (), name: str = "x") -> Any:
    """A logarithmic axis of the field `name` with a tick at each size; `more` widens it."""
    alt = altair()
    low, high = min([*sizes, *more]), max([*sizes, *more])
    return (alt.X if name == "x" else alt.Y)(
        f"{name}:Q",
        title=title,
        scale=alt.Scale(type="log", base=2, domain=[low / 1.12, high * 1.12], nice=False),
        axis=alt.Axis(values=list(sizes), format=",d", labelOverlap="greedy", labelSeparation=5, grid=name == "y"),
    )


def axis(name: str, title: str, domain: Sequence[float] | None = None, **options: Any) -> Any:
    """A linear axis of the field `x` or `y`."""
    alt = altair()
    given = {} if domain is None else {"domain": list(domain), "clamp": True}
    scale = alt.Scale(nice=domain is None, zero=False, **given)
    marks = alt.Axis(labelOverlap="greedy", labelSeparation=5, **options)
    return (alt.X if name == "x" else alt.Y)(f"{name}:Q", title=title, scale=scale, axis=marks)


def percent_axis(title: str) -> Any:
    """A y axis in percent."""
    return axis("y", title, (-3.0, 103.0), values=list(range(0, 101, 20)), grid=True)


def tooltip(**titles: str) -> list[Any]:
    """Tooltip fields with their titles; a format may follow a bar: `y="accuracy (%)|.1f"`."""
    alt = altair()
    found = []
    for name, words in titles.items():
        title, _, form = words.partition("|")
        kind = "Q" if form else "N"
        found.append(alt.Tooltip(f"{name}:{kind}", title=title, **({"format": form} if form else {})))
    return found


def _picked() -> Any:
    return altair().selection_point(name=PICK, fields=["variant"], bind="legend", toggle="true")


def by_size(
    title: str, table: Mapping[str, Mapping[str, Any]], x: str, y: Any, styles: Mapping[str, Style], **options: Any
) -> Any:
    """A panel with a line for each variant of a table by size; `options` are those of `lines_panel`.

    Bars are intervals of percentages, else standard errors.
    """
    rows: list[dict[str, Any]] = []
    for variant, row in table.items():
        for n in sorted((n for n in row if n.isdigit() and row[n]["mean"] is not None), key=int):
            cell, mean = row[n], row[n]["mean"]
            rows.append({"variant": variant, "x": int(n), "y": mean})
            if cell.get("low") is not None:
                rows[-1] |= {"low": max(0.0, cell["low"]), "high": cell["high"]}
            elif cell.get("sem") is not None:
                rows[-1] |= {"low": max(0.0, mean - cell["sem"]), "high": mean + cell["sem"]}
    known = sorted({int(n) for row in table.values() for n in row if n.isdigit()})
    return lines_panel(title, rows, size_axis(known, x), y, styles, **options)


def lines_panel(
    title: str, rows: Rows, x: Any, y: Any, styles: Mapping[str, Style], *, under: Sequence[Any] = (),
    hollow: Rows = (), height: int = 270, size: float = 45.0,
) -> Any:  # fmt: skip
    """Error bars, lines and markers of `rows`, and hollow markers, over the layers `under`.

    A variant of the shape `LINE` has no markers. Rows with a `head` are shown if the parameter `HEAD` is that head.
    Tooltips show the columns of lines and points, and every other column under its own name.
    """
    alt = altair()
    names = list(styles)
    colours = alt.Scale(domain=names, range=[style.colour for style in styles.values()])
    shapes = alt.Scale(domain=names, range=[style.shape for style in styles.values()])
    across, up = (channel.to_dict()["title"] or "value" for channel in (x, y))
    words = {"variant": "variant", "x": f"{across}|,", "y": f"{up}|.4~g"}
    if any("low" in row for row in rows):
        words |= {"low": "from|.4~g", "high": "to|.4~g"}
    tips = tooltip(**words, **{name: name for row in rows[:1] for name in row if name not in (*words, "low", "high")})

    def base(some: Rows) -> Any:
        """A chart with axes, colours and legend, but without a mark."""
        chart = alt.Chart(data(some))
        if "head" in some[0]:
            chart = chart.transform_filter(f"datum.head === {HEAD}")
        return chart.encode(
            x=x,
            y=y,
            color=alt.Color("variant:N", scale=colours, legend=alt.Legend(title=None)),
            opacity=alt.when(_picked()).then(alt.value(1.0)).otherwise(alt.value(0.1)),
        )

    def lines(some: Rows, width: float) -> list[Any]:
        dashes: dict[tuple[int, ...], list[Any]] = {}
        for row in some:
            dashes.setdefault(tuple(styles[row["variant"]].dash), []).append(row)
        # One layer per dash: an encoding would put dashes into the legend.
        return [base(part).mark_line(strokeDash=list(dash), strokeWidth=width) for dash, part in dashes.items()]

    def markers(some: Rows, area: float, *, filled: bool) -> Any:
        shape = alt.Shape("variant:N", scale=shapes, legend=alt.Legend(title=None))
        return base(some).mark_point(filled=filled, size=area, strokeWidth=1.6).encode(shape=shape, tooltip=tips)

    known = [row for row in rows if row["y"] is not None]
    plain = [row for row in known if styles[row["variant"]].shape == LINE]
    shown = [row for row in known if styles[row["variant"]].shape != LINE]
    bars = [row for row in shown if row.get("low") is not None]
    layers = list(under)
    if plain:
        hover = base(plain).mark_point(filled=True, size=120).encode(opacity=alt.value(0), tooltip=tips)
        layers += [*lines(plain, 1.3), hover]
    if bars:
        low = alt.Y.from_dict(y.to_dict() | {"field": "low"})
        layers.append(base(bars).mark_rule(strokeWidth=1.3).encode(y=low, y2=alt.Y2("high")))
    if shown:
        layers += [*lines(shown, 2.0), markers(shown, size, filled=True)]
    if hollow:
        layers.append(markers(hollow, 70.0, filled=False))
    return panel(title, *layers, height=height)


def rule(channel: str, at: float, colour: str = SOFT) -> Any:
    """A dashed line across the panel at a value of `x` or `y`."""
    alt = altair()
    base = alt.Chart(data([{"at": at}])).encode(**{channel: alt.datum(at)})
    return base.mark_rule(strokeDash=[2, 3], color=colour, strokeWidth=1.1)


def dots(rows: Rows) -> Any:
    """Small pale points to draw under lines."""
    encoding = {"x": altair().X("x:Q"), "y": altair().Y("y:Q")}
    return altair().Chart(data(rows)).mark_circle(size=14, color=PALE).encode(**encoding)


def panel(title: str | list[str], *layers: Any, height: int = 270) -> Any:
    """Layers in one coordinate system."""
    chart = altair().layer(*layers).properties(height=height, width=300)
    return chart.properties(title=title) if title else chart


def heat_panel(
    title: str | list[str], rows: Rows, x: str, y: str, colour: str, *, domain: Sequence[float], tips: Sequence[Any],
    diverging: bool = False, height: int | None = None, ticks: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """A heat map: a cell for each row at (`x`, `y`), coloured by `value`, with the text in `letter`, if any.

    In maps of heads, x is the head and y the layer. If rows have a `head`, that of the parameter `HEAD` is framed.
    """
    alt = altair()
    colours = {"domainMid": 0, "range": list(DIVERGING), "interpolate": "rgb"} if diverging else {"scheme": "viridis"}
    scale = alt.Scale(domain=list(domain), clamp=True, **colours)
    bar = alt.Legend(title=colour, orient="bottom", gradientLength=200, titleLimit=300)
    chosen_ticks = {} if ticks is None else {"values": list(ticks)}
    marks = alt.Axis(labelOverlap="greedy", labelSeparation=5, ticks=False, domain=False, labelAngle=0, **chosen_ticks)
    base = alt.Chart(data(rows)).encode(
        x=alt.X("x:O", title=x, axis=marks), y=alt.Y("y:O", title=y, axis=marks), tooltip=list(tips)
    )
    rect = base.mark_rect().encode(color=alt.Color("value:Q", scale=scale, legend=bar))
    if "head" in rows[0]:
        chosen = f"datum.head === {HEAD}"
        rect = rect.encode(
            stroke=alt.when(chosen).then(alt.value(INK)).otherwise(alt.value(PAGE)),
            strokeWidth=alt.when(chosen).then(alt.value(2.5)).otherwise(alt.value(0.5)),
        )
    else:
        # A stroke in the colour of the cell closes the gap to the next one. An encoding would add it to the legend,
        # which then shows a few dots instead of the gradient.
        rect = rect.mark_rect(stroke=alt.expr("scale('color', datum.value)"))
    layers = [rect]
    if "letter" in rows[0]:
        # Keep letters readable on the dark ends of the scale.
        strong = f"abs(datum.value) > {0.6 * max(abs(end) for end in domain)}"
        ink = alt.when(strong).then(alt.value(PAGE)).otherwise(alt.value(INK))
        layers.append(base.mark_text(fontSize=10).encode(text="letter:N", color=ink))
    return panel(title, *layers, height=height or max(120, 17 * len({row["y"] for row in rows})))


def figure(
    *panels: Any, columns: int = 2, minimum: int = 330, around: int = 62, names: Sequence[str] = (), head: str = "",
    heads: Sequence[str] = (),
) -> Any:  # fmt: skip
    """A figure of panels, at most `columns` side by side, each at least `minimum` pixels wide without its axis.

    `around` is the width of an axis. With `names`, its entries, the legend fades what is not picked. `head` is the
    initial value of the parameter `HEAD`, `heads` the entries of a menu for it.
    """
    alt = altair()
    columns = min(columns, len(panels))
    width = _WIDTH // columns - around
    drawn = [one.properties(width=width, name=f"panel{place}") for place, one in enumerate(panels)]
    if names:
        layers = drawn[0].layer
        place = next(place for place, layer in enumerate(layers) if layer.encoding.color is not alt.Undefined)
        layers[place] = layers[place].properties(name="legend").add_params(_picked())
    longest = max((len(name) for name in names), default=0)
    meta = {"columns": columns, "minimum": minimum, "around": around, "legend": longest}
    chart = alt.concat(*drawn, columns=columns, spacing={"row": 24, "column": 8}).properties(usermeta=meta)
    if head:
        menu = alt.binding_select(options=list(heads), name="Layer.head ") if heads else alt.Undefined
        chart = chart.add_params(alt.param(name=HEAD, value=head, bind=menu))
    text = {"labelColor": SOFT, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500}
    return chart.configure(
        background=PAGE,
        font=FONT,
        padding=4,
        view={"stroke": None},
        axis={"gridColor": GRID, "domainColor": PALE, "tickColor": PALE, "titlePadding": 8, "tickCount": 6, **text},
        axisY={"minExtent": 30, "maxExtent": 46},
        legend={
            "orient": "top", "columns": max(1, _WIDTH // (7 * longest + 34)), "labelColor": INK, "labelFontSize": 12,
            "labelLimit": 320, "symbolSize": 90, "symbolStrokeWidth": 2, "titleColor": SOFT, "titleFontSize": 12,
            "titleFontWeight": 400, "offset": 12,
        },
        title={"anchor": "start", "color": INK, "fontSize": 13, "subtitleColor": SOFT, "subtitleFontSize": 11.5},
    )  # fmt: skip


def spec_of(chart: Any) -> dict[str, Any]:
    """The Vega-Lite spec of a chart."""
    found: dict[str, Any] = json.loads(json.dumps(chart.to_dict(validate=False)))
    found.pop("$schema", None)
    return found


def write_files(chart: Any, title: str, caption: str, folder: Path, name: str) -> list[Path]:
    """Write a chart with its title as SVG and PNG."""
    spec = titled(chart, title, caption)
    convert = require("vl_convert", "report", "drawing figures")
    return [
        write_text(folder / f"{name}.svg", svg_of(spec)),
        write_bytes(folder / f"{name}.png", convert.vegalite_to_png(spec, scale=2)),
    ]


def titled(chart: Any, title: str, caption: str = "") -> dict[str, Any]:
    """The spec of a chart with a title, and a caption in small print."""
    spec = spec_of(chart)
    spec["title"] = {
        "text": textwrap.wrap(title, 90), "subtitle": textwrap.wrap(caption, 118), "fontSize": 15, "offset": 12,
        "subtitlePadding": 6,
    }  # fmt: skip
    return spec


def svg_of(spec: Mapping[str, Any]) -> str:
    """A spec as SVG, without an ARIA label for each mark."""
    quiet = {**spec, "config": {**spec["config"], "aria": False}}
    return str(require("vl_convert", "report", "drawing figures").vegalite_to_svg(quiet)) + "\n"
