"""`sharpmax report` and `sharpmax explore`: pages from saved results."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sharpmax.cli import options
from sharpmax.cli.json_output import answer
from sharpmax.cli.options import BEGIN, TOOLS, add
from sharpmax.cli.terminal import out_folder_if_used, progress, say, wrote
from sharpmax.lazy import require
from sharpmax.results import Results


def explore(
    out: options.Out = Path("explore"),
    opened: Annotated[bool, options.flag("--open/--no-open", options.OUTPUT, "Open the page in the browser.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Move sliders and watch softmax disperse: a page for the browser that needs no network."""
    from sharpmax.report.explore.page import FILE_NAME, write

    with out_folder_if_used(out) as folder:
        page = write(folder / FILE_NAME)
    wrote([page])
    if as_json:
        answer({"files": [str(page)]})
    if opened and not webbrowser.open(page.resolve().as_uri()):
        say("no browser was found here; open the file in one")


_TOGETHER = Path("report")


def add_to(app: typer.Typer) -> None:
    """Add both commands."""
    add(app, explore, example="sharpmax explore --out explore --no-open", panel=BEGIN)
    add(app, report, example="sharpmax report before after --out comparison", panel=TOOLS)


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with a results.json, or a file of sharpmax bench --gpu.")
    ],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="A second one, to compare with: both of sharpmax probe.")
    ] = None,
    out: Annotated[Path | None, options.out(f"DIR, or {_TOGETHER} for two")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Draw the figures and the page of a folder again, or compare two, from their results.json alone."""
    if other is None:
        files = draw_saved(folder, out)
    else:
        with out_folder_if_used(out or _TOGETHER) as drawn_in:
            files = draw_compared(folder, other, drawn_in)
    wrote(files)
    if as_json:
        answer({"files": [str(file) for file in files]})


def draw_saved(path: Path, out: Path | None = None) -> list[Path]:
    """Draw everything that saved results (a folder or its results.json) allow, beside them; the page comes last."""
    from sharpmax.report.gpu import holds_entries, read_entries
    from sharpmax.results import load

    if holds_entries(path):
        from sharpmax.report.gpu import draw_bars

        return [draw_bars(read_entries(path), (out or path.parent) / f"{path.stem}.svg")]

    results = load(path)
    return _drawn(results.command, results.provenance, results.tables, out or _folder_of(path))


def draw_compared(first: Path, second: Path, out: Path) -> list[Path]:
    """Draw two saved results on one page, into `out`; each may be a folder or its results.json."""
    from sharpmax.provenance import typed
    from sharpmax.report.page import together
    from sharpmax.results import load

    names = [_folder_of(path).resolve().name for path in (first, second)]
    saved = [load(path).to_dict() for path in (first, second)]
    tables = together(list(zip(names, saved, strict=True)))
    # Each of the two says by itself where it comes from.
    return _drawn(typed(" ".join(["report", *names]), out=out), {}, tables, out)


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _drawn(command: str, provenance: Mapping[str, Any], tables: Mapping[str, Any], folder: Path) -> list[Path]:
    from sharpmax.report.page import draw, write_page

    return [*draw(tables, folder), write_page(command, provenance, tables, folder)]


def require_drawing() -> None:
    """Ask for what drawing needs before the work begins that is to be drawn."""
    for package in ("altair", "vl_convert", "jinja2"):
        require(package, "report", "drawing the report (leave it out with --no-draw)")


def draw_and_name(saved: Path) -> None:
    """Draw what a command has just saved, from the file, as anybody can do again later, and name the drawings."""
    with progress() as note:
        note("drawing")
        files = draw_saved(saved)
    wrote(files)


def finish(
    results: Results,
    saved: Path | None,
    show: Callable[[Mapping[str, Any]], None],
    *,
    files: Sequence[Path] = (),
    draw: bool = False,
    as_json: bool = False,
) -> None:
    """Print results as tables or as JSON, name their file and others, and draw them from the file."""
    if not as_json:
        show(results.tables)
    wrote([*files, *([] if saved is None else [saved])])
    if draw and saved is not None:
        draw_and_name(saved)
    if as_json:
        answer(results.to_dict())
