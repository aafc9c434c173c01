"""`sharpmax explore`: the page with sliders, opened in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli.terminal import say, wrote
from sharpmax.report.explore import FILE_NAME, write

__all__ = ["add_to", "explore"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: sharpmax explore --out explore.html --no-open")(explore)


def explore(
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the page.")] = Path(FILE_NAME),
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
) -> None:
    """Move sliders and watch softmax disperse: a page for the browser that needs no network."""
    page = write(out)
    wrote([page])
    if opened and not webbrowser.open(page.resolve().as_uri()):
        say("no browser was found here; open the file in one")
