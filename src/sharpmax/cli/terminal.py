"""Text, tables and progress at the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

_UNLIMITED = 1000
_SECONDS_BETWEEN_LINES = 10.0

Show = Callable[..., None]
"""Shows progress: `show(what, done=0, total=0, remark="")`."""


def _console(*, stderr: bool = False) -> Console:
    # With NO_COLOR, rich removes colours but keeps bold.
    colours: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(stderr=stderr, color_system=colours, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = _UNLIMITED  # a pipe has no width
    return console


def say(text: str = "") -> None:
    """Print text, wrapped at a terminal's width and on one line in a pipe."""
    console = _console()
    console.print(Text(text), soft_wrap=not console.is_terminal)


def wrote(paths: Sequence[Path]) -> None:
    """Print the files a command has written."""
    for path in paths:
        say(f"wrote {path}")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column left-aligned, the others right-aligned.

    A table wider than the terminal becomes several, each with the first column and as many others as fit.
    """
    console = _console()
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    console.print(Text(title, style="bold"), soft_wrap=True)
    parts = [[0]]
    for place in range(1, len(widths)):
        if sum(widths[one] + 2 for one in (*parts[-1], place)) - 2 > console.width and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(place)
    for chosen in parts:
        for row in (columns, ["─" * width for width in widths], *rows):
            pads = {place: " " * (widths[place] - cell_len(row[place])) for place in chosen}
            print("  ".join(pads[one] + row[one] if one else row[one] + pads[one] for one in chosen).rstrip())
        print()


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Show]:
    """Yield a function that shows progress on stderr: a bar at a terminal, plain lines elsewhere.

    A new stage is printed at once, the same stage at most every ten seconds.
    """
    console = _console(stderr=True)
    stage, last = "", 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    remarks = TextColumn("{task.fields[remark]}")
    with Progress(*columns, remarks, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None, remark="")

        def show(what: str, done: int = 0, total: int = 0, remark: str = "") -> None:
            nonlocal stage, last
            if console.is_terminal:
                if what != stage:
                    bars.reset(task)
                bars.update(task, description=what, completed=done, total=total or None, remark=remark)
            elif what != stage or monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = monotonic()
                share = f"{done:,} of {total:,} ({100 * done / total:.0f}%)" if total else ""
                _print_line(": ".join(filter(None, (what, " ".join(filter(None, (share, remark)))))))
            stage = what

        yield show


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Yield a function that advances `progress` by a number of steps, with a remark."""
    done = 0
    with progress() as show:

        def advance(steps: int, remark: str = "") -> None:
            nonlocal done
            done += steps
            show(what, done, total, remark)

        yield advance
