"""Figures of saved results: which results can be drawn, and where the drawings go."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.files import write_text
from sharpmax.lazy import require
from sharpmax.report.dispersion import NEEDS as DISPERSION_NEEDS
from sharpmax.report.dispersion import draw_dispersion

__all__ = ["draw", "drawable"]

_DRAWINGS: dict[str, tuple[frozenset[str], Callable[[Mapping[str, Any]], Any]]] = {
    "dispersion": (DISPERSION_NEEDS, draw_dispersion),
}
"""Name of a figure, the tables it is drawn from, and what draws it."""

_STYLE = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "svg.hashsalt": "sharpmax",  # the same results give the same file
}


def drawable(tables: Mapping[str, Any]) -> list[str]:
    """The names of the figures that these tables hold everything for."""
    return [name for name, (needs, _) in _DRAWINGS.items() if needs <= set(tables)]


def draw(tables: Mapping[str, Any], folder: str | Path) -> list[Path]:
    """Draw every figure the tables of a results file allow, as SVG and PNG, into `folder`."""
    names = drawable(tables)
    if not names:
        known = "; ".join(f"{name} from {sorted(needs)}" for name, (needs, _) in _DRAWINGS.items())
        raise FileFormatError(f"results: nothing to draw in tables {sorted(tables)}; allowed: {known}")
    matplotlib = require("matplotlib", "report", "drawing figures")
    written = []
    for name in names:
        with matplotlib.rc_context(_STYLE):
            try:
                figure = _DRAWINGS[name][1](tables)
            except (AttributeError, KeyError, TypeError, ValueError) as problem:
                raise FileFormatError(
                    f"results: the tables of figure {name!r} are damaged ({type(problem).__name__}: {problem}); "
                    "run their command again"
                ) from problem
            written += [_write_svg(figure, Path(folder) / f"{name}.svg"), _write_png(figure, Path(folder), name)]
    return written


def _write_svg(figure: Any, path: Path) -> Path:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    # matplotlib ends some lines with blanks, which a repository would complain about.
    return write_text(path, "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n")


def _write_png(figure: Any, folder: Path, name: str) -> Path:
    path, partial = folder / f"{name}.png", folder / f".{name}.png.partial"
    try:
        figure.savefig(partial, format="png", dpi=160)
        partial.replace(path)
    except OSError as problem:
        partial.unlink(missing_ok=True)
        raise ArgumentError(
            f"path: cannot write {str(path)!r} ({problem.strerror}); allowed: a path in a folder you may write to"
        ) from problem
    return path
