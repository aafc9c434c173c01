"""CLRS-Text datasets: generated once and cached, or read from files."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from sharpmax.errors import ArgumentError, FileFormatError, reject, reject_type
from sharpmax.files import parse_json, write_bytes
from sharpmax.tasks.clrs_text.generation import RELEASE, Example, Split, check_count, examples
from sharpmax.tasks.clrs_text.sizes import test_sizes, train_sizes

_COLUMNS = {"question": str, "answer": str, "algo_name": str, "length": int}


def load_dataset(path: str | Path) -> list[Example]:
    """Read a `.jsonl` file with the columns question, answer, algo_name and length, and ignore other columns.

    For a folder, read every such file in it and its subfolders, sorted by path.
    """
    path = Path(path)
    if not path.is_dir() and path.suffix.lower() != ".jsonl":
        raise ArgumentError(f"dataset: got {str(path)!r}; allowed: a folder or a .jsonl file")
    files = sorted(file for file in path.rglob("*.jsonl") if not file.name.startswith(".")) if path.is_dir() else [path]
    found: list[Example] = []
    try:
        for file in files:
            lines = enumerate(file.read_bytes().split(b"\n"), 1)
            found += [_example(f"{str(file)!r}, line {number}", line) for number, line in lines if line.strip()]
    except OSError as problem:
        raise ArgumentError(f"dataset: cannot read {str(problem.filename)!r} ({problem.strerror})") from problem
    if not found:
        raise FileFormatError(f"dataset: {str(path)!r} holds no examples")
    return found


def _example(where: str, line: bytes) -> Example:
    try:
        row = parse_json(line)
    except ValueError as problem:
        reason = getattr(problem, "msg", problem)  # without the position, which counts from the start of the line
        raise FileFormatError(f"dataset: {where} is not JSON ({reason})") from problem
    if not isinstance(row, dict):
        raise FileFormatError(f"dataset: {where} is not an object with the columns {', '.join(_COLUMNS)}")
    if missing := [name for name in _COLUMNS if row.get(name) is None]:
        found = ", ".join(map(str, row)) or "none"
        raise FileFormatError(f"dataset: {where} lacks {', '.join(missing)}; found: {found}")
    for name, kind in _COLUMNS.items():
        if not isinstance(row[name], kind):
            allowed = "a whole number" if kind is int else "text"
            raise FileFormatError(f"dataset: {where} has {row[name]!r} as {name}; allowed: {allowed}")
    return Example(**{name: row[name] for name in _COLUMNS})


_FORMAT = 2
Note = Callable[[str], None]


def make_dataset(
    folder: str | Path,
    split: Split,
    algorithms: Sequence[str],
    sizes: Sequence[int] | None = None,
    *,
    per_cell: int,
    seed: int = 0,
    processes: int = 1,
    note: Note = lambda text: None,
) -> Path:
    """Generate up to `per_cell` examples of every algorithm and size in a subfolder of `folder`; return its path.

    By default an algorithm has its training or test sizes. There are fewer than `per_cell` test examples if there are
    no more problems. The subfolder belongs to the arguments; files already in it are kept. `note` is called with a line
    for every new file.
    """
    if isinstance(algorithms, str):
        reject_type("algorithms", repr(algorithms), "a list of names", f"write [{algorithms!r}]")
    if not algorithms:
        reject("algorithms", "none", "at least one name")
    check_count("per_cell", per_cell)
    check_count("processes", processes)
    usual = train_sizes if split == "train" else test_sizes
    cells = [(name, size) for name in dict.fromkeys(algorithms) for size in dict.fromkeys(sizes or usual(name))]
    request = [split, cells, per_cell, seed, RELEASE, _FORMAT]
    here = Path(folder) / f"{split}-{hashlib.sha256(json.dumps(request).encode()).hexdigest()[:12]}"
    jobs = [(here / f"{name}-{size:03}.jsonl", name, size, split, per_cell, seed) for name, size in cells]
    missing = [job for job in jobs if not job[0].is_file()]  # files are written atomically
    for _, name, size, *_ in missing:
        examples(name, size, split, per_cell, seed=seed)  # raises here instead of in every process
    # Forking a process with threads of a framework may hang.
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as block:
        counts: Iterator[int] = map(_write_cell, missing)
        if processes > 1 and missing:
            workers = block.enter_context(ProcessPoolExecutor(min(processes, len(missing)), mp_context=spawn))
            block.callback(workers.shutdown, cancel_futures=True)
            counts = workers.map(_write_cell, missing)
        for (_, name, size, *_), count in zip(missing, counts, strict=True):
            few = "" if count == per_cell else f" of {per_cell}: there are no more problems of this size"
            note(f"{split}: {name}, size {size}: {count} examples{few}")
    return here


def _write_cell(job: tuple[Path, str, int, Split, int, int]) -> int:
    path, algorithm, size, split, count, seed = job
    lines = [example.line() for example in examples(algorithm, size, split, count, seed=seed)]
    write_bytes(path, "".join(lines).encode())
    return len(lines)
