"""`sharpmax bench`: what it prints and writes, and that it refuses to time what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.experiments.benchmarks import cpu as cpu_bench
from sharpmax.experiments.benchmarks.measuring import targets
from sharpmax.stats import dispatch as operator
from sharpmax.stats.call import AttentionCall, Parts

IMPORT = {"what": "import sharpmax", "median_s": 0.5, "min_s": 0.4, "torch_median_s": 1.0, "ratio": 0.5, "rounds": 1}
CASES = {"attention/stock", "row-stats/streaming", "row-stats/stock", "attention/paper"}
IMPORTS = {"import/sharpmax", "import/row-stats"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Fresh interpreters have their own test; here they would only take time.
    canned = {
        "import/sharpmax": {**IMPORT, "heavy_modules": []},
        "import/row-stats": {**IMPORT, "heavy_modules": ["ray"]},
    }
    monkeypatch.setattr(cpu_bench, "import_costs", lambda rounds: {name: dict(entry) for name, entry in canned.items()})
    monkeypatch.setattr(cpu_bench, "peak_extra_bytes", lambda *sizes: 123_000_000)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_bench_prints_a_table_and_writes_json(sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command.ok("bench", "--cpu", "--length", 96, "--repeat", 2, "--out", tmp_path)
    assert not any(ord(letter) < 32 and letter != "\n" for letter in outcome.out)
    assert "123 MB" in outcome.out
    saved = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert saved["schema"] == 1
    assert saved["command"] == f"sharpmax bench --length 96 --repeat 2 --seed 0 --out {tmp_path.name}"
    bench = saved["tables"]["bench"]
    assert set(bench) == CASES | IMPORTS
    for name in CASES:
        assert name in outcome.out
        assert bench[name]["agrees"] is True
        assert 0 < bench[name]["min_s"] <= bench[name]["median_s"]
        assert bench[name]["rounds"] == 2
    assert bench["attention/stock"]["ratio"] == 1.0
    assert bench["row-stats/streaming"]["extra_mb"] == 123.0
    # A short run says nothing about targets that are meant for long rows; imports do not depend on the length.
    assert bench["row-stats/streaming"]["targets"]["ratio"] == {"at_most": 1.8, "reached": None}
    assert bench["row-stats/stock"]["targets"]["ratio"] == {"at_most": 1.1, "reached": None}
    assert bench["import/sharpmax"]["targets"]["ratio"] == {"at_most": 1.2, "reached": True}
    assert bench["import/row-stats"]["targets"]["heavy_modules"] == {"at_most": 0, "reached": False}


def test_no_out_writes_nothing(sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = sharpmax_command("bench", "--length", 16, "--repeat", 1)
    assert outcome.code == 0
    assert "wrote" not in outcome.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mistake", [1e-3, float("nan")])
def test_no_speed_for_a_wrong_implementation(
    mistake: float, sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = operator.IMPLEMENTATIONS["streaming"]

    def wrong(problem: AttentionCall, fields: frozenset[str]) -> Parts:
        parts = right(problem, fields)
        return parts._replace(shortfall=parts.shortfall + mistake)

    monkeypatch.setitem(operator.IMPLEMENTATIONS, "streaming", wrong)
    outcome = sharpmax_command("bench", "--length", 64, "--repeat", 1, "--out", tmp_path)
    assert outcome.code == 1
    line = next(line for line in outcome.out.splitlines() if "row-stats/streaming" in line)
    assert line.split()[1:4] == ["disagrees", "–", "–"]
    assert "Not timed, because results disagree with the reference: row-stats/streaming." in outcome.out
    bench = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))["tables"]["bench"]
    assert bench["row-stats/streaming"]["agrees"] is False
    assert not {"median_s", "min_s", "ratio"} & set(bench["row-stats/streaming"])
    assert bench["row-stats/stock"]["agrees"] is True
    assert bench["row-stats/stock"]["ratio"] > 0


def test_without_a_right_stock_attention_there_are_no_ratios(
    sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_bench, "distance", lambda given, wanted: 1.0)
    outcome = sharpmax_command("bench", "--length", 16, "--repeat", 1)
    assert outcome.code == 1
    assert outcome.out.count("disagrees ") >= len(CASES)


def test_targets_are_judged_at_full_length() -> None:
    entry = {"ratio": 1.5, "extra_mb": 400.0}
    judged = targets(cpu_bench._TARGETS["row-stats/streaming"], entry)
    assert judged["ratio"]["reached"] is True
    assert judged["extra_mb"]["reached"] is False
    assert targets({"extra_mb": 300.0}, {"extra_mb": None})["extra_mb"]["reached"] is None
