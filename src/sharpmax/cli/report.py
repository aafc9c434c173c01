"""`sharpmax report`: draw saved results again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli.terminal import progress, wrote
from sharpmax.lazy import require

__all__ = ["add_to", "draw_and_name", "draw_saved", "report", "require_drawing"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: sharpmax report reproduce")(report)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with a results.json.")],
) -> None:
    """Draw the figures and the page of a folder again, from its results.json alone."""
    wrote(draw_saved(folder))


def draw_saved(path: Path) -> list[Path]:
    """Draw everything that saved results (a folder or its results.json) allow, beside them; the page comes last."""
    from sharpmax.experiments.results import load
    from sharpmax.report.figures import draw
    from sharpmax.report.page import write_page

    results = load(path)
    folder = path if path.is_dir() else path.parent
    return [*draw(results.tables, folder), write_page(results.command, results.provenance, results.tables, folder)]


def require_drawing() -> None:
    """Ask for what drawing needs before the work begins that is to be drawn."""
    for package in ("matplotlib", "plotly", "jinja2"):
        require(package, "report", "drawing the report (leave it out with --no-draw)")


def draw_and_name(saved: Path) -> None:
    """Draw what a command has just saved, from the file, as anybody can do again later, and name the drawings."""
    with progress() as note:
        note("drawing")
        files = draw_saved(saved)
    wrote(files)
