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

try:
    import fcntl
except ModuleNotFoundError:  # not every system has it; two runs in one folder then do work twice
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")

RUN = "run.json"
_SHORT = 60
# Libraries wrap the error of the system in errors of their own.
_FULL = ("no space left", "disk quota", "file too large", "pytorchstreamwriter failed", "fail at inline_container")


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
    """Let `folder` hold the run of these settings, or raise: `used` is whether there is something to lose."""
    before = read_run(folder)
    if before is not None and used and not resume:
        raise ArgumentError(
            f"--out: {str(folder)!r} holds a run already; add --resume to go on with it, or choose another folder"
        )
    if before is not None and (used or resume):
        check_identity(folder / RUN, before, plain(identity))
    write_text(folder / RUN, json.dumps(plain(identity), indent=2, ensure_ascii=False) + "\n")


@contextmanager
def writing(folder: Path, part: str = "") -> Iterator[None]:
    """For as long as this lasts no other run writes to `folder`, or to that `part` of what is written there.

    The system releases the lock when the process ends, killed or not: a file that is left then stops nobody.
    """
    path = folder / (f".{part}.lock" if part else ".lock")
    while True:
        try:
            file = path.open("a")
        except OSError as problem:
            raise cannot_write(path, problem) from problem
        with file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ArgumentError(
                    f"--out: another run is writing to {str(folder)!r} now; wait for its end, or choose another folder"
                ) from None
            except OSError:
                pass  # some network file systems know no locks
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue  # another run removed that file when it ended, so that a lock on it means nothing
            try:
                yield
                return
            finally:
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # while it is still ours


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


@dataclass(frozen=True)
class Outcome:
    """The result of a task."""

    record: dict[str, Any]  # plain JSON values, finite numbers only
    blob: bytes | None = None  # kept as a file, and given to the tasks that come after


_BLOBS = "blobs"
_AGAIN = "and run the same command with --resume: only what is missing is done again"


class RunStore:
    """Outcomes in a folder by key: one line of JSON each, blobs as files. A kill loses what is in flight alone."""

    def __init__(self, folder: Path, name: str = "outcomes.jsonl") -> None:
        self._folder, self._path = Path(folder), Path(folder) / name
        # By key: the record, and the digest of the blob.
        self._entries: dict[str, tuple[dict[str, Any], str | None]] = {
            key: (record, digest)
            for key, record, digest in read_lines(self._path, _parsed, f"remove that line {_AGAIN}")
        }

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
        return self._entries[key][0]

    def blob(self, key: str) -> bytes | None:
        """The blob of a finished task; None if it has none."""
        digest = self._entries[key][1]
        if digest is None:
            return None
        file = self._blob_file(key)
        data = file.read_bytes() if file.is_file() else None
        if data is None or hashlib.sha256(data).hexdigest() != digest:
            what = "is missing" if data is None else "is not what sharpmax wrote"
            raise FileFormatError(
                f"--out: {str(file)!r} {what}; restore it, or remove the line of {key!r} from {str(self._path)!r} "
                f"{_AGAIN}"
            )
        return data

    def _blob_file(self, key: str) -> Path:
        """A name that people can read and that no other key has."""
        name = re.sub("[^A-Za-z0-9.]+", "-", key).strip("-.")[:80]
        return self._folder / _BLOBS / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"

    def add(self, key: str, outcome: Outcome) -> None:
        """Store an outcome; when this returns it is on disk."""
        self.add_all({key: outcome})

    def add_all(self, outcomes: Mapping[str, Outcome]) -> None:
        """Store several outcomes at once."""
        entries, lines = {}, ""
        with disk_watched(self._folder):
            for key, outcome in outcomes.items():
                digest, record = None, plain(outcome.record)
                if outcome.blob is not None:
                    digest = hashlib.sha256(outcome.blob).hexdigest()
                    write_bytes(self._blob_file(key), outcome.blob)
                entries[key] = record, digest
                lines += json.dumps({"key": key, "record": record, "blob": digest}, ensure_ascii=False) + "\n"
            append_bytes(self._path, lines.encode())
        self._entries |= entries


def _parsed(body: Any) -> tuple[str, dict[str, Any], str | None]:
    return str(body["key"]), dict(body["record"]), None if body["blob"] is None else str(body["blob"])


def read_lines(path: Path, parse: Callable[[Any], T], advice: str) -> list[T]:
    """Parse every whole line of a file of JSON lines; `advice` says what to do about one that is not ours."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # a killed run leaves half a line at the end
    found: list[T] = []
    try:
        found.extend(parse(parse_json(line)) for line in lines)
    except (ValueError, KeyError, TypeError, AttributeError):
        number = len(found) + 1
        raise FileFormatError(f"--out: line {number} of {str(path)!r} is not what sharpmax wrote; {advice}") from None
    return found


def drop_half_line(path: Path) -> None:
    """Remove the half of a line that a killed process may have left at the end of a file."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
