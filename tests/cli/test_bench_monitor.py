"""`sharpmax bench --monitor`: what it prints and writes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from sharpmax.experiments.benchmarks import monitor as monitor_bench
from sharpmax.experiments.benchmarks.monitor import TaskPlan
from sharpmax.models import language
from tests.experiments.evaluate import tiny


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = (TaskPlan(tiny.LETTERS, (4, 8, 16), 8),)
    monkeypatch.setattr(language, "load_language_model", lambda name, **options: tiny.language())
    made = functools.partial(monitor_bench.monitor_tables, plans=plans, false_alarms=0.2)
    monkeypatch.setattr(monitor_bench, "monitor_tables", made)


def test_it_prints_tables_and_writes_json(sharpmax_command: Any, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--prompts", 8, "--repeat", 1, "--length", 40)
    outcome = sharpmax_command.ok("bench", "--monitor", *options, "--out", tmp_path)
    for words in (
        "Detecting wrong answers: tiny, float32 on cpu.",
        "confidence",
        "False alarms on 32",
    ):
        assert words in outcome.out
    saved = json.loads((tmp_path / "monitor.json").read_text(encoding="utf-8"))
    assert saved["command"] == (
        "sharpmax bench --monitor --length 40 --repeat 1 --prompts 8 --seed 0 --device cpu --dtype float32 "
        f"--out {tmp_path.name}"
    )
    assert saved["provenance"]["seed"] == 0
    tables = saved["tables"]
    assert f"{tables['false_alarms']['pooled']['mean']:.2f}%" in outcome.out


def test_no_out_writes_nothing(sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = sharpmax_command("bench", "--monitor", "--device", "cpu", "--prompts", 8, "--repeat", 1, "--length", 40)
    assert outcome.code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [(("--prompts", 1), "limit"), (("--probe",), "--probe"), (("--device", "abacus"), "--device")],
)
def test_options_that_mean_nothing(options: tuple[Any, ...], wanted: str, sharpmax_command: Any) -> None:
    outcome = sharpmax_command("bench", "--monitor", *options)
    assert outcome.code != 0
    assert wanted in outcome.err
