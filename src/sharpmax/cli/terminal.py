"""What commands share at the terminal: tables, progress, and a folder to write to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sharpmax.errors import ArgumentError, reject
from sharpmax.experiments.folder import writing

__all__ = [
    "bar",
    "check_resume",
    "folders_held",
    "out_folder",
    "out_folder_if_used",
    "print_table",
    "progress",
    "say",
    "steps_shown",
    "stopped",
    "wrote",
]

_PIPE_WIDTH = 160


def _console(file: IO[str] | None = None, *, stderr: bool = False) -> Console:
    # rich takes NO_COLOR for colours alone and would go on with bold.
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(file=file, stderr=stderr, color_system=colours, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        # In a pipe nobody knows the width of the reader, and a table that is cut says nothing.
        console.width = _PIPE_WIDTH
    return console


def say(text: str = "") -> None:
    """Print text, broken into lines at a terminal's width; in a pipe it stays on one line."""
    console = _console()
    console.print(Text(text), soft_wrap=not console.is_terminal)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print an aligned table: the first column to the left, the others to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = _console()
    # A narrow terminal may break a line of numbers, but no number is ever cut.
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    # rich fills lines up with blanks.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, on a terminal's stderr and nowhere else."""
    console = _console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(text))


def _bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[remark]}"), console=console, transient=True)


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A function that moves a progress bar ahead and shows a remark, on a terminal's stderr and nowhere else."""
    console = _console(stderr=True)
    if not console.is_terminal:
        yield lambda ahead, remark: None
        return
    with _bars(console) as shown:
        task = shown.add_task(what, total=total, remark="")
        yield lambda ahead, remark: shown.update(task, advance=ahead, remark=remark)


@contextmanager
def steps_shown() -> Iterator[Callable[[str, int, int, str], None]]:
    """A function that shows what is being done, how many of how many steps, and a remark; on a terminal alone."""
    console = _console(stderr=True)
    if not console.is_terminal:
        yield lambda what, done, total, remark: None
        return
    with _bars(console) as shown:
        task = shown.add_task("", total=None, remark="")

        def tell(what: str, done: int, total: int, remark: str) -> None:
            shown.update(task, description=what, completed=done, total=total or None, remark=remark)

        yield tell


_held: ContextVar[ExitStack | None] = ContextVar("sharpmax.cli.held", default=None)


@contextmanager
def folders_held() -> Iterator[None]:
    """While a command runs, the folders it writes to are its own; at its end they are let go of."""
    with ExitStack() as stack:
        before = _held.set(stack)
        try:
            yield
        finally:
            _held.reset(before)


def out_folder(out: Path, part: str = "") -> Path:
    """Make the folder, or say what is wrong with it before the work begins and not after.

    It is this command's until the command ends: another one is refused. `part` is for commands of which several may
    write to one folder, each its own part.
    """
    stack = _held.get()
    _make(out)
    if stack is not None:
        stack.enter_context(writing(out, part))
    return out


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as problem:
        raise ArgumentError(
            f"--out: cannot write to {str(out)!r} ({problem.strerror}); allowed: a folder you may write to"
        ) from problem


@contextmanager
def out_folder_if_used(out: Path) -> Iterator[Path]:
    """`out_folder`, which goes away again if it is new and nothing was written to it in the end."""
    with ExitStack() as own:
        stack = _held.get() or own
        if not out.exists():
            stack.callback(_remove_if_empty, out)  # after the lock in it
        _make(out)
        stack.enter_context(writing(out))
        yield out


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty
        folder.rmdir()


def check_resume(resume: bool, out: Path, *files: str) -> None:
    """Reject --resume where `out` has none of the files of an interrupted run: a new one may take hours."""
    if resume and not _any_of(out, files):
        allowed = "the --out folder of an interrupted run"
        reject("--resume", f"{str(out)!r}, which has nothing to resume", allowed, "leave --resume out to start a run")


def stopped(out: Path, *files: str) -> None:
    """Say how to go on after an interruption; `files` are those that `check_resume` asks for."""
    if _any_of(out, files):
        say(f"stopped; the same command with --resume goes on from what is saved in {out}")
    else:
        say("stopped before anything was saved; the same command starts again")


def _any_of(folder: Path, files: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in files)


def wrote(paths: Sequence[Path]) -> None:
    """Name the files a command has written."""
    for path in paths:
        say(f"wrote {path}")
