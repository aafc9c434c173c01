"""Altair charts in one theme: panels of lines, points, heat maps and rules, as specs, SVG and PNG.

A figure is a concatenation of panels. Its spec goes into the page, where a script sets the width of the panels, and
through vl-convert into files. Data are CSV texts, which weigh a third of JSON rows.
"""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
"""The colour that takes the place of each on a dark page."""

DIVERGING = ("#2166ac", "#92c5de", "#eceef0", "#f4a582", "#b2182b")
"""Colours of heat maps around zero, from below to above."""

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

_COLOURS = (BLACK, VERMILLION, BLUE, GREEN, PURPLE, ORANGE)
_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-left", "triangle-right")
_DASHES = ((1, 0), (6, 2, 2, 2), (9, 3))
LINE = "stroke"
"""The shape of lines without markers."""

Rows = Sequence[Mapping[str, Any]]
"""The data of a chart; lines and points have `variant`, `x` and `y`, and `low` and `high` where they have bars."""

_WIDTH = 760
"""Pixels of a figure in a file."""


@dataclass(frozen=True)
class Style:
    """Colour, marker and dash of one entry of a legend."""

    colour: str
    shape: str = "circle"
    dash: Sequence[int] = (1, 0)


def style_at(place: int) -> Style:
    """The style of the variant at a place: the first 8 differ in marker, the first 18 in colour and dash."""
    again, colour = divmod(place, len(_COLOURS))
    return Style(_COLOURS[colour], _SHAPES[(place + again) % len(_SHAPES)], _DASHES[again % len(_DASHES)])


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """A style for each name."""
    return {name: style_at(place) for place, name in enumerate(names)}


def altair() -> Any:
    """The altair module, or MissingExtraError."""
    return require("altair", "report", "drawing figures")


def data(rows: Rows) -> Any:
    """Rows as the inline data of a chart: one CSV text, numbers with five digits, None as an empty cell."""
    alt = altair()
    names = list(dict.fromkeys(name for row in rows for name in row))
    numbers = {name for name in names if all(isinstance(row.get(name), int | float | None) for row in rows)}
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_short(row.get(name)) for name in names] for row in rows)
    parse = {name: "number" if name in numbers else "string" for name in names}
    return alt.InlineData(values=buffer.getvalue(), format=alt.CsvDataFormat(type="csv", parse=parse))


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def size_axis(sizes: Sequence[float], title: str, more: Sequence[float] = ()) -> Any:
    """A logarithmic x axis with a tick at each size; `more` widens it."""
    alt = altair()
    low, high = min(sizes), max([*sizes, *more])
    return alt.X(
        "x:Q",
        title=title,
        scale=alt.Scale(type="log", base=2, domain=[low / 1.12, high * 1.12], nice=False),
        axis=alt.Axis(values=list(sizes), format=",d", labelOverlap="greedy", labelSeparation=5, grid=False),
    )


def axis(name: str, title: str, domain: Sequence[float] | None = None, **options: Any) -> Any:
    """A linear axis of the field `x` or `y`."""
    alt = altair()
    scale = alt.Scale(nice=domain is None, zero=False, **({} if domain is None else {"domain": list(domain)}))
    channel = alt.X if name == "x" else alt.Y
    return channel(
        f"{name}:Q", title=title, scale=scale, axis=alt.Axis(labelOverlap="greedy", labelSeparation=5, **options)
    )


def percent_axis(title: str, low: float = 0.0, high: float = 100.0) -> Any:
    """A y axis in percent."""
    return axis("y", title, (min(-3.0, low), max(103.0, high)), values=list(range(0, 101, 20)), grid=True)


def tooltip(**titles: str) -> list[Any]:
    """Fields of the data with their titles; a format may follow a bar: `y="accuracy (%)|.1f"`."""
    alt = altair()
    found = []
    for name, words in titles.items():
        title, _, form = words.partition("|")
        kind = "Q" if form else "N"
        found.append(alt.Tooltip(f"{name}:{kind}", title=title, **({"format": form} if form else {})))
    return found


