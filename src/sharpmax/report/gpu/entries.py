"""Reading the file that `sharpmax bench --gpu` writes: a list of measured cases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.files import read_json

__all__ = ["KINDS", "Entry", "holds_entries", "of_kind", "read_entries"]

Entry = dict[str, Any]

KINDS = {
    "stats": "Statistics pass",
    "attention": "Sharp attention, inference",
    "train": "Training step (forward and backward)",
    "decode": "Decode, one token",
}
"""What is measured, in the order in which it is told."""

_KEYS = (
    *("kind", "case", "ours_ms", "stock_ms", "ratio", "stock_backend", "counts", "agrees", "problem", "full_size"),
    *("floor", "limits", "errors", "rounds", "command", "provenance"),
)


def read_entries(path: str | Path) -> list[Entry]:
    """The entries of a file, or an error that says what is wrong with it."""
    body = read_json(path, "entries")
    if not isinstance(body, list) or not body or not all(isinstance(one, dict) for one in body):
        raise FileFormatError(f"entries: {str(path)!r} is not a list of cases; sharpmax bench --gpu --out writes one")
    for place, one in enumerate(body):
        if missing := [key for key in _KEYS if key not in one]:
            raise FileFormatError(f"entries: case {place} of {str(path)!r} has no {missing}; run its command again")
        if one["kind"] not in KINDS:
            raise FileFormatError(f"entries: case {place} has kind {one['kind']!r}; allowed: {list(KINDS)}")
    return body


def holds_entries(path: str | Path) -> bool:
    """Whether a file is a JSON list, which no other command writes."""
    file = Path(path)
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(64).lstrip().startswith(b"[")


def of_kind(entries: Sequence[Entry], kind: str) -> list[Entry]:
    """The entries of one kind."""
    return [one for one in entries if one["kind"] == kind]
