"""Costs on a CPU, of attention and of capturing: measured next to a plain pass, and only where nothing is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax import provenance
from sharpmax.cli import main
from sharpmax.errors import ArgumentError, SharpmaxError
from sharpmax.experiments.benchmarks import cpu as fresh
from sharpmax.experiments.benchmarks import cpu as probe_bench
from sharpmax.experiments.benchmarks import training
from sharpmax.experiments.benchmarks.measuring import resident_bytes, run_python
from tests.integrations.families import FAMILIES

COSTS = {
    "plain": {"seconds": 10.0, "cpu_seconds": 8.0, "peak_mib": 1000.0, "output": "a", "entropy_error": None},
    "last": {"seconds": 11.0, "cpu_seconds": 8.4, "peak_mib": 1100.0, "output": "a", "entropy_error": 1e-6},
    "log": {"seconds": 30.0, "cpu_seconds": 9.6, "peak_mib": 1290.0, "output": "a", "entropy_error": 2e-6},
}


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    canned = {choice: dict(cost) for choice, cost in COSTS.items()}
    monkeypatch.setattr(probe_bench, "pass_costs", lambda model, length, choice, seed: canned[choice])
    monkeypatch.setattr(provenance, "_git", lambda folder, *arguments: None)
    return canned


def test_a_pass_measures_itself_and_its_entropies() -> None:
    model = FAMILIES["llama"].build()
    plain = probe_bench.one_pass(model, 40, "plain", 0)
    log = probe_bench.one_pass(model, 40, "log", 0)
    assert plain["output"] == log["output"]
    assert plain["entropy_error"] is None
    assert 0 < log["entropy_error"] < 1e-5
    assert log["seconds"] > 0
    assert log["cpu_seconds"] > 0
    if resident_bytes() is not None:
        assert plain["peak_mib"] > 10
    assert probe_bench.one_pass(model, 40, "plain", 1)["output"] != plain["output"]


def test_a_wrong_entropy_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    from sharpmax.probing import capture

    right = capture.measured

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        return found | {"entropy": found["entropy"] * 1.01}

    monkeypatch.setattr(capture, "measured", wrong)
    assert probe_bench.one_pass(FAMILIES["llama"].build(), 40, "all", 0)["entropy_error"] > 1e-3


def test_ratios_and_targets(costs: dict[str, dict[str, Any]]) -> None:
    bench = probe_bench.probe_tables(repeat=3)["bench"]
    assert list(bench) == ["forward/plain", "capture/last", "capture/log"]
    assert bench["capture/last"]["ratio"] == pytest.approx(1.1)
    assert bench["capture/last"]["cpu_ratio"] == pytest.approx(1.05)
    assert bench["capture/last"]["peak_ratio"] == pytest.approx(1.1)
    assert bench["capture/log"]["targets"]["ratio"] == {"at_most": 2.5, "reached": False}
    assert bench["capture/log"]["targets"]["peak_ratio"] == {"at_most": 1.3, "reached": True}
    short = probe_bench.probe_tables(length=64)["bench"]
    assert short["capture/log"]["targets"]["ratio"]["reached"] is None


@pytest.mark.parametrize("change", [{"output": "b"}, {"entropy_error": 0.01}, {"entropy_error": float("nan")}])
def test_no_speed_where_something_is_wrong(
    change: dict[str, Any], costs: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs["last"] |= change
    assert main(["bench", "--probe", "--out", str(tmp_path)]) == 1
    bench = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))["tables"]["bench"]
    assert bench["capture/last"]["agrees"] is False
    assert not {"median_s", "ratio", "peak_ratio"} & set(bench["capture/last"])
    assert bench["capture/log"]["ratio"] == pytest.approx(3.0)
    out = capsys.readouterr().out
    assert ("changes the output" in out) == ("output" in change)
    assert "Not timed, because results disagree with the reference: capture/last." in out


def test_memory_that_is_not_known_is_no_number(costs: dict[str, dict[str, Any]]) -> None:
    costs["log"]["peak_mib"] = None
    entry = probe_bench.probe_tables()["bench"]["capture/log"]
    assert entry["peak_ratio"] is None
    assert entry["targets"]["peak_ratio"]["reached"] is None


def test_the_command_prints_and_writes(
    costs: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--probe", "--out", str(tmp_path)]) == 0
    saved = json.loads((tmp_path / "probe.json").read_text(encoding="utf-8"))
    assert saved["command"] == f"sharpmax bench --probe --length 8192 --repeat 3 --seed 0 --out {tmp_path.name}"
    assert saved["tables"]["setting"]["rows"] == {"last": 1, "log": 37}
    out = capsys.readouterr().out
    assert "≤ 2.5, missed" in out
    assert "≤ 1.3, reached" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "probe.json"]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="length: got 1"):
        probe_bench.probe_tables(length=1)
    with pytest.raises(ArgumentError, match="repeat: got 0"):
        probe_bench.probe_tables(repeat=0)
    with pytest.raises(ArgumentError, match="rows: got 'some'"):
        probe_bench.probe_tables(rows=["some"])


def test_imports_are_compared_with_that_of_torch_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([9.0, 2.0, 1.0, 3.0, 4.0, 1.0, 8.0])  # the first one counts for nothing
    monkeypatch.setattr(fresh, "_STATEMENTS", {"torch": "import torch", "light": "import json"})
    monkeypatch.setattr(fresh, "_timed_import", lambda statement: (next(rounds), []))
    light = fresh.import_costs(rounds=3)["light"]
    assert (light["ratio"], light["median_s"], light["min_s"], light["torch_median_s"]) == (4 / 3, 4.0, 1.0, 2.0)


def test_import_of_the_package_is_light() -> None:
    seconds, heavy = fresh._timed_import("import sharpmax")
    assert heavy == []
    assert seconds > 0


def test_peak_memory_is_far_below_the_matrix_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    if resident_bytes() is None:
        pytest.skip("this system does not tell the memory of a process")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    extra = fresh.peak_extra_bytes(length=2048, heads=4, width=8)
    assert extra is not None
    assert 0 < extra < 4 * 2048**2 * 4 / 2


def test_a_failing_interpreter_is_one_line() -> None:
    with pytest.raises(SharpmaxError, match="ZeroDivisionError") as caught:
        run_python(["-c", "1 / 0"])
    assert "\n" not in str(caught.value)


pytest.importorskip("transformers")


def test_every_case_is_measured_next_to_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training, "_SHAPE", training._SHAPE | {"vocab_size": 1000, "hidden_size": 36, "intermediate_size": 8}
    )
    tables = training.training_tables(length=24, repeat=1, device=torch.device("cpu"), layers=1)
    assert list(tables["training_bench"]) == list(training.CASES)
    assert tables["training_bench"]["baseline"]["ratio"] == 1.0
    cost = tables["training_cost"]
    observed = tables["training_bench"]["observed"]["ratio"]
    assert cost["observer_percent"] == pytest.approx(100.0 * (observed - 1.0) / 20)
    assert cost["targets"]["clip_percent"] == {"at_most": 1.0, "reached": None}
