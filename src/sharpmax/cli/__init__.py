"""The command line: `sharpmax COMMAND`, one module per command.

Typer and rich are imported by the commands' modules, which are imported here only once they are needed: `sharpmax
env` and `sharpmax --version` answer without them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

import sharpmax
from sharpmax.errors import MissingExtraError, SharpmaxError
from sharpmax.files import FULL, FULL_TODO
from sharpmax.lazy import require

__all__ = ["answer", "main", "only_answers"]

_FAILED = 1
_USAGE_ERROR = 2
_INTERRUPTED = 130
_OURS = "sharpmax: internal error; please report it with the lines above and the output of: sharpmax env"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    A usage error is one line on stderr and 2, what this machine cannot do one line and 1; `--debug` adds the
    traceback. An internal error always shows it, because a second run may take hours.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        # A terminal without ≤ or β shows a question mark, which is better than a crash at the end of a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        with only_answers() if "--json" in words else contextlib.nullcontext():
            code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of our pipe has seen enough; Python would complain once more when it closes stdout.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except Exception as problem:
        code, message = _error_for_users(problem)
        if debug or message is None:
            traceback.print_exc()
        print(_OURS if message is None else f"sharpmax: error: {' '.join(message.split())}", file=sys.stderr)
        return code


def _run(words: list[str]) -> int:
    try:
        for package in ("typer", "rich"):
            require(package, "cli", "the sharpmax command")
    except MissingExtraError:
        if words[:1] == ["env"]:
            from sharpmax.cli.env import main as plain_env

            return plain_env(words[1:])
        if words == ["--version"]:
            print(f"sharpmax {sharpmax.__version__}")
            return 0
        raise
    from sharpmax.cli.app import make_app

    code = make_app()(words, prog_name="sharpmax", standalone_mode=False)
    return code if isinstance(code, int) else 0


def _error_for_users(problem: Exception) -> tuple[int, str | None]:
    """The exit code and the message; None for an internal error."""
    if isinstance(problem, SharpmaxError):
        return _USAGE_ERROR, str(problem)
    # Wrong options and commands: Typer brings its own copy of click or uses the installed one, depending on its
    # version, so the kind of error is recognised by what it can do.
    format_message: Any = getattr(problem, "format_message", None)
    if callable(format_message):
        command = getattr(getattr(problem, "ctx", None), "command_path", "sharpmax")
        return _USAGE_ERROR, f"{format_message().rstrip('. ')}; see: {command} --help"
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return _FAILED, f"out of memory ({str(problem) or 'of this machine'}); use smaller sizes, or --dtype bfloat16"
    if isinstance(problem, OSError) and problem.strerror:
        where = f": {problem.filename}" if problem.filename else ""
        todo = FULL_TODO if problem.errno in FULL else "--debug shows more"
        return _FAILED, f"{problem.strerror}{where}; {todo}"
    return _FAILED, None


_stdout: list[TextIO] = []


@contextmanager
def only_answers() -> Iterator[None]:
    """Redirect whatever commands and libraries print to stderr, so that stdout holds what `answer` prints."""
    _stdout.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _stdout.pop()


def answer(document: Any) -> None:
    """Print a document of plain values as JSON, as files hold it."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    print(text, file=_stdout[-1] if _stdout else sys.stdout)
