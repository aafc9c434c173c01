"""Boards for paper: maps of cells with a letter in each, as a matplotlib figure."""

from __future__ import annotations

from typing import Any

from sharpmax.lazy import require
from sharpmax.report.board import STEPS, Board, BoardMap, step_of
from sharpmax.report.looks import DIVERGING_SCALE, SOFT
from sharpmax.report.shades import shades
from sharpmax.report.static_parts import plain, sheet, titles

__all__ = ["static_board"]

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
