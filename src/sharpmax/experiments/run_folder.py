"""The folder of a run: its settings, its lock, and the results of finished tasks, from which it resumes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError
from sharpmax.files import FULL, append_bytes, cannot_write, parse_json, write_bytes, write_text

RUN = "run.json"
_SHORT = 60
# Libraries wrap the system error in errors of their own.
_FULL = ("no space left", "disk quota", "file too large", "pytorchstreamwriter failed", "fail at inline_container")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values after a round trip through JSON; ValueError or TypeError if JSON cannot hold them."""
    found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return found


def check_identity(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise if a setting of the run in `path` differs from what it was before, and name it."""
    for key, value in _plain(now).items():
        if (other := before.get(key)) == value:
            continue
        short = max(len(str(other)), len(str(value))) <= _SHORT
        how = f"with {key} {other} and now got {value}" if short else f"with other {key}"
        raise ArgumentError(f"--resume: {str(path)!r} was begun {how}; use the same {key}, or choose another folder")


def read_run(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in a folder; None if there is none."""
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


def claim_folder(folder: Path, identity: Mapping[str, Any], *, used: bool, resume: bool) -> None:
    """Record the settings of a run in `folder`.

    Raises if the folder has results (`used`) and the run does not resume them with the same settings.
    """
    before = read_run(folder)
    if before is not None and used and not resume:
        raise ArgumentError(
            f"--out: {str(folder)!r} holds a run already; add --resume to go on with it, or choose another folder"
        )
    if before is not None and (used or resume):
        check_identity(folder / RUN, before, identity)
    write_text(folder / RUN, json.dumps(identity, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def writing(folder: Path, part: str = "") -> Iterator[None]:
    """Lock `folder`, or one `part` of it, against other runs.

    The system releases the lock when the process ends, even if it is killed: a lock file left behind does no harm.
    """
    path = folder / (f".{part}.lock" if part else ".lock")
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ArgumentError(
            f"--out: another run is writing to {str(folder)!r} now; wait for its end, or choose another folder"
        ) from None
    except OSError as problem:
        raise cannot_write(path, problem) from problem
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is still ours
        lock.release()


@contextmanager
def full_disk_reported(folder: Path) -> Iterator[None]:
    """Report a full disk in one line, with what to do."""
    try:
        yield
    except Exception as problem:
        # Our own error for a file that cannot be written has that of the system as its cause.
        root = problem.__cause__ if isinstance(problem, SharpmaxError) else problem
        text = " ".join(str(root).split())
        if getattr(root, "errno", None) not in FULL and not any(one in text.lower() for one in _FULL):
            raise
        raise SharpmaxError(
            f"--out: {str(folder)!r} is full ({text[:120]}); free some space and run the same command with --resume: "
            "what was saved before is still there"
        ) from problem


@dataclass(frozen=True)
class Outcome:
    """The result of a task."""

    record: dict[str, Any]  # plain JSON values, finite numbers only
    blob: bytes | None = None  # kept as a file and passed to tasks that depend on this one


_AGAIN = "and run the same command with --resume: only what is missing is done again"


class RunStore:
    """Outcomes of tasks by key, stored in a folder: one line of JSON each, blobs as files."""

    def __init__(self, folder: Path, name: str = "outcomes.jsonl") -> None:
        self._folder, self._path, self._blobs = Path(folder), Path(folder) / name, Path(folder) / "blobs"
        self.records: dict[str, dict[str, Any]] = {}
        """Records of finished tasks by key, in the order they finished."""

        self._digests: dict[str, str | None] = {}
        # A killed run leaves half a line at the end.
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.is_file() else []
        try:
            for line in lines:
                body = parse_json(line)
                key = str(body["key"])
                self.records[key], self._digests[key] = dict(body["record"]), body["blob"] and str(body["blob"])
        except (ValueError, KeyError, TypeError, AttributeError):
            number = lines.index(line) + 1
            raise FileFormatError(
                f"--out: line {number} of {str(self._path)!r} is not what sharpmax wrote; remove that line {_AGAIN}"
            ) from None

    def claim(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Record the settings of a run in the folder, or raise if it belongs to another run."""
        if self.records and read_run(self._folder) is None:
            raise FileFormatError(
                f"--out: {str(self._folder)!r} holds outcomes but no {RUN} with their settings; restore it, or choose "
                "another folder"
            )
        claim_folder(self._folder, identity, used=bool(self.records), resume=resume)

    def clear(self) -> None:
        """Forget all outcomes."""
        self._path.unlink(missing_ok=True)
        self.records.clear()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder, and remove half-written data of a killed run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with full_disk_reported(self._folder), writing(self._folder, self._path.stem):
            if self._path.is_file():
                os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
            for unfinished in self._blobs.glob(".*.partial"):
                unfinished.unlink(missing_ok=True)
            yield

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def blob(self, key: str) -> bytes | None:
        """The blob of a finished task; None if it has none."""
        if self._digests[key] is None:
            return None
        file = self._blob_file(key)
        data = file.read_bytes() if file.is_file() else None
        if data is None or _digest(data) != self._digests[key]:
            raise FileFormatError(
                f"--out: {str(file)!r} is missing or is not what sharpmax wrote; restore it, or remove the line of "
                f"{key!r} from {str(self._path)!r} {_AGAIN}"
            )
        return data

    def _blob_file(self, key: str) -> Path:
        """A readable name that no other key has."""
        name = re.sub("[^A-Za-z0-9.]+", "-", key).strip("-.")[:80]
        return self._blobs / f"{name}-{_digest(key.encode())[:12]}"

    def add(self, key: str, outcome: Outcome) -> None:
        """Store an outcome. It is on disk when this returns."""
        self.add_all({key: outcome})

    def add_all(self, outcomes: Mapping[str, Outcome]) -> None:
        """Store several outcomes at once."""
        records = {key: _plain(outcome.record) for key, outcome in outcomes.items()}
        digests = {key: None if outcome.blob is None else _digest(outcome.blob) for key, outcome in outcomes.items()}
        with full_disk_reported(self._folder):
            for key, outcome in outcomes.items():
                if outcome.blob is not None:
                    write_bytes(self._blob_file(key), outcome.blob)
            lines = [{"key": key, "record": record, "blob": digests[key]} for key, record in records.items()]
            append_bytes(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        self.records |= records
        self._digests |= digests


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
