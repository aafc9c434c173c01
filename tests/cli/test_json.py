"""`--json`: one document on stdout, the one that is saved, and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpmax.experiments.benchmarks import cpu as cpu_bench
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.experiments.clrs import stub

MODEL = "model"
TRAIN = (
    "--per-cell", 12, "--steps", 2, "--batch-tokens", 256, "--row-tokens", 128, "--tokens-at-once", 128,
    "--data", "data", "--device", "cpu",
)  # fmt: skip
LINES = {
    "probe": (MODEL, "--task", "kv", "--sizes", "8..32", "--prompts", 2, "--no-draw", "--device", "split"),
    "evaluate": (
        MODEL, "--task", "letters.py", "--sizes", 4, "--prompts", 2, "--no-text", "--no-draw", "--device", "split",
    ),
    "clrs train": (MODEL, *TRAIN),
}  # fmt: skip
"""Every command that saves results prints them in `run.show_results`: one with a page of each kind is enough."""


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the folder of the model, with little to read."""
    monkeypatch.chdir(home)
    stub.install(monkeypatch.setitem)
    return home


def only_document(outcome: Any) -> Any:
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err
    return json.loads(outcome.out)


@pytest.mark.parametrize("command", LINES)
def test_what_is_saved_is_what_is_printed(command: str, tmp_path: Path, sharpmax_command: Any) -> None:
    outcome = sharpmax_command(*command.split(), *LINES[command], "--out", tmp_path, "--json")
    assert only_document(outcome) == json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert f"wrote {tmp_path / 'results.json'}\n" in outcome.err


def test_fold(tmp_path: Path, sharpmax_command: Any) -> None:
    constants = PerHead.of(Constant, value=[[0.5, 2.0, 1.0, 1.3], [1.0, 0.7, 1.6, 1.5]])
    constants.save(tmp_path / "constants.json")
    out = tmp_path / "folded"
    found = only_document(
        sharpmax_command("fold", MODEL, "--policy", tmp_path / "constants.json", "--out", out, "--json")
    )
    assert 0 < found.pop("error") < 1e-7
    assert found == {"folder": str(out), "model": "model", "policy": constants.to_dict(), "layers": 2}


def test_report(tmp_path: Path, sharpmax_command: Any) -> None:
    sharpmax_command("probe", *LINES["probe"], "--out", tmp_path)
    files = only_document(sharpmax_command("report", tmp_path, "--json"))["files"]
    assert str(tmp_path / "report.html") in files
    assert all(Path(file).is_file() for file in files)


def test_bench(tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_bench, "import_costs", lambda rounds: {})
    monkeypatch.setattr(cpu_bench, "peak_extra_bytes", lambda *sizes: 1)
    line = ("bench", "--length", 32, "--repeat", 1, "--json")
    saved = only_document(sharpmax_command(*line, "--out", tmp_path))
    assert saved == json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert set(only_document(sharpmax_command(*line))["tables"]) == set(saved["tables"])


def test_what_a_library_prints_goes_elsewhere(
    tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_bench, "cpu_tables", lambda **asked: print("chatter") or {"setting": {}, "bench": {}})
    outcome = sharpmax_command("bench", "--json")
    assert only_document(outcome)["tables"] == {"setting": {}, "bench": {}}
    assert outcome.err == "chatter\n"
