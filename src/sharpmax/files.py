"""Atomic writes, and reading JSON that users may have edited."""

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
"""Error numbers of a full disk or quota."""

FULL_DISK = "the disk is full: free some space, or choose a folder on another disk"


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` to `path` atomically: the old content stays until the new content is complete."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path` atomically."""
    with new_file(path) as file:
        file.write(data)
    return Path(path)


@contextmanager
def new_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a file that is renamed to `path` when the block ends, and removed if the block raises."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # `os.open` applies the umask, which a thread cannot read without changing it for all others.
        handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as problem:
        raise cannot_write(path, problem) from problem
    finally:
        with suppress(OSError):  # exists only after an error
            partial.unlink(missing_ok=True)


def append_bytes(path: str | Path, data: bytes) -> None:
    """Append whole lines to a file; when this returns they are on disk.

    If the system refuses, none of them is appended. After Ctrl-C, closing the file still writes all of them.
    """
    try:
        with Path(path).open("ab") as file:
            before = file.tell()
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # the next line must not follow half of this one
                    os.truncate(path, before)
                raise
    except OSError as problem:
        raise cannot_write(path, problem) from problem


def cannot_write(path: str | Path, problem: OSError) -> ArgumentError:
    """Return the error for a file that cannot be written: which file, why, and what to do."""
    reason = problem.strerror or str(problem)
    todo = FULL_DISK if problem.errno in FULL else "allowed: a path in a folder you may write to"
    return ArgumentError(f"path: cannot write {str(path)!r} ({reason}); {todo}")


@contextmanager
def written_by_others(path: str | Path) -> Iterator[None]:
    """Report the write errors of a library like those of our own files.

    safetensors wraps the OSError in an exception of its own that keeps only the text.
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
    """Return the value of a JSON text, or raise a ValueError with a one-line message."""
    try:
        return json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: str | Path, what: str) -> Any:
    """Return the value in a JSON file, or raise a FileFormatError that names the file and its kind (`what`)."""
    try:
        return parse_json(Path(path).read_bytes())
    except (OSError, ValueError) as problem:
        raise FileFormatError(f"{what}: {str(path)!r} cannot be read as JSON ({problem})") from None


def display_name(word: str | Path) -> str:
    """Return the name of a model or folder for results: the folder's own name (also of `.`), without its path."""
    path = Path(word).expanduser()
    return path.resolve().name if path.exists() else str(word)
