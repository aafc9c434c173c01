"""The folder of a run: its settings, its lock, and the results of finished tasks, from which it resumes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError
from sharpmax.files import FULL, append_bytes, cannot_write, parse_json, write_bytes, write_text

T = TypeVar("T")

_SHORT = 60


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they come back from a JSON file; ValueError or TypeError where JSON cannot hold them."""
    found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
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
            f"--out: {str(folder)!r} is full ({text[:120]}); free some space and run the same command with --resume: "
            "what was saved before is still there"
        ) from problem


_BLOBS = "blobs"
_AGAIN = "and run the same command with --resume: only what is missing is done again"


@dataclass(frozen=True)
class Outcome:
    """The result of a task."""

    record: dict[str, Any]  # plain JSON values, finite numbers only
    blob: bytes | None = None  # kept as a file, and given to the tasks that come after


@dataclass(frozen=True)
class _Entry:
    record: dict[str, Any]
    blob: Mapping[str, Any] | None  # file, size and digest
    line: int


class RunStore:
    """Outcomes in a folder by key: one line of JSON each, blobs as files. A kill loses what is in flight alone."""

    def __init__(self, folder: Path, name: str = "outcomes.jsonl") -> None:
        self._folder, self._path = Path(folder), Path(folder) / name
        self._entries: dict[str, _Entry] = {}
        self._count = 0
        for number, (key, record, blob) in enumerate(read_lines(self._path, _parsed, f"remove that line {_AGAIN}"), 1):
            self._entries[key] = _Entry(record, blob, number)
            self._count = number
            if blob is not None:
                file = self._folder / _BLOBS / blob["file"]
                if not file.is_file() or file.stat().st_size != blob["bytes"]:
                    raise self._damaged(key, file)

    def _damaged(self, key: str, file: Path) -> FileFormatError:
        what = "is not what sharpmax wrote" if file.is_file() else "is missing"
        return FileFormatError(
            f"--out: {str(file)!r}, which belongs to {key!r}, {what}; restore it, or remove line "
            f"{self._entries[key].line} of {str(self._path)!r} {_AGAIN}"
        )

    def claim(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Let the folder hold the run of these settings, or raise."""
        if self._entries and read_run(self._folder) is None:
            raise FileFormatError(
                f"--out: {str(self._folder)!r} holds outcomes but no {RUN} with their settings; restore it, or choose "
                "another folder"
            )
        belongs(self._folder, identity, used=bool(self._entries), resume=resume)

    def clear(self) -> None:
        """Forget all outcomes."""
        self._path.unlink(missing_ok=True)
        self._entries.clear()
        self._count = 0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder, and remove what a killed run left half-written."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with disk_watched(self._folder), writing(self._folder, self._path.stem):
            drop_half_line(self._path)
            for unfinished in (self._folder / _BLOBS).glob(".*.partial"):
                unfinished.unlink(missing_ok=True)
            yield

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def keys(self) -> list[str]:
        """Keys in the order in which their outcomes came."""
        return list(self._entries)

    def record(self, key: str) -> dict[str, Any]:
        """The record of a finished task."""
        return self._entries[key].record

    def blob(self, key: str) -> bytes | None:
        """The blob of a finished task; None if it has none."""
        about = self._entries[key].blob
        if about is None:
            return None
        file = self._folder / _BLOBS / about["file"]
        data = file.read_bytes() if file.is_file() else b""
        if len(data) != about["bytes"] or hashlib.sha256(data).hexdigest() != about["sha256"]:
            raise self._damaged(key, file)
        return data

    def add(self, key: str, outcome: Outcome) -> None:
        """Store an outcome; when this returns it is on disk."""
        self.add_all({key: outcome})

    def add_all(self, outcomes: Mapping[str, Outcome]) -> None:
        """Store several outcomes at once."""
        bodies: list[dict[str, Any]] = []
        with disk_watched(self._folder):
            for key, outcome in outcomes.items():
                about = None
                if outcome.blob is not None:
                    # A name that people can read and that no other key has.
                    name = re.sub("[^A-Za-z0-9.]+", "-", key).strip("-.")[:80]
                    name = f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
                    digest = hashlib.sha256(outcome.blob).hexdigest()
                    about = {"file": name, "bytes": len(outcome.blob), "sha256": digest}
                    write_bytes(self._folder / _BLOBS / name, outcome.blob)
                bodies.append({"key": key, "record": plain(outcome.record), "blob": about})
            lines = "".join(json.dumps(body, ensure_ascii=False) + "\n" for body in bodies)
            append_bytes(self._path, lines.encode())
        for body in bodies:
            self._count += 1
            self._entries[body["key"]] = _Entry(body["record"], body["blob"], self._count)


def read_lines(path: Path, parse: Callable[[Any], T], advice: str) -> list[T]:
    """Parse every whole line of a file of JSON lines; `advice` says what to do about one that is not ours."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # a killed run leaves half a line at the end
    number = 0
    try:
        found = []
        for number, line in enumerate(lines, 1):  # noqa: B007
            found.append(parse(parse_json(line)))
        return found
    except (ValueError, KeyError, TypeError, AttributeError):
        raise FileFormatError(f"--out: line {number} of {str(path)!r} is not what sharpmax wrote; {advice}") from None


def drop_half_line(path: Path) -> None:
    """Remove the half of a line that a killed process may have left at the end of a file."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _parsed(body: Any) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    key, record, about = str(body["key"]), dict(body["record"]), body["blob"]
    if about is None:
        return key, record, None
    name = about["file"]
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError(f"not the name of a file: {name!r}")
    return key, record, {"file": name, "bytes": int(about["bytes"]), "sha256": str(about["sha256"])}
