"""`sharpmax report` and `sharpmax explore`: pages of saved results, and an interactive page about dispersion."""

from __future__ import annotations

import shlex
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from sharpmax.cli import answer, options
from sharpmax.cli.run import draw, draw_saved, out_folder
from sharpmax.cli.terminal import say, wrote

_TOGETHER = Path("report")


def report(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with results.json, or a file of bench --gpu.")],
    other: Annotated[Path | None, typer.Argument(metavar="OTHER", help="Second probe, to compare.")] = None,
    out: Annotated[Path | None, options.out(f"DIR, or {_TOGETHER} for two")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Draw figures and page from results.json, or compare two."""
    if other is None:
        files = draw_saved(folder, out)
    else:
        context.params["out"] = out or _TOGETHER
        files = draw_compared(folder, other, out_folder(context))
    wrote(files)
    if as_json:
        answer({"files": [str(file) for file in files]})


def draw_compared(first: Path, second: Path, out: Path) -> list[Path]:
    """Draw two saved results (folders or their results.json) on one page, into `out`."""
    from sharpmax.provenance import without_machine
    from sharpmax.report.page import together
    from sharpmax.results import Results, load

    names = [(path if path.is_dir() else path.parent).resolve().name for path in (first, second)]
    tables = together([(name, load(path).to_dict()) for name, path in zip(names, (first, second), strict=True)])
    command = shlex.join(["sharpmax", "report", *names, "--out", without_machine(out)])
    return draw(Results(command, {}, tables), out)  # each of the two has its own provenance


def explore(
    context: typer.Context,
    out: options.Out = Path("explore"),
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Write an interactive page about softmax dispersion.

    The page works offline.
    """
    from sharpmax.report.explore import FILE_NAME, write

    page = write(out_folder(context) / FILE_NAME)
    wrote([page])
    if as_json:
        answer({"files": [str(page)]})
    if opened and not webbrowser.open(page.resolve().as_uri()):
        say("No browser found. Open the file in one.")
