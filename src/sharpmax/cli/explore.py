"""`sharpmax explore`: the page with sliders, opened in a browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.answers import answer
from sharpmax.cli.commands import BEGIN, add
from sharpmax.cli.terminal import out_folder_if_used, say, wrote
from sharpmax.report.explore import FILE_NAME, write

__all__ = ["add_to", "explore"]


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    add(app, explore, example="sharpmax explore --out explore --no-open", panel=BEGIN)


def explore(
    out: options.Out = Path("explore"),
    opened: Annotated[bool, options.flag("--open/--no-open", options.OUTPUT, "Open the page in the browser.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Move sliders and watch softmax disperse: a page for the browser that needs no network."""
    with out_folder_if_used(out) as folder:
        page = write(folder / FILE_NAME)
    wrote([page])
    if as_json:
        answer({"files": [str(page)]})
    if opened and not webbrowser.open(page.resolve().as_uri()):
        say("no browser was found here; open the file in one")
