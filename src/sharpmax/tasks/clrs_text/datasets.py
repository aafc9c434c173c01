"""CLRS-Text datasets: generated once and cached, or read from files."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sharpmax.errors import ArgumentError, FileFormatError, UnsupportedError, reject, reject_type
from sharpmax.files import parse_json, write_bytes
from sharpmax.tasks.clrs_text.generation import RELEASE, Example, Split, check_count, generator, problem, stream
from sharpmax.tasks.clrs_text.sizes import check_algorithm, check_size, test_sizes, train_sizes

_COLUMNS = ("question", "answer", "algo_name", "length")
_Row = tuple[str, Any]  # where it stands, for a message, and what stands there


def load_dataset(path: str | Path) -> list[Example]:
    """Read a `.jsonl` or `.parquet` file with the columns question, answer, algo_name and length.

    Of a folder, every file of these kinds in it or below is read in the order of their names. Other columns are
    ignored.
    """
    return list(iter_dataset(path))


def iter_dataset(path: str | Path) -> Iterator[Example]:
    """Yield the examples of `load_dataset` without holding them all."""
    path = Path(path)
    if path.is_dir():
        found = (file for file in path.rglob("*") if not file.name.startswith("."))
        files = sorted(file for file in found if file.suffix.lower() in _READERS)
        if not files:
            raise FileFormatError(f"dataset: {str(path)!r} holds no {', '.join(sorted(_READERS))} file")
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
                    reason = getattr(problem, "msg", problem)  # without the position, which is within the line
                    raise FileFormatError(f"dataset: {where} is not JSON ({reason})") from problem


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


_FORMAT = 1
Note = Callable[[str], None]


def _silent(_: str) -> None:
    pass


def training_set(
    folder: str | Path,
    algorithms: Sequence[str],
    *,
    per_cell: int,
    text: int | None = None,
    largest: int | None = None,
    trace: bool = False,
    seed: int = 0,
    processes: int = 1,
    note: Note = _silent,
) -> Path:
    """Make `per_cell` examples of every algorithm at every training size, in a folder below `folder`; return it.

    With `text`, a file ends with the example that brings it to so many characters; with `largest`, training sizes above
    it are left out. Another request is another folder. `note` hears a line for every file made. More than one of
    `processes` are fresh interpreters, each making one file at a time.
    """
    names = _checked(algorithms)
    if largest is not None:
        check_size(largest, "largest")
    cells = [(name, size) for name in names for size in train_sizes(name) if largest is None or size <= largest]
    if text is not None:
        check_count("text", text)
    return _made(Path(folder), _Recipe("train", tuple(cells), per_cell, trace, seed, text=text), {}, processes, note)


def test_set(
    folder: str | Path,
    algorithms: Sequence[str],
    sizes: Sequence[int] | None = None,
    *,
    per_cell: int,
    trace: bool = False,
    seed: int = 0,
    train: str | Path | Iterable[Example] | None = None,
    processes: int = 1,
    note: Note = _silent,
) -> Path:
    """Make up to `per_cell` test examples of every algorithm at `sizes` (its test sizes unless given), as above.

    None of the questions is in any `training_set`, nor in `train`, a dataset from elsewhere, asked with or without a
    trace. A file holds fewer than `per_cell` examples where there are no more, and `note` hears so.
    """
    names = _checked(algorithms)
    for size in sizes or ():
        check_size(size)
    cells = [(name, size) for name in names for size in (dict.fromkeys(sizes) if sizes else test_sizes(name))]
    excluded = _problems(train, names)
    contents = hashlib.blake2b(digest_size=16)
    for name in sorted(excluded):
        contents.update(b"".join(sorted(excluded[name])))
    recipe = _Recipe("test", tuple(cells), per_cell, trace, seed, contents.hexdigest() if excluded else None)
    return _made(Path(folder), recipe, excluded, processes, note)


test_set.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name of an imported function for a test's


@dataclass(frozen=True)
class _Recipe:
    split: Split
    cells: tuple[tuple[str, int], ...]
    per_cell: int
    trace: bool
    seed: int
    excluded: str | None = None
    text: int | None = None
    generator: str = RELEASE
    format: int = _FORMAT

    def folder(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.split}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _checked(algorithms: Sequence[str]) -> list[str]:
    if isinstance(algorithms, str):
        reject_type("algorithms", repr(algorithms), "a list of names", f"write [{algorithms!r}]")
    names = list(dict.fromkeys(algorithms))
    if not names:
        reject("algorithms", "none", "one name or more")
    for name in names:
        check_algorithm(name)
    return names


def _problems(train: str | Path | Iterable[Example] | None, algorithms: Iterable[str]) -> dict[str, set[bytes]]:
    """What the questions of `train` are about, by algorithm."""
    if train is None:
        return {}
    found: dict[str, set[bytes]] = {name: set() for name in algorithms}
    for example in iter_dataset(train) if isinstance(train, (str, Path)) else train:
        if example.algo_name in found:
            found[example.algo_name].add(problem(example.question))
    return found


def _made(folder: Path, recipe: _Recipe, excluded: dict[str, set[bytes]], processes: int, note: Note) -> Path:
    check_count("per_cell", recipe.per_cell)
    check_count("processes", processes)
    here = folder / recipe.folder()
    cells = {f"{name}-{size:03}.jsonl": (name, size) for name, size in recipe.cells}
    missing = [file for file in cells if not (here / file).is_file()]  # a file is there as a whole or not at all
    if missing:
        generator()  # report a missing package here, not in every process
        jobs = [(here / file, *cells[file], recipe, excluded.get(cells[file][0], set())) for file in missing]
        for file, count in zip(missing, _each(jobs, processes), strict=True):
            name, size = cells[file]
            all_there_are = count < recipe.per_cell and recipe.text is None
            few = f" of {recipe.per_cell}: there are no more problems of this size" if all_there_are else ""
            note(f"{recipe.split}: {name}, size {size}: {count} examples{few}")
    return here


def _each(jobs: list[Any], processes: int) -> Iterator[int]:
    if processes == 1:
        yield from map(_write_cell, jobs)
        return
    # Forking a process in which a framework has started threads may hang it.
    workers = ProcessPoolExecutor(min(processes, len(jobs)), mp_context=multiprocessing.get_context("spawn"))
    try:
        yield from workers.map(_write_cell, jobs)
    finally:
        workers.shutdown(cancel_futures=True)


def _write_cell(job: tuple[Path, str, int, _Recipe, set[bytes]]) -> int:
    path, algorithm, size, recipe, excluded = job
    drawn = stream(algorithm, size, recipe.split, trace=recipe.trace, seed=recipe.seed)
    wanted = (example for example in drawn if not excluded or problem(example.question) not in excluded)
    lines = [example.line() for example in _enough(islice(wanted, recipe.per_cell), recipe.text)]
    write_bytes(path, "".join(lines).encode())
    return len(lines)


def _enough(examples: Iterator[Example], text: int | None) -> Iterator[Example]:
    """Examples until there are `text` characters of them."""
    used = 0
    for example in examples:
        yield example
        used += example.characters
        if text is not None and used >= text:
            return
