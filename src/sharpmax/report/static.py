"""Draw figures with matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sharpmax.lazy import require
from sharpmax.report.plot import (
    SMALL_TITLE,
    STEPS,
    Axis,
    Board,
    BoardMap,
    Heat,
    LegendEntry,
    Mark,
    Panel,
    Plot,
    Series,
    legend,
    step_of,
    thinned,
)
from sharpmax.report.theme import DIVERGING_SCALE, GRID, HEAT_SCALE, INK, SOFT, Stroke, shades

if TYPE_CHECKING:
    from sharpmax.report.plot import Board, Heat, Plot

STYLE: dict[str, Any] = {
    "font.size": 10.0,
    "text.color": INK.light,
    "axes.labelcolor": INK.light,
    "axes.edgecolor": SOFT.light,
    "xtick.color": SOFT.light,
    "ytick.color": SOFT.light,
    "xtick.labelcolor": INK.light,
    "ytick.labelcolor": INK.light,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID.light,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "svg.hashsalt": "sharpmax",  # the same results give the same file
}
"""matplotlib's settings while a figure is drawn and saved."""

_WIDTH = 10.0


def sheet(height: float) -> Any:
    """An empty `matplotlib.figure.Figure` of the width that all have, in inches."""
    return require("matplotlib.figure", "report", "drawing figures").Figure(
        figsize=(_WIDTH, height), layout="constrained"
    )


def plain(text: str) -> str:
    """Text that matplotlib shows as it is: no mathematics, and no label that it would hide."""
    return text.replace("$", r"\$").lstrip("_")


def titles(figure: Any, plot: Plot | Heat | Board, titled: bool) -> None:
    """Write a figure's title and note above it, if wanted."""
    if not titled:
        return
    note = textwrap.wrap(plain(plot.note), 130)
    # The empty lines keep room for the small print, which is set by itself because it is smaller.
    title = textwrap.wrap(plain(plot.title), 88)
    figure.suptitle("\n".join(title) + "\n" * len(note), x=0.012, ha="left", fontsize=13, fontweight="bold")
    below = 0.1 + 0.22 * len(title)
    height = figure.get_size_inches()[1]
    figure.text(0.012, 1.0 - below / height, "\n".join(note), va="top", fontsize=8.5, color=SOFT.light)


_LINE = 0.21
_TALLEST = 13.0
_LETTERS = 100
"""Columns beside each other on a whole sheet in which letters can still be read."""

_LABELS = 40
"""Rows below each other whose headings can all be read."""


def static_board(board: Board, titled: bool) -> Any:
    """All maps beside each other, on one scale."""
    lines = max(len(one.rows) for one in board.maps)
    figure = sheet(min(_TALLEST, 1.5 + _LINE * max(lines, 4) + (0.5 if titled else 0.0)))
    titles(figure, board, titled)
    axes = figure.subplots(1, len(board.maps), squeeze=False)[0]
    image = None
    for place, (ax, one) in enumerate(zip(axes, board.maps, strict=True)):
        image = _draw(ax, one, letters=len(one.columns) * len(board.maps) <= _LETTERS)
        ax.set_xlabel(plain(board.column_label))
        if place == 0:
            ax.set_ylabel(plain(board.row_label))
    low, high = board.ends
    label = plain(f"{board.scale_label}: {low} below 0, {high} above")
    figure.colorbar(image, ax=axes, label=label, shrink=0.85, pad=0.015)
    figure.supxlabel(plain("   ".join(f"{kind.letter} {kind.name}" for kind in board.kinds)), fontsize=9)
    return figure


def _draw(axes: Any, one: BoardMap, *, letters: bool) -> Any:
    colours = shades(DIVERGING_SCALE, STEPS)
    listed = require("matplotlib.colors", "report", "drawing figures").ListedColormap([shade.fill for shade in colours])
    unknown = float("nan")
    values = [
        [unknown if cell is None or cell.value is None else cell.value for cell in cells] for _, cells in one.rows
    ]
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    if one.title:
        axes.set_title(plain(one.title), loc="left", fontsize=10)
    half = 1.0 + 1.0 / (STEPS - 1)  # the outer colours are centred at the ends of the scale
    image = axes.imshow(values, cmap=listed, vmin=-half, vmax=half, aspect="auto", interpolation="none")
    _gaps(axes, len(one.columns), len(one.rows))
    _ticks(axes.set_xticks, one.columns)
    _ticks(axes.set_yticks, [heading for heading, _ in one.rows])
    for line, (_, cells) in enumerate(one.rows):
        for column, cell in enumerate(cells):
            if cell is not None and letters:
                ink = SOFT.light if cell.value is None else colours[step_of(cell.value)].ink
                letter = axes.text(column, line, plain(cell.letter), ha="center", va="center", fontsize=7.5, color=ink)
                letter.set_in_layout(False)  # it is inside its cell, and measuring hundreds of them takes seconds
    return image


