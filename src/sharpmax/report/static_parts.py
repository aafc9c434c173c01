"""What all figures for paper share: settings, a sheet, its title, and texts that mean no mathematics."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from sharpmax.lazy import require
from sharpmax.report.looks import GRID, INK, SOFT

if TYPE_CHECKING:
    from sharpmax.report.board import Board
    from sharpmax.report.plot import Heat, Plot

__all__ = ["STYLE", "plain", "sheet", "titles"]

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
