"""Datasets read from files: our own, or those of the hub once downloaded."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sharpmax.errors import ArgumentError, FileFormatError, UnsupportedError
from sharpmax.files import parse_json
from sharpmax.tasks.clrs_text.example import Example

__all__ = ["iter_dataset", "load_dataset"]

_COLUMNS = ("question", "answer", "algo_name", "length")
_Row = tuple[str, Any]  # where it stands, for a message, and what stands there


def load_dataset(path: str | Path) -> list[Example]:
    """Read a `.jsonl`, `.json`, `.csv` or `.parquet` file with the columns question, answer, algo_name and length.

    Of a folder, every file of these kinds in it or below is read in the order of their names, except `.json`, which
    beside data is about data. Other columns are ignored.
    """
    return list(iter_dataset(path))


def iter_dataset(path: str | Path) -> Iterator[Example]:
    """Yield the examples of `load_dataset` without holding them all."""
    path = Path(path)
    if path.is_dir():
        kinds = _READERS.keys() - {".json"}
        files = sorted(
            file for file in path.rglob("*") if file.suffix.lower() in kinds and not file.name.startswith(".")
        )
        if not files:
            raise FileFormatError(f"dataset: {str(path)!r} holds no {', '.join(sorted(kinds))} file")
    else:
        if path.suffix.lower() not in _READERS:
            raise ArgumentError(
                f"dataset: got {str(path)!r}; allowed: a folder or a {', '.join(sorted(_READERS))} file"
            )
        files = [path]
    empty = True
    for file in files:
        for row in _rows(file):
            empty = False
            yield _example(row)
    if empty:
        raise FileFormatError(f"dataset: {str(path)!r} holds no examples")


def _rows(file: Path) -> Iterator[_Row]:
    try:
        yield from _READERS[file.suffix.lower()](file)
    except UnicodeDecodeError as problem:
        raise FileFormatError(f"dataset: {str(file)!r} is not UTF-8 text") from problem
    except OSError as problem:
        raise ArgumentError(f"dataset: cannot read {str(file)!r} ({problem.strerror or problem})") from problem


def _json_lines(file: Path) -> Iterator[_Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{str(file)!r}, line {number}"
                try:
                    yield where, parse_json(line)
                except ValueError as problem:
                    said = getattr(problem, "msg", problem)  # without a place, which is within the line
                    raise FileFormatError(f"dataset: {where} is not JSON ({said})") from problem


def _json(file: Path) -> Iterator[_Row]:
    try:
        rows = parse_json(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise
    except ValueError as problem:
        said = f"{problem.msg}, line {problem.lineno}" if isinstance(problem, json.JSONDecodeError) else problem
        raise FileFormatError(f"dataset: {str(file)!r} is not JSON ({said})") from problem
    if not isinstance(rows, list):
        raise FileFormatError(f"dataset: {str(file)!r} is not a list of examples")
    for number, row in enumerate(rows, 1):
        yield f"{str(file)!r}, example {number}", row


def _csv(file: Path) -> Iterator[_Row]:
    allowed = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a trace may be longer than the default limit
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for number, row in enumerate(csv.DictReader(lines), 1):
                yield f"{str(file)!r}, row {number}", row
    except csv.Error as problem:
        raise FileFormatError(f"dataset: {str(file)!r} is not CSV ({problem})") from problem
    finally:
        csv.field_size_limit(allowed)


def _parquet(file: Path) -> Iterator[_Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise UnsupportedError(f"dataset: reading {str(file)!r} needs pyarrow: pip install pyarrow") from None
    try:
        with parquet.ParquetFile(file) as table:
            columns = [name for name in _COLUMNS if name in table.schema_arrow.names]
            rows = (row for batch in table.iter_batches(columns=columns) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{str(file)!r}, row {number}", row
    except pyarrow.ArrowInvalid as problem:
        first = str(problem).partition("\n")[0]
        raise FileFormatError(f"dataset: {str(file)!r} is not a Parquet file ({first})") from problem


_READERS: dict[str, Callable[[Path], Iterator[_Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _example(placed: _Row) -> Example:
    where, row = placed
    if not isinstance(row, dict):
        raise FileFormatError(f"dataset: {where} is not an object with the columns {', '.join(_COLUMNS)}")
    missing = [name for name in _COLUMNS if row.get(name) is None]
    if missing:
        found = ", ".join(str(name) for name in row) or "none"
        raise FileFormatError(f"dataset: {where} lacks {', '.join(missing)}; found: {found}")
    texts = {name: row[name] for name in _COLUMNS[:-1]}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise FileFormatError(f"dataset: {where} has {text!r} as {name}; allowed: text")
    try:
        length = int(row["length"])
    except (TypeError, ValueError):
        raise FileFormatError(f"dataset: {where} has {row['length']!r} as length; allowed: a whole number") from None
    return Example(**texts, length=length)
