"""The folder of a run: identity, lock and resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError
from sharpmax.files import FULL, cannot_write, parse_json, write_text

_SHORT = 60


def plain(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are when they come back from a JSON file."""
    found: dict[str, Any] = json.loads(json.dumps(identity))
    return found


def check_identity(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with `path` where a setting was another `before`, and name that setting."""
    for key, value in now.items():
        if (other := before.get(key)) == value:
            continue
        short = max(len(str(other)), len(str(value))) <= _SHORT
        how = f"with {key} {other} and now got {value}" if short else f"with other {key}"
        raise ArgumentError(f"--resume: {str(path)!r} was begun {how}; use the same {key}, or choose another folder")


try:
    import fcntl
except ModuleNotFoundError:  # not every system has it; two runs in one folder then do work twice
    fcntl = None  # type: ignore[assignment]


RUN = "run.json"
# Libraries wrap the error of the system in errors of their own.
_FULL = ("no space left", "disk quota", "file too large", "pytorchstreamwriter failed", "fail at inline_container")


def read_run(folder: Path) -> dict[str, Any] | None:
    """The settings a folder was begun with; None where there are none."""
    path = folder / RUN
    if not path.is_file():
        return None
    try:
        body = parse_json(path.read_bytes())
    except (OSError, ValueError):
        body = None
    if not isinstance(body, dict):
        raise FileFormatError(f"--out: {str(path)!r} is not what sharpmax wrote; remove it, or choose another folder")
    return body


def belongs(folder: Path, identity: Mapping[str, Any], *, used: bool, resume: bool) -> None:
    """Let `folder` hold the run of these settings, or say why not: `used` is whether there is something to lose."""
    before = read_run(folder)
    if before is not None and used and not resume:
        raise ArgumentError(
            f"--out: {str(folder)!r} holds a run already; add --resume to go on with it, or choose another folder"
        )
    if before is not None and (used or resume):
        check_identity(folder / RUN, before, plain(identity))
    write_text(folder / RUN, json.dumps(plain(identity), indent=2, ensure_ascii=False) + "\n")


_open: set[int] = set()


def _let_go() -> None:
    """In a process that was forked: the lock is its parent's, and must not outlive it."""
    for handle in _open:
        with suppress(OSError):
            os.close(handle)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def writing(folder: Path, part: str = "") -> Iterator[None]:
    """For as long as this lasts no other run writes to `folder`, or to that `part` of what is written there.

    The system holds the lock for this process and lets go of it when the process ends, killed or not: the file that is
    left then stops nobody.
    """
    path = folder / (f".{part}.lock" if part else ".lock")
    handle = _locked(path, folder)
    try:
        yield
    finally:
        if handle in _open:  # in a process that was forked meanwhile it is not
            with suppress(OSError):
                path.unlink(missing_ok=True)  # while it is still ours: whoever waits for it looks again
            _open.remove(handle)
            os.close(handle)


def _locked(path: Path, folder: Path) -> int | None:
    """The file with a lock on it; None where the system knows no locks."""
    if fcntl is None:
        return None  # type: ignore[unreachable]
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as problem:
            raise cannot_write(path, problem) from problem
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ArgumentError(
                f"--out: another run is writing to {str(folder)!r} now; wait for its end, or choose another folder"
            ) from None
        except OSError:  # some network file systems know no locks
            os.close(handle)
            return None
        with suppress(OSError):
            if os.fstat(handle).st_ino == path.stat().st_ino:
                _open.add(handle)
                return handle
        os.close(handle)  # another run removed that file when it ended, so that a lock on it means nothing


@contextmanager
def disk_watched(folder: Path, need: int = 0, what: str = "what is written") -> Iterator[None]:
    """Say in one line that a disk is too small: before the work where `need` bytes are not free, or when it is full."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ArgumentError(
            f"--out: {str(folder)!r} has {free / 1e9:.1f} GB free; allowed: a disk with {need / 1e9:.1f} GB, for {what}"
        )
    try:
        yield
    except Exception as problem:
        # A file that cannot be written is an error of our own, with that of the system behind it.
        root = problem.__cause__ if isinstance(problem, SharpmaxError) else problem
        text = " ".join(str(root).split())
        number = root.errno if isinstance(root, OSError) else None
        full = number in FULL or any(one in text.lower() for one in _FULL)
        if root is None or not full:
            raise
        raise SharpmaxError(
            f"--out: {str(folder)!r} is full ({text[:120]}); make room and run the same command with --resume: what "
            "was saved before is still there"
        ) from problem