@dataclass(frozen=True)
class Plot:
    """What the layers of a panel share: both axes, the styles of the legend, and what a tooltip shows."""

    x: Any
    y: Any
    styles: Mapping[str, Style]
    tips: Sequence[Any] = field(default_factory=list)

    def lines(self, rows: Rows, dash: Sequence[int] | None = None, width: float = 2.0) -> list[Any]:
        """Lines through rows with `variant`, `x` and `y`, in the dashes of their styles or all in one."""
        dashes = dict.fromkeys(tuple(dash or self.styles[row["variant"]].dash) for row in rows)
        # A layer for each dash keeps dashes out of the legend, where they would spoil the markers.
        return [
            self._base([row for row in rows if dash is not None or tuple(self.styles[row["variant"]].dash) == one])
            .mark_line(strokeDash=list(one), strokeWidth=width)
            for one in dashes
        ]  # fmt: skip

    def points(self, rows: Rows, *, filled: bool = True, size: float = 45.0) -> Any:
        """Markers with tooltips; variants that are lines only have none."""
        shown = [row for row in rows if self.styles[row["variant"]].shape != LINE]
        return self.marked(self._base(shown), filled=filled, size=size)

    def marked(self, base: Any, *, filled: bool = True, size: float = 45.0) -> Any:
        """The markers of a `base`."""
        alt = altair()
        shapes = alt.Scale(domain=list(self.styles), range=[style.shape for style in self.styles.values()])
        return base.mark_point(filled=filled, size=size, strokeWidth=1.6).encode(
            shape=alt.Shape("variant:N", scale=shapes, legend=_legend()), tooltip=list(self.tips)
        )

    def hover(self, rows: Rows) -> Any:
        """Invisible markers that give lines without markers a tooltip."""
        base = self._base(rows).mark_point(filled=True, size=120)
        return base.encode(opacity=altair().value(0), tooltip=list(self.tips))

    def bars(self, rows: Rows) -> Any:
        """Error bars from `low` to `high`, for the rows that have them."""
        alt = altair()
        shown = [row for row in rows if row.get("low") is not None and row.get("high") is not None]
        return self._base(shown).mark_rule(strokeWidth=1.3).encode(y=_renamed(alt, self.y, "low"), y2=alt.Y2("high"))

    def all(self, rows: Rows, *, size: float = 45.0) -> list[Any]:
        """Error bars, lines and markers of the same rows."""
        known = [row for row in rows if row["y"] is not None]
        bars = [self.bars(known)] if any(row.get("low") is not None for row in known) else []
        return [*bars, *self.lines(known), self.points(known, size=size)]

    def _base(self, rows: Rows) -> Any:
        return self.base(data(rows))

    def base(self, values: Any) -> Any:
        """A chart of these data with axes, colours and legend, whose mark is yet to be chosen."""
        alt = altair()
        names = list(self.styles)
        colours = alt.Scale(domain=names, range=[self.styles[name].colour for name in names])
        picked = alt.selection_point(name=PICK, fields=["variant"], bind="legend", toggle="true")
        return alt.Chart(values).encode(
            x=self.x,
            y=self.y,
            color=alt.Color("variant:N", scale=colours, legend=_legend()),
            opacity=alt.when(picked).then(alt.value(1.0)).otherwise(alt.value(0.1)),
        )


PICK, HEAD = "pick", "head"
"""The selection that the legend sets, and the parameter that says which attention head is shown."""


def _legend() -> Any:
    return altair().Legend(title=None)


def _renamed(alt: Any, channel: Any, name: str) -> Any:
    body = channel.to_dict()
    return alt.Y(f"{name}:Q", **{key: value for key, value in body.items() if key not in ("field", "type")})


def size_rows(table: Mapping[str, Mapping[str, Any]], most: float = math.inf) -> list[dict[str, Any]]:
    """Rows of a table of variants by size; bars are intervals within 0 and `most`, else standard errors."""
    found = []
    for variant, row in table.items():
        for n in sorted((n for n in row if n.isdigit() and row[n]["mean"] is not None), key=int):
            mean, sem, low, high = (row[n].get(key) for key in ("mean", "sem", "low", "high"))
            if "low" not in row[n] and sem is not None:
                low, high = mean - sem, mean + sem
            ends = (None, None) if low is None else (max(0.0, low), min(most, high))
            found.append({"variant": variant, "x": int(n), "y": mean, "low": ends[0], "high": ends[1]})
    return found


