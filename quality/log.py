"""What became of every mutant, written line by line as it is known: a run that is broken off goes on where it was."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from quality.mutants import SOURCE, Mutant

__all__ = ["ROOT", "Log", "Outcome", "digest"]

ROOT = SOURCE.parents[1]
FOUND = ("killed", "timeout")
"""Outcomes of a mutant that the tests noticed; the others are `survived` and `uncovered` (no test gets there)."""


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant, and of which sources that is true."""

    key: str
    outcome: str
    by: str | None
    seconds: float
    patience: float
    """How many seconds' worth of tests it was to meet at most."""
    source: str
    tests: str

    @property
    def found(self) -> bool:
        """Whether a test failed, or did not come to an end."""
        return self.outcome in FOUND


class Log:
    """An append-only file of outcomes; the last word on a mutant counts."""

    def __init__(self, path: Path, patience: float) -> None:
        self.path, self.patience = path, patience
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known = {one["key"]: Outcome(**one) for one in map(json.loads, lines)}

    def add(self, mutant: Mutant, outcome: str, by: str | None, seconds: float) -> None:
        """Keep what became of a mutant."""
        one = Outcome(
            mutant.key, outcome, by, round(seconds, 2), self.patience, _digest(mutant.file), _digest_of_tests()
        )
        self._known[one.key] = one
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(one), ensure_ascii=False) + "\n")

    def of(self, mutant: Mutant) -> Outcome | None:
        """What is known of a mutant of the present source, even if tests have changed since."""
        one = self._known.get(mutant.key)
        return one if one is not None and one.source == _digest(mutant.file) else None

    def left(self, mutants: Iterable[Mutant]) -> list[Mutant]:
        """Those to be asked: not known yet, or got away before tests changed, or from less patience."""
        return [one for one in mutants if self._is_open(self.of(one))]

    def _is_open(self, one: Outcome | None) -> bool:
        if one is None:
            return True
        return not one.found and (one.tests != _digest_of_tests() or one.patience < self.patience)


def digest(*paths: Path) -> str:
    """A short name of what these files hold."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


@functools.cache
def _digest(file: str) -> str:
    return digest(SOURCE / file)


@functools.cache
def _digest_of_tests() -> str:
    return digest(*sorted((ROOT / "tests").rglob("*.py")))
