"""Writing files so that a reader never meets half of one, and reading JSON that somebody may have changed."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from sharpmax.errors import ArgumentError, FileFormatError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The errors of a system whose disk, or a user's share of it, is full."""

FULL_TODO = "the disk is full: make room there, or choose a folder on another disk"


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` to `path` in one step: the old content stays until the new one is complete."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path` in one step, as `write_text`."""
    with new_file(path) as file:
        file.write(data)
    return Path(path)


@contextmanager
def new_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write and read that gets the name `path` when the block ends, and is removed if an error ends it."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # An ordinary file: the system takes away what the user's umask says, which no thread can read by itself.
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as problem:
        raise cannot_write(path, problem) from problem
    finally:
        with suppress(OSError):  # still there only if something went wrong, whatever it was
            partial.unlink(missing_ok=True)


def append_bytes(path: str | Path, data: bytes) -> None:
    """Add whole lines to the end of a file; when this returns they are on disk.

    If the system refuses, none of them is added. Ctrl-C loses nothing: closing the file writes the rest.
    """
    try:
        with Path(path).open("ab") as file:
            before = file.tell()
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # half of a line is no place to add another to
                    os.truncate(path, before)
                raise
    except OSError as problem:
        raise cannot_write(path, problem) from problem


def cannot_write(path: str | Path, problem: OSError) -> ArgumentError:
    """The error of a file that cannot be written: which, why, and what to do about it."""
    reason = problem.strerror or str(problem)
    todo = FULL_TODO if problem.errno in FULL else "allowed: a path in a folder you may write to"
    return ArgumentError(f"path: cannot write {str(path)!r} ({reason}); {todo}")


@contextmanager
def written_by_others(path: str | Path) -> Iterator[None]:
    """Around libraries that write to `path` themselves: report what the system refuses as for our own files.

    safetensors wraps the system's error in one of its own, which holds no more of it than the text.
    """
    try:
        yield
    except OSError as problem:
        raise cannot_write(path, problem) from problem
    except Exception as problem:
        number = re.search(r"\(os error (\d+)\)", str(problem))
        if type(problem).__name__ != "SafetensorError" or number is None:
            raise
        raise cannot_write(path, OSError(int(number[1]), os.strerror(int(number[1])))) from problem


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; a ValueError of one line says what is wrong with it, whatever it is."""
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("too many brackets inside one another") from None


def read_json(path: str | Path, what: str) -> Any:
    """The value in a JSON file, or an error in one line that says of what kind it is (`what`) and names it."""
    try:
        return parse_json(Path(path).read_bytes())
    except (OSError, ValueError) as problem:
        raise FileFormatError(f"{what}: {str(path)!r} cannot be read as JSON ({problem})") from None


def display_name(word: str | Path) -> str:
    """What results call a model or a folder: its own name, also for `.`, without anything of this machine."""
    path = Path(word).expanduser()
    return path.resolve().name if path.exists() else str(word)
