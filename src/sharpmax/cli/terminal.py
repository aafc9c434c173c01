"""Tables, progress and output folders of commands."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from time import monotonic
from typing import IO, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sharpmax.errors import ArgumentError, reject
from sharpmax.experiments.run_folder import writing

_PIPE_WIDTH = 160
_UNLIMITED = 1000
_SECONDS_BETWEEN_LINES = 10.0


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


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], labels: int = 1) -> None:
    """Print an aligned table: the first column to the left, the others to the right.

    A table wider than the terminal is printed as several, each with the first `labels` columns, which say what a row
    is, and as many others as fit.
    """
    console = _console()
    width = console.width if console.is_terminal else _UNLIMITED
    for number, chosen in enumerate(_columns_that_fit(columns, rows, labels, width)):
        table = Table(title=None if number else title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.pad_edge = False
        for place in chosen:
            table.add_column(columns[place], justify="right" if place else "left", no_wrap=True)
        for row in rows:
            table.add_row(*(row[place] for place in chosen))
        _print_whole(console, table)


def _columns_that_fit(
    columns: Sequence[str], rows: Sequence[Sequence[str]], labels: int, width: int
) -> list[list[int]]:
    widths = [max(cell_len(cell) for cell in cells) for cells in zip(columns, *rows, strict=True)]
    between, edges = 3, 2  # what rich leaves between two columns, and at both ends of a line
    first = list(range(labels))
    room = width - edges - sum(widths[:labels]) - between * (labels - 1)
    found, left = [first.copy()], room
    for place in range(labels, len(columns)):
        if left < widths[place] + between and len(found[-1]) > labels:
            found.append(first.copy())
            left = room
        found[-1].append(place)
        left -= widths[place] + between
    return found


def _print_whole(console: Console, table: Table) -> None:
    # One column may still be wider than the terminal: it may break a line, but no number is ever cut.
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    # rich fills lines up with blanks.
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


class _Lines:
    """Progress as plain lines on stderr: each new stage at once, the same stage again every ten seconds at most."""

    def __init__(self) -> None:
        self._stage: str | None = None
        self._last = 0.0

    def show(self, stage: str, detail: str = "") -> None:
        if stage == self._stage and monotonic() - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._stage, self._last = stage, monotonic()
        print(f"{stage}: {detail}" if detail else stage, file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows on stderr what is being done; without a terminal as plain lines."""
    console = _console(stderr=True)
    if not console.is_terminal:
        yield _Lines().show
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(text))


def _share(done: int, total: int, remark: str) -> str:
    share = f"{done:,} of {total:,} ({100 * done / total:.0f}%)" if total else ""
    return " ".join(part for part in (share, remark) if part)


def _bars(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[remark]}"), console=console, transient=True)


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """A function that moves a progress bar on stderr ahead and shows a remark; without a terminal plain lines."""
    console = _console(stderr=True)
    if not console.is_terminal:
        lines, done = _Lines(), 0

        def ahead_by(ahead: int, remark: str) -> None:
            nonlocal done
            done += ahead
            lines.show(what, _share(done, total, remark))

        yield ahead_by
        return
    with _bars(console) as shown:
        task = shown.add_task(what, total=total, remark="")
        yield lambda ahead, remark: shown.update(task, advance=ahead, remark=remark)


@contextmanager
def steps_shown() -> Iterator[Callable[[str, int, int, str], None]]:
    """A function that shows on stderr what is being done, how many of how many steps, and a remark."""
    console = _console(stderr=True)
    if not console.is_terminal:
        lines = _Lines()
        yield lambda what, done, total, remark: lines.show(what, _share(done, total, remark))
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
