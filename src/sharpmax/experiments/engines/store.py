"""Outcomes as they come, one line each and blobs as files: a kill loses no more than what is in flight."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.experiments.engines.task import Outcome
from sharpmax.experiments.run_folder import RUN, belongs, disk_watched, read_run, writing
from sharpmax.files import append_bytes, parse_json, write_bytes

_LINES, _BLOBS, _LOCK = "outcomes.jsonl", "blobs", "outcomes"
_AGAIN = "and run the same command with --resume: only what is missing is done again"


@dataclass(frozen=True)
class _Entry:
    record: dict[str, Any]
    blob: Mapping[str, Any] | None
    """File, size and digest."""

    line: int


class Store:
    """The outcomes in a folder, by the keys of their tasks; nothing in it is ever changed, only added to."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = Path(folder), Path(folder) / _LINES
        self._entries: dict[str, _Entry] = {}
        self._lines = 0
        if self._path.is_file():
            self._read()

    def _read(self) -> None:
        whole = self._path.read_bytes().split(b"\n")[:-1]  # what follows the last end of a line is half of one
        for number, line in enumerate(whole, 1):
            try:
                body = parse_json(line)
                about = body["blob"]
                if about is not None:
                    about = {
                        "file": _inside(about["file"]),
                        "bytes": int(about["bytes"]),
                        "sha256": str(about["sha256"]),
                    }
                key, entry = str(body["key"]), _Entry(dict(body["record"]), about, number)
            except (ValueError, KeyError, TypeError):
                raise FileFormatError(
                    f"--out: line {number} of {str(self._path)!r} is not what sharpmax wrote; remove that line {_AGAIN}"
                ) from None
            self._entries[key] = entry
            if about is not None:
                self._check_size(key, about["file"], about["bytes"])
        self._lines = len(whole)

    def _check_size(self, key: str, name: str, size: int) -> None:
        file = self._folder / _BLOBS / name
        if not file.is_file() or file.stat().st_size != size:
            self._harmed(key, file)

    def _harmed(self, key: str, file: Path) -> None:
        what = "is not what sharpmax wrote" if file.is_file() else "is missing"
        raise FileFormatError(
            f"--out: {str(file)!r}, which belongs to {key!r}, {what}; bring it back, or remove line "
            f"{self._entries[key].line} of {str(self._path)!r} {_AGAIN}"
        )

    def claim(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Let the folder hold the run of these settings, or say why not."""
        if self._entries and read_run(self._folder) is None:
            raise FileFormatError(
                f"--out: {str(self._folder)!r} holds outcomes and no {RUN} that says of what run; bring it back, or "
                "choose another folder"
            )
        belongs(self._folder, identity, used=bool(self._entries), resume=resume)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For as long as this lasts no other run writes here; what a killed one left half-written is cleared away."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with disk_watched(self._folder), writing(self._folder, _LOCK):
            self._mend()
            yield

    def _mend(self) -> None:
        if self._path.is_file():
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        for unfinished in (self._folder / _BLOBS).glob(".*.partial"):
            unfinished.unlink(missing_ok=True)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def keys(self) -> list[str]:
        """Keys in the order in which their outcomes came."""
        return list(self._entries)

    def record(self, key: str) -> dict[str, Any]:
        """The record of a task that is done."""
        return self._entries[key].record

    def blob(self, key: str) -> bytes | None:
        """The blob of a task that is done; None where it has none."""
        about = self._entries[key].blob
        if about is None:
            return None
        file = self._folder / _BLOBS / about["file"]
        data = file.read_bytes() if file.is_file() else b""
        if len(data) != about["bytes"] or hashlib.sha256(data).hexdigest() != about["sha256"]:
            self._harmed(key, file)
        return data

    def add(self, key: str, outcome: Outcome) -> None:
        """Keep an outcome; when this returns it is on disk."""
        outcome = outcome.plain()
        self._folder.mkdir(parents=True, exist_ok=True)
        with disk_watched(self._folder):
            about, blob = None, outcome.blob
            if blob is not None:
                name = _file_name(key)
                about = {"file": name, "bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
                write_bytes(self._folder / _BLOBS / name, blob)
            self._append({"key": key, "record": outcome.record, "blob": about})
        self._lines += 1
        self._entries[key] = _Entry(outcome.record, about, self._lines)

    def _append(self, body: Mapping[str, Any]) -> None:
        append_bytes(self._path, (json.dumps(body, ensure_ascii=False, allow_nan=False) + "\n").encode())


def _inside(name: Any) -> str:
    """The name of a file in the folder of blobs: no way leads out of it."""
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError(f"no name of a file: {name!r}")
    return name


def _file_name(key: str) -> str:
    """A name that a person can read and no other key has."""
    return f"{re.sub('[^A-Za-z0-9.]+', '-', key).strip('-.')[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
