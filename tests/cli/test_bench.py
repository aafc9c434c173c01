"""`sharpmax bench`: what it prints and writes, and that it refuses to time what is wrong."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.cli import bench as command
from sharpmax.errors import MissingExtraError
from sharpmax.experiments.benchmarks import cpu as cpu_bench
from sharpmax.experiments.benchmarks import gpu as gpu_bench
from sharpmax.experiments.benchmarks import monitor as monitor_bench
from sharpmax.experiments.benchmarks.gpu_inputs import Shape
from sharpmax.experiments.benchmarks.measuring import targets
from sharpmax.experiments.benchmarks.monitor import TaskPlan
from sharpmax.models import language
from sharpmax.report.gpu import read_entries
from sharpmax.stats import dispatch as operator
from sharpmax.stats.call import AttentionCall, Parts
from tests.experiments.evaluate import tiny
from tests.experiments.gpu_cases import plain_decode, set_decode

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


CONTRACT = {"kind", "case", "ours_ms", "stock_ms", "ratio", "command", "provenance"}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the processor were a GPU, with few and small shapes."""
    monkeypatch.setattr(command, "_gpu", lambda: torch.device("cpu"))
    prefill = [Shape(1, 2, 1, 24, 24, 8, causal=True), Shape(1, 2, 2, 48, 48, 8, counts=False, once=True)]
    decode = [Shape(2, 2, 1, 1, 40, 8), Shape(2, 2, 1, 1, 40, 8, page_size=16)]
    monkeypatch.setattr(gpu_bench, "prefill_shapes", lambda length: prefill)
    monkeypatch.setattr(gpu_bench, "decode_shapes", lambda length: decode)


@pytest.mark.usefixtures("on_cpu")
def test_it_prints_tables_and_writes_a_list_and_a_figure(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_decode(monkeypatch)
    outcome = sharpmax_command.ok("bench", "--gpu", "--length", 64, "--repeat", 2, "--out", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.json", "cpu.svg"]
    body = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert isinstance(body, list)
    assert [one["kind"] for one in body] == ["stats", "stats", "attention", "attention", "train", "decode", "decode"]
    for one in body:
        assert set(one) >= CONTRACT
        assert one["command"] == f"sharpmax bench --gpu --length 64 --repeat 2 --seed 0 --out {tmp_path.name}"
        assert {"commit", "versions", "hardware", "seed", "date"} <= set(one["provenance"])
        assert one["ratio"] == one["ours_ms"] / one["stock_ms"]
        assert one["rounds"] == (1 if one["shape"]["once"] else 2)
        assert one["case"] in outcome.out
    assert read_entries(tmp_path / "cpu.json") == body
    for words in ("TFLOP/s", "TB/s", "extra B/row", "ratio, mean of 1 cases", "not judged"):
        assert words in outcome.out
    assert "reached" not in outcome.out
    assert "<svg" in (tmp_path / "cpu.svg").read_text(encoding="utf-8")


@pytest.mark.usefixtures("on_cpu")
def test_no_speed_for_what_is_wrong(sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_decode(monkeypatch, lambda *given, **options: plain_decode(*given, **options) * 1.1)
    outcome = sharpmax_command("bench", "--gpu", "--repeat", 1, "--out", tmp_path)
    assert outcome.code == 1
    wrong = "decode 2 × 40 keys, D 8; decode 2 × 40 keys, D 8, paged"
    assert f"Not timed, because results disagree with the reference: {wrong}." in outcome.out
    line = next(line.strip() for line in outcome.out.splitlines() if line.strip().startswith("2 × 40 keys, D 8, paged"))
    assert line.removeprefix("2 × 40 keys, D 8, paged").split()[:4] == ["disagrees", "–", "–", "–"]
    decode = [one for one in read_entries(tmp_path / "cpu.json") if one["kind"] == "decode"]
    assert [(one["agrees"], one["ours_ms"], one["stock_ms"], one["ratio"]) for one in decode] == [
        (False, None, None, None)
    ] * 2
    assert "missed" in outcome.out


@pytest.mark.usefixtures("on_cpu")
def test_without_what_draws_the_numbers_are_kept(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: Path) -> list[Path]:
        raise MissingExtraError("altair", "report", "drawing figures")

    monkeypatch.setattr(command, "draw_saved", missing)
    monkeypatch.setattr(gpu_bench, "decode_shapes", lambda length: [])
    outcome = sharpmax_command("bench", "--gpu", "--repeat", 1, "--length", 64, "--out", tmp_path)
    assert outcome.code == 0
    assert "No figure: drawing figures needs" in outcome.out
    monkeypatch.undo()
    again = sharpmax_command("report", tmp_path / "cpu.json")
    assert (again.code, again.out) == (0, f"wrote {tmp_path / 'cpu.svg'}\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without one")
def test_a_machine_without_a_gpu_is_told_so(sharpmax_command: Any) -> None:
    outcome = sharpmax_command("bench", "--gpu")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines() == [
        "sharpmax: error: --gpu: this machine has no CUDA device that torch can use; use --cpu"
    ]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = (TaskPlan(tiny.LETTERS, (4, 8, 16), 8),)
    monkeypatch.setattr(language, "load_language_model", lambda name, **options: tiny.language())
    made = functools.partial(monitor_bench.monitor_tables, plans=plans, false_alarms=0.2)
    monkeypatch.setattr(monitor_bench, "monitor_tables", made)


@pytest.mark.usefixtures("small")
def test_a_monitor(sharpmax_command: Any, tmp_path: Path) -> None:
    options = ("--device", "cpu", "--prompts", 8, "--repeat", 1, "--length", 40)
    outcome = sharpmax_command.ok("bench", "--monitor", *options, "--out", tmp_path)
    for words in ("Detecting wrong answers: tiny, float32 on cpu.", "confidence", "False alarms on 32"):
        assert words in outcome.out
    saved = json.loads((tmp_path / "monitor.json").read_text(encoding="utf-8"))
    assert saved["command"] == (
        "sharpmax bench --monitor --length 40 --repeat 1 --prompts 8 --seed 0 --device cpu --dtype float32 "
        f"--out {tmp_path.name}"
    )
    assert saved["provenance"]["seed"] == 0
    tables = saved["tables"]
    assert f"{tables['false_alarms']['pooled']['mean']:.2f}%" in outcome.out
