"""The tool that measures the tests, and what it has left: mutants, reasons, the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quality import page, scores
from quality.log import Log
from quality.mutants import NOT_MUTATED, ROOMS, SOURCE, Mutant, files, mutants_of

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "quality.json"


def changes(text: str) -> list[str]:
    return [one.key.split(": ", 1)[1] for one in mutants_of("x.py", text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a < b", ["a < b -> a <= b", "a < b -> a >= b"]),
        ("a and not b", ["a and (not b) -> a or not b", "not b -> not not b"]),
        ("x = a + 2", ["a + 2 -> a - 2", "2 -> 3"]),
        ("f(True)", ["f(True) -> None", "True -> False"]),
        ("x = min(a)", ["min(a) -> max(a)"]),
        ("x = -a", ["-a -> +a"]),
        ("x = a if b else c", ["a if b else c -> a if not b else c"]),
        ("def f():\n    return a", ["return a -> return None"]),
        ("def f(a=1): pass", ["1 -> 2"]),
        ('reject("a", 1)', ["reject('a', 1) -> None"]),  # what it says is not changed
        ('x = check_number("a", 1)', ["1 -> 2"]),
        ('x = "a"', ["'a' -> 'a~'"]),
        ('raise ValueError("a" + 1)', []),
        ('"""Words."""', []),
        ("__all__ = ['a']", []),
        ("x: tuple[int, 1]", []),
    ],
)
def test_what_is_changed(text: str, expected: list[str]) -> None:
    assert changes(text) == expected


def test_a_mutant_is_its_file_with_one_change() -> None:
    file = "theory/bounds.py"
    for one in mutants_of(file)[::10]:
        names: dict[str, Any] = {}
        exec(one.code(), {"__name__": "mutant"}, names)
        assert {"horizon", "entropy_floor"} <= set(names)
    mutant = next(one for one in mutants_of(file) if one.key.endswith("horizon: 1 - mass -> 1 + mass"))
    assert mutant.inside
    lines = (SOURCE / file).read_text(encoding="utf-8").splitlines()
    assert "1 - mass" in lines[mutant.lines.start - 1]


def test_names_are_unique_and_every_file_is_mutated_or_excused() -> None:
    keys = [one.key for file in files(*ROOMS) for one in mutants_of(file)]
    assert len(set(keys)) == len(keys) > 2000
    for file in (*NOT_MUTATED, *scores.NOT_RUN):
        assert (SOURCE / file).exists()


def test_reasons_speak_of_mutants_that_exist() -> None:
    keys = {one.key for file in files(*ROOMS) for one in mutants_of(file)}
    named = [key for reason in scores.justified() for key in reason.mutants]
    assert len(set(named)) == len(named)
    assert [key for key in named if key not in keys] == []
    assert all(reason.why for reason in scores.justified())


def test_a_log_goes_on_where_it_was(tmp_path: Path) -> None:
    first, second, third = mutants_of("theory/bounds.py")[:3]
    log = Log(tmp_path / "log.jsonl", 5.0)
    log.add(first, "killed", "a test", 0.1)
    log.add(second, "survived", None, 2.0)
    again = Log(tmp_path / "log.jsonl", 5.0)
    assert again.left([first, second, third]) == [third]
    # One that got away meets more tests if there is more patience.
    assert Log(tmp_path / "log.jsonl", 9.0).left([first, second, third]) == [second, third]
    rooms = scores.mutation([first, second, third], again, excused=[])
    assert rooms["theory"] == {"mutants": 2, "noticed": 1, "justified": 0, "left": 1, "percent": 50.0}
    excused = scores.mutation([first, second, third], again, excused=[second.key])
    assert excused["all"] == {"mutants": 2, "noticed": 1, "justified": 1, "left": 0, "percent": 100.0}


def test_changed_sources_are_asked_again(tmp_path: Path) -> None:
    one = mutants_of("theory/bounds.py")[0]
    log = Log(tmp_path / "log.jsonl", 5.0)
    log.add(one, "killed", "a test", 0.1)
    line = json.loads(log.path.read_text(encoding="utf-8"))
    log.path.write_text(json.dumps(line | {"source": "another"}) + "\n", encoding="utf-8")
    assert Log(log.path, 5.0).left([one]) == [one]


def test_coverage_is_counted_room_by_room(tmp_path: Path) -> None:
    def file(statements: int, run: int, missing: list[int]) -> dict[str, Any]:
        summary = {"num_statements": statements, "covered_lines": run, "percent_covered": 100.0 * run / statements}
        return {"summary": summary, "missing_lines": missing}

    report = tmp_path / "coverage.json"
    names = {"src/sharpmax/rows/a.py": file(10, 5, [3, 4, 5, 7, 9]), "src/sharpmax/rows/b.py": file(10, 10, [])}
    report.write_text(json.dumps({"files": names | {"src/sharpmax/lazy.py": file(20, 18, [1, 2])}}), encoding="utf-8")
    rooms, lacking = scores.covered(report)
    assert rooms["rows"] == {"statements": 20, "run": 15, "percent": 75.0}
    assert rooms["sharpmax"]["percent"] == 90.0
    assert rooms["all"] == {"statements": 40, "run": 33, "percent": 82.5}
    assert lacking == [{"file": "rows/a.py", "percent": 50.0, "missing": "3–5, 7, 9", "why": "no test yet"}]


def test_the_page_shows_the_committed_run() -> None:
    saved = json.loads(RECORD.read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    assert text.count(page.BEGIN) == text.count(page.END) == 1
    assert page.with_tables(text, page.page_tables(saved, scores.justified())) == text
    assert {"commit", "versions", "hardware", "date"} <= set(saved["provenance"])


def test_mutants_know_their_functions() -> None:
    found: list[Mutant] = mutants_of("x.py", "class A:\n    x = 1\n    def f(self, a=2):\n        return a")
    assert [one.key.split(": ")[0] for one in found] == ["x.py::A", "x.py::A.f", "x.py::A.f"]
    assert [one.inside for one in found] == [False, False, True]
