"""Which test runs which line, and how long it takes: so that a mutant meets only tests that can notice it."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quality.log import ROOT, digest
from quality.mutants import ROOMS, SOURCE, Mutant
from quality.session import failure

__all__ = ["Items", "Tests", "cover", "known"]

Items = dict[str, pytest.Item]
"""Tests by name."""


class Tests:
    """Which tests run which line, and in which order they should meet a mutant."""

    def __init__(self, covering: dict[str, Any], patience: float) -> None:
        self.patience = patience
        self.seconds: dict[str, float] = covering["seconds"]
        self.lines: dict[str, dict[str, list[str]]] = covering["lines"]
        self.kills: Counter[tuple[str, str]] = Counter()

    def of(self, mutant: Mutant) -> list[str]:
        """The tests of a mutant: first those that found its neighbours, then those for its file, then the fast ones."""
        lines = self.lines.get(mutant.file, {})
        numbers = map(str, mutant.lines) if mutant.inside else lines
        names = {name for number in numbers for name in lines.get(number, ())}
        found: list[str] = []
        total = 0.0

        def order(name: str) -> tuple[int, int, float, str]:
            return -self.kills[mutant.file, name], _distance(mutant.file, name), self.seconds[name], name

        for name in sorted(names, key=order):
            # No test takes more than half of it, or there would be room for few.
            if not found or self.seconds[name] <= min(self.patience / 2, self.patience - total):
                total += self.seconds[name]
                found.append(name)
        return found


def _distance(file: str, test: str) -> int:
    """How far a test is from a file: 0 if it bears its name, 1 if it is of its room.

    >>> _distance("stats/dense.py", "tests/stats/test_dense.py::test_x")
    0
    >>> _distance("stats/dense.py", "tests/x.py::test_x")
    2
    """
    room, name = file.split("/")[0], Path(file).stem
    if f"/{room}/test_{name}.py" in test:
        return 0
    return 1 if f"/{room}/" in test else 2


def known(items: Items, covering: Path) -> dict[str, Any]:
    """What the file says that is still true: of tests whose own file and the whole package have not changed."""
    files = {Path(item.path).relative_to(ROOT).as_posix() for item in items.values()}
    tests = {file: digest(ROOT / file) for file in sorted(files)}
    now: dict[str, Any] = {"package": digest(*sorted(SOURCE.rglob("*.py"))), "tests": tests, "seconds": {}, "lines": {}}
    saved = json.loads(covering.read_text(encoding="utf-8")) if covering.exists() else {}
    if saved.get("package") != now["package"]:
        return now
    same = {file for file, value in tests.items() if saved["tests"].get(file) == value}
    now["seconds"] = {name: one for name, one in saved["seconds"].items() if name in items and _file(name) in same}
    now["lines"] = {
        file: {line: [name for name in names if name in now["seconds"]] for line, names in lines.items()}
        for file, lines in saved["lines"].items()
    }
    return now


def _file(name: str) -> str:
    return name.split("::")[0]


def cover(items: Items, covering: Path) -> str | None:
    """Run the tests that the file does not know yet under coverage and complete it; returns why one fails, or None."""
    import coverage

    found = known(items, covering)
    measured = coverage.Coverage(data_file=None, include=[f"{SOURCE}/{room}/*" for room in ROOMS], config_file=False)
    measured.start()
    for name, item in items.items():
        if name not in found["seconds"]:
            measured.switch_context(name)
            start = time.monotonic()
            if (problem := failure(item, None)) is not None:
                return f"{name}\n{problem}"
            found["seconds"][name] = round(time.monotonic() - start, 4)
    measured.stop()
    data = measured.get_data()
    for path in data.measured_files():
        lines = found["lines"].setdefault(Path(path).relative_to(SOURCE).as_posix(), {})
        for line, names in data.contexts_by_lineno(path).items():
            lines.setdefault(str(line), []).extend(name for name in names if name in items)
    covering.write_text(json.dumps(found), encoding="utf-8")
    return None
