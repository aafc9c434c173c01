"""Figures of saved results: which results can be drawn, and where the drawings go."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.files import write_bytes, write_text
from sharpmax.lazy import require
from sharpmax.report.plots import NEEDS, build, file_name, plottable
from sharpmax.report.static import STYLE, static_figure
from sharpmax.report.tables import readable

__all__ = ["draw", "drawable", "drawing", "svg_text"]


def drawable(tables: Mapping[str, Any]) -> list[str]:
    """The names of the figures that these tables hold everything for."""
    return list(_drawings(tables))


def draw(tables: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Draw every figure the tables of a results file allow, as SVG and PNG, into `folder`."""
    drawings = _drawings(tables)
    if not drawings:
        known = "; ".join(f"{name} from {sorted(needs)}" for name, needs in NEEDS.items())
        raise FileFormatError(f"results: nothing to draw in tables {sorted(tables)}; allowed: {known}")
    with drawing():
        figures = {}
        for name, make in drawings.items():
            with readable(f"figure {name!r}"):
                figures[name] = make()
        written = []
        for name, figure in figures.items():
            written.append(write_text(Path(folder) / f"{name}.svg", svg_text(figure)))
            written.append(write_bytes(Path(folder) / f"{name}.png", _png(figure)))
    return written


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


def _drawings(tables: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    return {file_name(name, recipe): partial(_static, tables, name, recipe) for name, recipe in plottable(tables)}


def _static(tables: Mapping[str, Any], name: str, recipe: str) -> Any:
    return static_figure(build(tables, name, recipe))


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