_COLUMNS = ("variant", "x", "y", "low", "high")


def lines_panel(
    title: str, rows: Rows, x: Any, y: Any, styles: Mapping[str, Style], *, under: Sequence[Any] = (),
    hollow: Rows = (), height: int = 270, size: float = 45.0,
) -> Any:  # fmt: skip
    """Error bars, lines and markers of `rows`, and hollow markers, over the layers `under`.

    A tooltip has the columns of lines and points, and every other column of the rows under its name.
    """
    across, up = (channel.to_dict()["title"] or "value" for channel in (x, y))
    words = {"variant": "variant", "x": f"{across}|,", "y": f"{up}|.4~g"}
    if any(row.get("low") is not None for row in rows):
        words |= {"low": "from|.4~g", "high": "to|.4~g"}
    words |= {name: name for row in rows[:1] for name in row if name not in _COLUMNS}
    plot = Plot(x, y, styles, tooltip(**words))
    grey = [row for row in rows if styles[row["variant"]].shape == LINE]
    shown = [row for row in rows if styles[row["variant"]].shape != LINE]
    layers = [*plot.lines(grey, width=1.3), plot.hover(grey)] if grey else []
    layers += plot.all(shown, size=size) if shown else []
    layers += [plot.points(hollow, filled=False, size=70.0)] if hollow else []
    return panel(title, *under, *layers, height=height)


def rule(channel: str, at: float, text: str = "", colour: str = SOFT) -> list[Any]:
    """A dashed line across the panel at a value of `x` or `y`, with a label."""
    alt = altair()
    other = {"y": alt.value(4)} if channel == "x" else {"x": alt.value(4)}
    base = alt.Chart(data([{"at": at, "label": text}])).encode(**{channel: alt.datum(at)})
    layers = [base.mark_rule(strokeDash=[2, 3], color=colour, strokeWidth=1.1)]
    if text:
        place = {"align": "left", "dx": 4, "baseline": "top"} if channel == "x" else {"align": "left", "dy": -6}
        layers.append(base.mark_text(color=colour, fontSize=11, **place).encode(text="label:N", **other))
    return layers


def panel(title: str | list[str], *layers: Any, height: int = 270) -> Any:
    """Layers in one coordinate system."""
    chart = altair().layer(*layers).properties(height=height, width=300)
    return chart.properties(title=title) if title else chart


