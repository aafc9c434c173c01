"""`sharpmax report`: draw saved results again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli.terminal import wrote

__all__ = ["add_to", "report"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: sharpmax report demo")(report)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with a results.json.")],
) -> None:
    """Draw the figures of a folder again, from its results.json alone."""
    from sharpmax.experiments.results import load
    from sharpmax.report.figures import draw

    results = load(folder)
    wrote(draw(results.tables, folder if folder.is_dir() else folder.parent))
