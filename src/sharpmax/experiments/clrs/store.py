"""Answers as they are given, one line each: a kill loses no more than the batch at hand."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError, reject
from sharpmax.files import append_bytes, parse_json

__all__ = ["Said", "Shard", "Store"]

_FILES = "answers*.jsonl"


@dataclass(frozen=True)
class Shard:
    """One of several processes that share the work: the `number`th of `count`."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """From "2/4".

        >>> Shard.parse("2/4")
        Shard(number=2, count=4)
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            reject("--shard", repr(text), "i/n with i from 1 to n, as 1/4")
        return cls(int(found[1]), int(found[2]))

    @property
    def file_name(self) -> str:
        """Where its answers are."""
        return "answers.jsonl" if self.count == 1 else f"answers-{self.name}.jsonl"

    @property
    def name(self) -> str:
        """The part in a word."""
        return f"{self.number}-of-{self.count}"


@dataclass(frozen=True)
class Said:
    """What an arm said to a question."""

    text: str
    tokens: int
    began: float
    ended: float
    """When its batch was asked and had answered, by the clock on the wall, which all processes share."""


_SAID = {field.name for field in fields(Said)}


class Store:
    """The answers in a folder, of all processes; what is added goes to the file of this one."""

    def __init__(self, folder: Path, shard: Shard) -> None:
        self._folder, self._path = folder, folder / shard.file_name
        self._said: dict[tuple[str, int], Said] = {}
        self._remarks: dict[str, list[str]] = {}
        self._mended = False

    @property
    def used(self) -> bool:
        """Whether this process has answered something before."""
        return self._path.is_file()

    @property
    def begun(self) -> bool:
        """Whether any process has."""
        return any(self._folder.glob(_FILES))

    def read(self) -> None:
        """Take in what every process has written so far."""
        for path in sorted(self._folder.glob(_FILES)):
            # What follows the last end of a line is half of one.
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
                self._read_line(line, f"line {number} of {str(path)!r}")

    def _read_line(self, line: bytes, where: str) -> None:
        try:
            self._take(parse_json(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FileFormatError(
                f"--out: {where} is not what sharpmax wrote; remove that line and run the same command with --resume: "
                "only what is missing is asked again"
            ) from None

    def _take(self, entry: Mapping[str, Any]) -> None:
        arm = str(entry["arm"])
        if "remark" in entry:
            said = self._remarks.setdefault(arm, [])
            if entry["remark"] not in said:
                said.append(str(entry["remark"]))
        elif entry.keys() >= _SAID:  # what another version wrote is asked again
            one = Said(str(entry["text"]), int(entry["tokens"]), float(entry["began"]), float(entry["ended"]))
            self._said[arm, int(entry["item"])] = one

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._said

    def __getitem__(self, key: tuple[str, int]) -> Said:
        return self._said[key]

    def remarks(self, arm: str) -> list[str]:
        """What there is to say about an arm."""
        return list(self._remarks.get(arm, []))

    def add(self, arm: str, said: Mapping[int, Said]) -> None:
        """Keep answers by the number of their question; when this returns they are on disk."""
        self._append({"arm": arm, "item": item, **asdict(one)} for item, one in said.items())

    def remark(self, arm: str, text: str) -> None:
        """Keep what there is to say about an arm."""
        if text not in self.remarks(arm):
            self._append([{"arm": arm, "remark": text}])

    def _append(self, new: Any) -> None:
        entries: Sequence[Mapping[str, Any]] = list(new)
        if not self._mended and self._path.is_file():
            # A killed process may have left half of a line.
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        self._mended = True
        append_bytes(self._path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode())
        for entry in entries:
            self._take(entry)
