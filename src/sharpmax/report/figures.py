"""Figures of saved results: which results can be drawn, and where the drawings go."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharpmax.files import write_bytes, write_text
from sharpmax.lazy import require
from sharpmax.report.plot import Board, Heat, Plot
from sharpmax.report.registry import no_story, story_of
from sharpmax.report.section import Figure
from sharpmax.report.static import STYLE, static_figure
from sharpmax.report.tables import readable


def drawable(tables: Mapping[str, Any]) -> list[str]:
    """The names of the figures that these tables hold everything for."""
    return [figure.file for figure in _figures(tables)]


def draw(tables: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Draw every figure the tables of a results file allow, as SVG and PNG, into `folder`."""
    figures = _figures(tables)
    if not figures:
        raise no_story(tables, "draw")
    with drawing():
        drawn = {figure.file: static_figure(made(figure, tables)) for figure in figures}
        written = []
        for name, figure in drawn.items():
            written.append(write_text(Path(folder) / f"{name}.svg", svg_text(figure)))
            written.append(write_bytes(Path(folder) / f"{name}.png", _png(figure)))
    return written


def made(figure: Figure, tables: Mapping[str, Any]) -> Plot | Heat | Board:
    """A figure as a value, or an error that says which tables are damaged."""
    with readable(f"figure {figure.file!r}", tables):
        return figure.make()


@contextmanager
def drawing() -> Iterator[None]:
    """matplotlib's settings of our figures; afterwards the user's are as they were."""
    with require("matplotlib", "report", "drawing figures").rc_context(STYLE):
        yield


def svg_text(figure: Any) -> str:
    """A figure as the text of an SVG file."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    # matplotlib ends some lines with blanks, which a repository would complain about.
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _figures(tables: Mapping[str, Any]) -> Sequence[Figure]:
    story = story_of(tables)
    with readable("the figures", tables):
        return [] if story is None else story.figures(tables)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
