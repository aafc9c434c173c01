"""`--json`: one document on stdout, the one that is saved, and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpmax.experiments.benchmarks import cpu as cpu_bench
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.cli.lines import is_one_error_line, saved


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


def test_fold(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    constants = PerHead.of(Constant, value=[[0.5, 2.0, 1.0, 1.3], [1.0, 0.7, 1.6, 1.5]])
    constants.save(tmp_path / "constants.json")
    line = ("fold", home / "model", "--policy", tmp_path / "constants.json", "--out", tmp_path / "folded", "--json")
    found = only_document(sharpmax_command(*line))
    assert 0 < found.pop("error") < 1e-7
    about = {"model": "model", "policy": constants.to_dict(), "layers": 2}
    assert found == {"folder": str(tmp_path / "folded"), **about}


def test_what_a_library_prints_goes_elsewhere(sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_bench, "cpu_tables", lambda **asked: print("chatter") or {"setting": {}, "bench": {}})
    outcome = sharpmax_command("bench", "--json")
    assert only_document(outcome)["tables"] == {"setting": {}, "bench": {}}
    assert outcome.err == "chatter\n"


def test_an_error_leaves_stdout_empty(home: Path, sharpmax_command: Any) -> None:
    outcome = sharpmax_command("horizon", home / "model", "--mass", 2, "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert is_one_error_line(outcome.err)
