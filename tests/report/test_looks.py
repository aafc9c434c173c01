"""Lines that share a figure can be told apart, on paper and on the screen."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import sharpmax
from sharpmax.report.figures import made
from sharpmax.report.interactive import traces
from sharpmax.report.plot import Axis, Panel, Plot, Series, legend
from sharpmax.report.registry import story_of
from sharpmax.report.static import static_figure
from sharpmax.report.theme import PALE, in_turn
from sharpmax.results import load

ROOT = Path(sharpmax.__file__).parents[2]
SAVED = sorted((ROOT / "results").glob("*/results.json"))
COUNT = 14


def many(*, marker: Any = "full") -> Plot:
    looks = [in_turn(f"arm {place}", place) for place in range(COUNT)]
    lines = [Series(look.label, look, [1.0, 2.0], [n, n], "", marker=marker) for n, look in enumerate(looks)]
    return Plot("", "", "", "", [Panel(Axis("x", (0.0, 3.0)), Axis("y", (0.0, 20.0)), lines)])


def distinct(found: list[Any]) -> bool:
    return all(one != other for one, other in combinations(found, 2))


@pytest.mark.parametrize("marker", ["full", None])
def test_fourteen_lines_differ_on_paper(marker: Any) -> None:
    figure = static_figure(many(marker=marker))

    def style(line: Any) -> tuple[Any, ...]:
        # matplotlib keeps the dashes of a line in a private field alone.
        return line.get_color(), line.get_marker(), line._unscaled_dash_pattern

    assert distinct([style(line) for line in figure.axes[0].lines])
    assert distinct([style(line) for line in figure.legends[0].get_lines()])
    assert len(figure.axes[0].lines) == len(figure.legends[0].get_lines()) == COUNT


@pytest.mark.parametrize("marker", ["full", None])
def test_fourteen_lines_differ_on_the_screen(marker: Any) -> None:
    drawn = traces(many(marker=marker))
    found = [(one["line"]["color"], one["line"]["dash"], one.get("marker", {}).get("symbol")) for one in drawn]
    assert len(found) == COUNT
    assert distinct(found)


@pytest.mark.parametrize("path", SAVED, ids=lambda path: path.parent.name)
def test_lines_of_committed_figures_differ(path: Path) -> None:
    tables = load(path).tables
    story = story_of(tables)
    for figure in [] if story is None else story.figures(tables):
        plot = made(figure, tables)
        if isinstance(plot, Plot):
            entries = [entry for entry in legend(plot) if entry.look.colour != PALE]
            styles = [(e.look.colour, e.stroke, e.marker, e.look.marker if e.marker else None) for e in entries]
            assert distinct(styles), figure.file
