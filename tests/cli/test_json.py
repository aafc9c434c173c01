"""`--json`: stdout has one document, the saved one, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpmax.experiments.benchmarks import cpu as cpu_bench
from tests.cli.lines import saved


def only_document(outcome: Any) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_what_is_saved_is_what_is_printed(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    """Every command that saves results prints them in `run.show_results`."""
    line = ("evaluate", home / "model", "--task", home / "letters.py", "--sizes", 4, "--prompts", 2, "--no-text")
    outcome = sharpmax_command(*line, "--no-draw", "--device", "split", "--out", tmp_path, "--json")
    assert only_document(outcome) == saved(tmp_path)
    assert f"wrote {tmp_path / 'results.json'}\n" in outcome.err
    files = only_document(sharpmax_command("report", tmp_path, "--json"))["files"]
    assert str(tmp_path / "report.html") in files
    assert all(Path(file).is_file() for file in files)


def test_nothing_else_is_on_stdout(sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_bench, "cpu_tables", lambda **asked: print("chatter") or {"setting": {}, "bench": {}})
    outcome = sharpmax_command("bench", "--json")
    assert only_document(outcome)["tables"] == {"setting": {}, "bench": {}}
    assert outcome.err == "chatter\n"
    sharpmax_command.refused("bench", "--repeat", 0, "--json")
