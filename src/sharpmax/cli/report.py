"""`sharpmax report`: draw saved results again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli.terminal import wrote

__all__ = ["add_to", "draw_saved", "report"]


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
