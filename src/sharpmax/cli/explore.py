"""`sharpmax explore`: an interactive page about dispersion."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import options
from sharpmax.cli.json_output import answer
from sharpmax.cli.run import out_folder
from sharpmax.cli.terminal import say, wrote


def explore(
    context: typer.Context,
    out: options.Out = Path("explore"),
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Write an interactive page about softmax dispersion.

    It needs no network.
    """
    from sharpmax.report.explore.page import FILE_NAME, write

    page = write(out_folder(context) / FILE_NAME)
    wrote([page])
    if as_json:
        answer({"files": [str(page)]})
    if opened and not webbrowser.open(page.resolve().as_uri()):
        say("No browser found. Open the file in one.")