def _gaps(axes: Any, columns: int, rows: int) -> None:
    for set_ticks, many in ((axes.set_xticks, columns), (axes.set_yticks, rows)):
        set_ticks([place - 0.5 for place in range(1, many)], minor=True)
    axes.grid(visible=True, which="minor", color="#ffffff", linewidth=1.0)
    axes.set_axisbelow(False)
    axes.tick_params(which="both", length=0.0)


def _ticks(set_ticks: Any, words: Any) -> None:
    every = -(-len(words) // _LABELS)
    set_ticks(range(0, len(words), every), [plain(word) for word in words[::every]], fontsize=7.5)


_TICKS = 13
"""Labels of sizes that fit beside each other on the whole width."""

_ACROSS = 5
"""Small panels beside each other."""

_SMALL_TICKS = 4

_DASHES: dict[Stroke, Any] = {
    "solid": "-",
    "dash": (0, (4, 3)),
    "dot": (0, (1, 2)),
    "dashdot": (0, (6, 2, 1.5, 2)),
    "longdash": (0, (9, 3)),
}


def static_figure(plot: Plot | Heat | Board, *, titled: bool = True) -> Any:
    """A `matplotlib.figure.Figure`; without its title where the text around it already says it."""
    figure = _drawn(plot, titled)
    # Finding room for everything takes longer than drawing it, and would be done again for each format.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _drawn(plot: Plot | Heat | Board, titled: bool) -> Any:
    if isinstance(plot, Board):
        return static_board(plot, titled)
    return _heat_figure(plot, titled) if isinstance(plot, Heat) else _line_figure(plot, titled)


def _line_figure(plot: Plot, titled: bool) -> Any:
    columns = min(_ACROSS, len(plot.panels)) if plot.small else len(plot.panels)
    rows = -(-len(plot.panels) // columns)
    figure = sheet((1.0 + 1.75 * rows if plot.small else 4.7) + (0.5 if titled else 0.0))
    titles(figure, plot, titled)
    places = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(places.flat, plot.panels, strict=False):
        _draw_panel(axes, panel, _SMALL_TICKS if plot.small else _TICKS // columns)
    for axes in places.flat[len(plot.panels) :]:
        axes.set_visible(False)
    if plot.small:
        _make_small(figure, places, plot.panels)
    entries = legend(plot)
    figure.legend(
        [_handle(entry) for entry in entries],
        [plain(entry.label) for entry in entries],
        loc="outside lower center",
        ncols=min(4, len(entries)),
        fontsize=9,
    )
    return figure


def _make_small(figure: Any, places: Any, panels: Sequence[Panel]) -> None:
    figure.supylabel(plain(panels[0].y.label), fontsize=10)
    across = places.shape[1]
    below = len(panels) - 1 - ((len(panels) - 1) % across) // 2  # in the middle of the last row
    for place, (axes, panel) in enumerate(zip(places.flat, panels, strict=False)):
        axes.set(xlabel=plain(panel.x.label) if place == below else "", ylabel="")
        axes.tick_params(labelsize=7.5, length=2.0)
        axes.set_title("\n".join(textwrap.wrap(plain(panel.title), SMALL_TITLE)), loc="left", fontsize=8.5, pad=4.0)
    for axes in places[:, 1:].flat:
        axes.tick_params(labelleft=False)


def _draw_panel(axes: Any, panel: Panel, ticks: int) -> None:
    for series in panel.series:
        _draw_series(axes, series)
    for mark in panel.marks:
        _draw_mark(axes, mark)
    _set_axis(axes.xaxis, axes.set_xlim, axes.set_xscale, panel.x, ticks)
    _set_axis(axes.yaxis, axes.set_ylim, axes.set_yscale, panel.y, ticks)
    if panel.title:
        raised = 18.0 if any(mark.axis == "x" for mark in panel.marks) else 6.0
        axes.set_title(plain(panel.title), loc="left", fontsize=10.5, pad=raised)


def _draw_series(axes: Any, series: Series) -> None:
    style, colour = series.look, series.look.colour.light
    if series.low and series.high:
        bars = [
            (x, low, high)
            for x, low, high in zip(series.x, series.low, series.high, strict=True)
            if low is not None and high is not None
        ]
        for x, low, high in bars:
            axes.plot([x, x], [low, high], color=colour, linewidth=1.0, zorder=style.layer)
    axes.plot(
        series.x,
        series.y,
        color=colour,
        linestyle=_DASHES[series.line] if series.line else "none",
        linewidth=style.width,
        marker=style.marker.matplotlib if series.marker and style.marker else None,
        markersize=style.size + (2.5 if series.marker == "hollow" else 0.0),
        markerfacecolor="none" if series.marker == "hollow" else colour,
        markeredgewidth=0.0 if series.crowded else 1.0,
        alpha=0.35 if series.crowded else None,
        zorder=style.layer,
    )
    if series.end:
        beside = {"xytext": (3, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.0}
        axes.annotate(plain(series.end), (series.x[-1], series.y[-1]), color=colour, **beside)


def _draw_mark(axes: Any, mark: Mark) -> None:
    line = {"color": mark.colour.light, "linewidth": 1.1, "linestyle": _DASHES["dot"], "zorder": 1.2}
    words = {"color": mark.colour.light, "fontsize": 8.5, "va": "bottom", "textcoords": "offset points"}
    text = plain(mark.text)
    if mark.axis == "x":
        axes.axvline(mark.at, **line)
        # Above the frame, where no data can be.
        above = {"xycoords": ("data", "axes fraction"), "xytext": (0, 3), "ha": "center"}
        axes.annotate(text, (mark.at, 1.0), **above, **words)
    else:
        axes.axhline(mark.at, **line)
        beside = {"xycoords": ("axes fraction", "data"), "xytext": (0, 2), "ha": "right"}
        axes.annotate(text, (1.0, mark.at), **beside, **words)


def _set_axis(axis: Any, set_limits: Any, set_scale: Any, spec: Axis, ticks: int) -> None:
    if spec.log:
        set_scale("log", base=2)
    set_limits(*spec.limits)
    axis.set_label_text(plain(spec.label))
    if spec.ticks is not None:
        shown = thinned(spec.ticks, ticks)
        axis.set_ticks([at for at, _ in shown], [plain(text) for _, text in shown], fontsize=8.5)
        axis.set_tick_params(which="minor", bottom=False)


def _handle(entry: LegendEntry) -> Any:
    colour = entry.look.colour.light
    return require("matplotlib.lines", "report", "drawing figures").Line2D(
        [],
        [],
        color=colour,
        linestyle=_DASHES[entry.stroke] if entry.stroke else "none",
        linewidth=entry.look.width,
        marker=entry.look.marker.matplotlib if entry.marker and entry.look.marker else None,
        markersize=max(5.0, entry.look.size),
        markerfacecolor="none" if entry.marker == "hollow" else colour,
    )


def _heat_figure(plot: Heat, titled: bool) -> Any:
    columns = max(len(panels) for panels in plot.arms.values())
    figure = sheet(1.1 + 2.4 * len(plot.arms) + (0.5 if titled else 0.0))
    titles(figure, plot, titled)
    grid = figure.subplots(len(plot.arms), columns, squeeze=False, sharex=True, sharey=True)
    image = None
    for place, (arm, panels) in enumerate(plot.arms.items()):
        for axes, panel in zip(grid[place], panels, strict=False):
            image = _draw_heat(axes, panel.values, plot)
            if place == 0:
                axes.set_title(plain(panel.title), fontsize=10)
        grid[place][0].set_ylabel("\n".join(filter(None, [plain(plot.labels[arm]), plot.y_label])))
    figure.supxlabel(plot.x_label, fontsize=10)
    figure.colorbar(image, ax=grid, label=plot.scale_label, shrink=0.85, pad=0.015)
    return figure


def _draw_heat(axes: Any, values: Sequence[Sequence[float]], plot: Heat) -> Any:
    first, lines, items = plot.first, len(values), len(values[0])
    axes.grid(visible=False)
    axes.set_xticks([first, first + items - 1])
    axes.set_yticks([first, first + lines - 1])
    return axes.imshow(
        values,
        cmap=_diverging() if plot.diverging else HEAT_SCALE,
        vmin=plot.limits[0],
        vmax=plot.limits[1],
        aspect="auto",
        interpolation="none",
        extent=(first - 0.5, first + items - 0.5, first + lines - 0.5, first - 0.5),
    )


def _diverging() -> Any:
    colours = require("matplotlib.colors", "report", "drawing figures")
    # An odd number of steps: one of them is the very middle.
    return colours.LinearSegmentedColormap.from_list("diverging", DIVERGING_SCALE, N=257)
