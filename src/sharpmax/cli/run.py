"""The run of a command: output folder, recorded command line, and how results are saved, printed and drawn."""

from __future__ import annotations

import hashlib
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from sharpmax.cli import answer
from sharpmax.cli.env import missing_packages
from sharpmax.cli.terminal import print_table, progress, say, wrote
from sharpmax.errors import ArgumentError, MissingExtraError, reject
from sharpmax.experiments.run_folder import writing
from sharpmax.files import display_name
from sharpmax.lazy import require
from sharpmax.provenance import without_machine
from sharpmax.results import FILE_NAME, Results, collect, load

_NOT_RECORDED = (
    "resume", "draw", "as_json", "processes", "data", "engine", "workers", "address", "save_every",
)  # fmt: skip
"""Parameters that do not affect the numbers."""

_WITH_TEXT, _DATA = ("policy", "task", "own"), ("model", "text", "dataset", "without", "weights")
"""Parameters that name files: results hold the text of the first, and only a hash of the others."""


def out_folder(context: typer.Context, part: str = "") -> Path:
    """Create the folder of `--out` and lock it until the command ends; then remove it if it is new and empty.

    With `part`, only that part is locked: several processes may write to one folder.
    """
    out = Path(context.params["out"])  # some versions of Typer leave it a str

    def remove_if_empty() -> None:
        with suppress(OSError):  # not empty
            out.rmdir()

    if not out.exists():
        context.call_on_close(remove_if_empty)  # runs after the lock is released
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as problem:
        raise ArgumentError(
            f"--out: cannot write to {str(out)!r} ({problem.strerror}); allowed: a folder you may write to"
        ) from problem
    context.with_resource(writing(out, part))
    return out


def check_new_gguf(option: str, file: Path) -> None:
    """Reject a path that is not that of a new GGUF file."""
    if file.suffix.lower() != ".gguf" or file.exists():
        reject(option, repr(str(file)), "a new file that ends in .gguf", "a model is never written over another")


def check_resume(context: typer.Context, *files: str) -> None:
    """Reject --resume if --out has none of the files of an interrupted run: a new run may take hours."""
    out = Path(context.params["out"])
    if context.params["resume"] and not any((out / name).is_file() for name in files):
        allowed = "the --out folder of an interrupted run"
        reject("--resume", f"{str(out)!r}, which has nothing to resume", allowed, "leave --resume out to start a run")


@contextmanager
def resumable(folder: Path, *files: str) -> Iterator[None]:
    """On Ctrl-C, print how to resume; `files` are those of `check_resume`."""
    try:
        yield
    except KeyboardInterrupt:
        if any((folder / name).is_file() for name in files):
            say(f"Interrupted. Run the same command with --resume to continue from {folder}.")
        else:
            say("Interrupted before anything was saved. Run the same command to start again.")
        raise


def command_line(context: typer.Context) -> str:
    """Return the command as a user would type it, with every value that matters and no path of this machine.

    Commands put resolved values, such as the device for `auto`, into `context.params`.
    """
    words = context.command_path.split()
    for param in context.command.params:
        name, value = param.name or "", context.params.get(param.name or "")
        if name in _NOT_RECORDED:
            continue
        if isinstance(value, bool):
            words += [(param.opts if value else param.secondary_opts)[0]] if value != param.default else []
            continue
        for one in _values(value):
            shown = display_name(one) if name in ("model", "models") else ",".join(map(_shown, str(one).split(",")))
            words += [shown] if param.param_type_name == "argument" else [param.opts[0], shown]
    return shlex.join(words)


def _values(given: Any) -> Sequence[Any]:
    return given if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _shown(word: str) -> str:
    """Return a word or NAME=FILE without the folders of this machine."""
    name, equals, file = word.strip().rpartition("=")
    return name + equals + without_machine(Path(file)) if "/" in file and Path(file).exists() else word.strip()


def files_given(context: typer.Context) -> list[dict[str, Any]]:
    """Return name, hash and size of the files that the command names, and the text of policies, tasks and code."""
    from sharpmax.policies.registry import IN_FOLDERS, NAMED
    from sharpmax.tasks.registry import TASKS

    found = []
    for name in (*_WITH_TEXT, *_DATA):
        for word in [word.strip() for one in _values(context.params.get(name)) for word in str(one).split(",")]:
            path = Path(word.rpartition("=")[2])
            if path.is_dir():
                path = next((path / file for file in IN_FOLDERS if (path / file).is_file()), path)
            if word in NAMED or word in TASKS or not path.is_file():
                continue
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(1 << 20):  # it may be larger than memory
                    digest.update(block)
            about: dict[str, Any] = {"name": _shown(word), "sha256": digest.hexdigest(), "bytes": path.stat().st_size}
            if name in _WITH_TEXT:
                about["text"] = path.read_text(encoding="utf-8-sig", errors="replace")
            found.append(about)
    return found


def check_extras(command: str, *extras: tuple[str, str], draw: bool = False) -> None:
    """Raise MissingExtraError for a missing (package, extra) before the work begins."""
    for package, extra in extras:
        require(package, extra, f"sharpmax {command}")
    if draw and (missing := missing_packages("report")):
        raise MissingExtraError(missing[0], "report", "drawing the report (leave it out with --no-draw)")


def print_report(tables: Mapping[str, Any]) -> None:
    """Print the tables of each part of the report, then its headline and notes."""
    from sharpmax.report.page import report_of

    report = report_of(tables)
    for part in report.parts:
        of_part = f"{part.label}: " if len(report.parts) > 1 else ""
        for table in part.tables:
            rows = [[f"{c.text} ({c.small})" if c.small else c.text for c in row] for row in table.rows]
            print_table(of_part + table.title, [f"{c.text} {c.small}".strip() for c in table.head], rows)
            say(table.note)
    for sentence in (*report.headline, *report.notes):
        say(sentence)
    say()


def finish(
    context: typer.Context,
    tables: Mapping[str, Any],
    folder: Path | None,
    show: Callable[[Mapping[str, Any]], None] = print_report,
    *,
    name: str = FILE_NAME,
    files: Sequence[Path] = (),
) -> None:
    """Save tables with their command and provenance, print them, and draw the page from the saved file.

    `files` are those the command has written before.
    """
    results = collect(command_line(context), tables, seed=context.params["seed"], files=files_given(context))
    saved = [] if folder is None else [results.save(folder / name)]
    show_results(context, results, show, [*files, *saved])


def show_results(
    context: typer.Context, results: Results, show: Callable[[Mapping[str, Any]], None], files: Sequence[Path] = ()
) -> None:
    """Print results as tables or JSON, print the names of files, and draw the last of them."""
    if not context.params["as_json"]:
        show(results.tables)
    wrote(files)
    if context.params.get("draw"):
        with progress() as note:
            note("drawing")
            drawn = draw_saved(files[-1])
        wrote(drawn[-1:])  # the page has every figure
    if context.params["as_json"]:
        answer(results.to_dict())


def draw_saved(path: Path, out: Path | None = None) -> list[Path]:
    """Draw saved results (a folder or its results.json) into `out`, or beside them; the page comes last."""
    from sharpmax.report.gpu import draw_bars, holds_entries, read_entries

    if holds_entries(path):
        return [draw_bars(read_entries(path), (out or path.parent) / f"{path.stem}.svg")]
    return draw(load(path), out or (path if path.is_dir() else path.parent))


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw figures and page into `folder`; return the files, the page last."""
    from sharpmax.report.page import draw as draw_figures
    from sharpmax.report.page import write_page

    page = write_page(results.command, results.provenance, results.tables, folder)
    return [*draw_figures(results.tables, folder), page]