def heat_panel(
    title: str | list[str], rows: Rows, x: str, y: str, colour: str, *, domain: Sequence[float], tips: Sequence[Any],
    diverging: bool = False, letters: bool = False, height: int | None = None, ticks: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """A cell for each row at (`x`, `y`), coloured by `value`; with `letters`, the text in `letter` on top.

    Heads lie across and layers down. Where rows have a `head`, the one that the parameter `head` names has a frame.
    """
    alt = altair()
    scale = alt.Scale(domain=list(domain), scheme="viridis", clamp=True)
    if diverging:
        scale = alt.Scale(domain=list(domain), domainMid=0, range=list(DIVERGING), interpolate="rgb", clamp=True)
    bar = alt.Legend(title=colour, orient="bottom", gradientLength=200, titleLimit=300)
    chosen_ticks = {} if ticks is None else {"values": list(ticks)}
    marks = alt.Axis(labelOverlap="greedy", labelSeparation=5, ticks=False, domain=False, labelAngle=0, **chosen_ticks)
    base = alt.Chart(data(rows)).encode(
        x=alt.X("x:O", title=x, axis=marks), y=alt.Y("y:O", title=y, axis=marks), tooltip=list(tips)
    )
    rect = base.mark_rect().encode(color=alt.Color("value:Q", scale=scale, legend=bar))
    if any("head" in row for row in rows[:1]):
        chosen = f"datum.head === {HEAD}"
        rect = rect.encode(
            stroke=alt.when(chosen).then(alt.value(INK)).otherwise(alt.value(PAGE)),
            strokeWidth=alt.when(chosen).then(alt.value(2.5)).otherwise(alt.value(0.5)),
        )
    else:
        # Cells in their own colour up to the edge leave no gaps between them.
        rect = rect.encode(stroke=alt.Stroke("value:Q", scale=scale, legend=bar))
    layers = [rect]
    if letters:
        # Letters stay readable on the ends of the scale.
        strong = f"abs(datum.value) > {0.6 * max(abs(end) for end in domain)}"
        ink = alt.when(strong).then(alt.value(PAGE)).otherwise(alt.value(INK))
        layers.append(base.mark_text(fontSize=10).encode(text="letter:N", color=ink))
    return panel(title, *layers, height=height or max(120, 17 * len({row["y"] for row in rows})))


def figure(
    *panels: Any, columns: int = 2, minimum: int = 330, around: int = 62, names: Sequence[str] = (), head: str = "",
    heads: Sequence[str] = (),
) -> Any:  # fmt: skip
    """A figure of panels, at most `columns` beside each other, each at least `minimum` pixels wide without its axis.

    `around` is the width of an axis.
    `names` are the entries of the legend, which then hides what is not picked. `head` adds the parameter of that name,
    `heads` a menu for it.
    """
    alt = altair()
    columns = min(columns, len(panels))
    width = _WIDTH // columns - around
    drawn = [one.properties(width=width, name=f"panel{place}") for place, one in enumerate(panels)]
    if names:
        picked = alt.selection_point(name=PICK, fields=["variant"], bind="legend", toggle="true")
        layers = drawn[0].layer
        place = next(place for place, layer in enumerate(layers) if layer.encoding.color is not alt.Undefined)
        layers[place] = layers[place].properties(name="legend").add_params(picked)
    longest = max((len(name) for name in names), default=0)
    meta = {"columns": columns, "minimum": minimum, "around": around, "legend": longest}
    chart = alt.concat(*drawn, columns=columns, spacing={"row": 24, "column": 8}).properties(usermeta=meta)
    if head:
        menu = alt.binding_select(options=list(heads), name="Layer.head ") if heads else alt.Undefined
        chart = chart.add_params(alt.param(name=HEAD, value=head, bind=menu))
    return chart.configure(**config(max(1, _WIDTH // (7 * longest + 34))))


def config(columns: int) -> dict[str, Any]:
    """The theme, in the colours of a light page."""
    text = {"labelColor": SOFT, "titleColor": INK, "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": 500}
    return {
        "background": PAGE,
        "font": FONT,
        "padding": 4,
        "view": {"stroke": None},
        "axis": {"gridColor": GRID, "domainColor": PALE, "tickColor": PALE, "titlePadding": 8, "tickCount": 6, **text},
        "axisY": {"minExtent": 30, "maxExtent": 46},
        "legend": {
            "orient": "top", "columns": columns, "labelColor": INK, "labelFontSize": 12, "labelLimit": 320,
            "symbolSize": 90, "symbolStrokeWidth": 2, "titleColor": SOFT, "titleFontSize": 12, "titleFontWeight": 400,
            "offset": 12,
        },
        "title": {"anchor": "start", "color": INK, "fontSize": 13, "subtitleColor": SOFT, "subtitleFontSize": 11.5},
    }  # fmt: skip


def spec_of(chart: Any) -> dict[str, Any]:
    """The Vega-Lite spec of a chart, always the same for the same chart."""
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
    # A file has no menus.
    spec["params"] = [
        {key: value for key, value in one.items() if key != "bind" or value == "legend"}
        for one in spec.get("params", [])
    ]
    spec["title"] = {
        "text": textwrap.wrap(title, 90), "subtitle": textwrap.wrap(caption, 118), "fontSize": 15, "offset": 12,
        "subtitlePadding": 6,
    }  # fmt: skip
    return spec


def svg_of(spec: Mapping[str, Any]) -> str:
    """A spec as the text of an SVG file, without a label for each mark."""
    quiet = {**spec, "config": {**spec["config"], "aria": False}}
    return str(require("vl_convert", "report", "drawing figures").vegalite_to_svg(quiet)) + "\n"
