"""The format of `results.json`, which every command writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.files import read_json, write_text
from sharpmax.provenance import provenance

SCHEMA = 1
"""Version of the format; readers refuse newer ones."""

FILE_NAME = "results.json"

_KEYS = ("schema", "command", "provenance", "tables")
_PROVENANCE_KEYS = ("commit", "versions", "hardware", "seed", "date")


def json_values(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables as plain JSON values: dataclasses become objects, tuples become lists."""
    found: dict[str, Any] = json.loads(json.dumps(tables, default=asdict))
    return found


@dataclass(frozen=True)
class Results:
    """Tables of numbers, the command that produced them, and its provenance."""

    command: str
    provenance: Mapping[str, Any]
    tables: Mapping[str, Any]
    schema: int = SCHEMA

    @property
    def kind(self) -> str:
        """The command without its arguments.

        >>> Results("sharpmax clrs train smollm2 --steps 100", {}, {}).kind
        'clrs train'
        """
        words = [word for word in self.command.split()[1:] if word != "-m"]
        return " ".join(words[: 2 if words[:1] == ["clrs"] else 1])

    def to_dict(self) -> dict[str, Any]:
        """The results as a JSON object, in the order of the file."""
        return {name: getattr(self, name) for name in ("schema", "kind", *_KEYS[1:])}

    def save(self, path: str | Path) -> Path:
        """Write the results as JSON to the file `path`, atomically."""
        try:
            text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as problem:
            raise ArgumentError(
                f"tables: got a value that JSON cannot hold ({problem}); allowed: texts, finite numbers, lists, None"
            ) from None
        return write_text(path, text + "\n")


def collect(
    command: str, tables: Mapping[str, Any], *, seed: int | None, files: Sequence[Mapping[str, Any]] = ()
) -> Results:
    """Results of a finished run, with the provenance of this machine.

    `files` describes the files that the command names, so that others can repeat it.
    """
    origin = provenance(seed) | ({"files": list(files)} if files else {})
    return Results(command=command, provenance=origin, tables=tables)


def load(path: str | Path) -> Results:
    """Read results from their file, or from a folder with a `results.json`."""
    file = Path(path)
    if not file.is_file() and file.suffix != ".json":
        file = file / FILE_NAME
    if not file.is_file():
        raise FileFormatError(
            f"results: no file {str(file)!r}; allowed: a folder with a {FILE_NAME}, or such a file; "
            "a command with --out writes one"
        )
    body, name = read_json(file, "results"), str(file)
    schema = body.get("schema") if isinstance(body, dict) else None
    if type(schema) is not int or schema < 1:
        raise FileFormatError(f"results: {name!r} is not a results file; allowed: a JSON object with {list(_KEYS)}")
    if schema > SCHEMA:
        raise FileFormatError(
            f"results: {name!r} has schema {schema}; allowed: up to {SCHEMA}; a newer file needs a newer sharpmax"
        )
    for key, kind in (("command", str), ("provenance", dict), ("tables", dict)):
        if not isinstance(body.get(key), kind):
            allowed = "a text" if kind is str else "an object"
            got = type(body[key]).__name__ if key in body else "not there"
            raise FileFormatError(f"results: {key!r} in {name!r} is {got}; allowed: {allowed}; run its command again")
    if missing := [key for key in _PROVENANCE_KEYS if key not in body["provenance"]]:
        raise FileFormatError(f"results: the provenance in {name!r} has no {missing}; run its command again")
    return Results(body["command"], body["provenance"], renamed(body["tables"]), schema)


_RENAMED = {
    "as it comes": "baseline",
    "arms": "variants",
    "touched": "modified",
    "league": "leaderboard",
    "laws": "rules",
    "crowding and line, 3 to 1": "replication and line, 3 to 1",
}
"""Names in older files, and what they are called now."""


def renamed(value: Any) -> Any:
    """Tables with current names."""
    if isinstance(value, dict):
        return {_RENAMED.get(key, key): renamed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [renamed(one) for one in value]
    return _RENAMED.get(value, value) if isinstance(value, str) else value
