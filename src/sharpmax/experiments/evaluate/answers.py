"""What an evaluation has found out so far, on disk as soon as it is known: a run may be killed and taken up again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments.identity import check_identity, plain
from sharpmax.files import parse_json, write_text

__all__ = ["FILE_NAME", "Answers"]

FILE_NAME = "answers.json"

_SCHEMA = 1


class Answers:
    """Values by key, each written with all others in one step; `identity` says what run they belong to."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path, self._identity = path, plain(identity)
        self._values: dict[str, Any] = {}
        self._remarks: dict[str, list[str]] = {}
        self._complete = False

    @classmethod
    def open(cls, folder: Path, identity: Mapping[str, Any], *, resume: bool) -> Answers:
        """The answers of a run in `folder`: none yet, or those of an interrupted run of the very same settings."""
        answers = cls(folder / FILE_NAME, identity)
        if answers._path.exists():
            answers._take_up(resume=resume)
        return answers

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def add(self, key: str, value: Any) -> None:
        """Keep a value; when this returns it is on disk."""
        self._values[key] = value
        self._save()

    def remark(self, arm: str, text: str) -> None:
        """Keep what there is to say about an arm; it is written with the next value."""
        said = self._remarks.setdefault(arm, [])
        if text not in said:
            said.append(text)

    def remarks(self, arm: str) -> list[str]:
        """What there is to say about an arm."""
        return list(self._remarks.get(arm, []))

    def finish(self) -> None:
        """Say that nothing is missing: the next run in this folder may begin anew."""
        self._complete = True
        self._save()

    def _save(self) -> None:
        body = {
            "schema": _SCHEMA,
            "complete": self._complete,
            "run": self._identity,
            "remarks": self._remarks,
            "values": self._values,
        }
        write_text(self._path, json.dumps(body, ensure_ascii=False, allow_nan=False) + "\n")

    def _take_up(self, *, resume: bool) -> None:
        try:
            body = parse_json(self._path.read_bytes())
            schema, complete, run = body["schema"], body["complete"], body["run"]
            values, remarks = dict(body["values"]), dict(body["remarks"])
        except (OSError, KeyError, TypeError, ValueError):
            schema, complete, run, values, remarks = None, False, {}, {}, {}
        if schema != _SCHEMA or not isinstance(run, dict):
            raise FileFormatError(
                f"--out: {str(self._path)!r} is not a file of answers that this sharpmax wrote; remove it, or choose "
                "another folder"
            )
        if not resume:
            if complete:
                return
            raise ArgumentError(
                f"--out: {str(self._path.parent)!r} holds an evaluation that was interrupted; add --resume to go on "
                "with it, or choose another folder"
            )
        check_identity(self._path, run, self._identity)
        self._values, self._remarks, self._complete = values, remarks, complete
