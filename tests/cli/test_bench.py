"""`sharpmax bench`: what it prints and writes, and that it does not time incorrect results."""

from __future__ import annotations

import functools
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.cli import bench as command
from sharpmax.errors import ArgumentError, MissingExtraError
from sharpmax.experiments.benchmarks import cpu as cpu_bench
from sharpmax.experiments.benchmarks import gpu as gpu_bench
from sharpmax.experiments.benchmarks import latency
from sharpmax.experiments.benchmarks import monitor as monitor_bench
from sharpmax.experiments.benchmarks.gpu_inputs import Shape
from sharpmax.experiments.benchmarks.latency import generate_tables
from sharpmax.integrations.transformers.interface import installed
from sharpmax.models import language
from sharpmax.report.gpu import read_entries
from sharpmax.stats import dispatch as operator
from sharpmax.stats.call import AttentionCall, Parts
from tests.cli.lines import saved
from tests.experiments.benchmarks.test_gpu import set_decode
from tests.experiments.benchmarks.test_monitor import TASK_PLANS
from tests.experiments.evaluate import tiny
from tests.integrations.families import FAMILIES

CASES = {"attention/stock", "row-stats/streaming", "row-stats/stock", "attention/paper"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no fresh interpreters: they have their own test."""

    def import_costs(rounds: int) -> dict[str, Any]:
        entry = {"what": "import", "median_s": 0.5, "min_s": 0.4, "torch_median_s": 1.0, "ratio": 0.5, "rounds": 1}
        heavy: dict[str, list[str]] = {"import/sharpmax": [], "import/row-stats": ["ray"]}
        return {name: {**entry, "heavy_modules": modules} for name, modules in heavy.items()}

    monkeypatch.setattr(cpu_bench, "import_costs", import_costs)
    monkeypatch.setattr(cpu_bench, "in_fresh_interpreter", lambda function, *sizes: 123_000_000)


def test_bench_prints_a_table_and_writes_json(sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command.ok("bench", "--cpu", "--length", 96, "--repeat", 2, "--out", tmp_path)
    for words in ("extra mb", "ratio ≤ 1.2, reached", "heavy modules ≤ 0, missed"):
        assert words in outcome.out
    results = saved(tmp_path, "cpu.json")
    assert results["schema"] == 1
    assert results["command"] == f"sharpmax bench --length 96 --repeat 2 --seed 0 --out {tmp_path.name}"
    bench = results["tables"]["bench"]
    assert set(bench) == CASES | {"import/sharpmax", "import/row-stats"}
    for name in CASES:
        assert name.replace("stock", "PyTorch") in outcome.out
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


def test_no_speed_for_a_wrong_implementation(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = operator.IMPLEMENTATIONS["streaming"]

    def wrong(problem: AttentionCall, fields: frozenset[str]) -> Parts:
        parts = right(problem, fields)
        return parts._replace(shortfall=parts.shortfall + 1e-3)

    monkeypatch.setitem(operator.IMPLEMENTATIONS, "streaming", wrong)
    outcome = sharpmax_command("bench", "--length", 64, "--repeat", 1, "--out", tmp_path)
    assert outcome.code == 1
    assert "Not timed, because results disagree with the reference: row-stats/streaming." in outcome.out
    bench = saved(tmp_path, "cpu.json")["tables"]["bench"]
    assert bench["row-stats/streaming"]["agrees"] is False
    assert not {"median_s", "min_s", "ratio"} & set(bench["row-stats/streaming"])
    assert bench["row-stats/stock"]["agrees"] is True
    assert bench["row-stats/stock"]["ratio"] > 0


def test_gpu_writes_a_list_and_keeps_the_numbers_without_what_draws(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the processor were a GPU, with few and small shapes."""

    def missing(path: Path) -> list[Path]:
        raise MissingExtraError("altair", "report", "drawing figures")

    prefill = [Shape(1, 2, 1, 24, 24, 8, causal=True), Shape(1, 2, 2, 48, 48, 8, counts=False, once=True)]
    decode = [Shape(2, 2, 1, 1, 40, 8), Shape(2, 2, 1, 1, 40, 8, page_size=16)]
    monkeypatch.setattr(command, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu_bench, "prefill_shapes", lambda length: prefill)
    monkeypatch.setattr(gpu_bench, "decode_shapes", lambda length: decode)
    monkeypatch.setattr(command, "draw_saved", missing)
    set_decode(monkeypatch)
    outcome = sharpmax_command.ok("bench", "--gpu", "--length", 64, "--repeat", 2, "--out", tmp_path)
    file, body = tmp_path / "cpu.json", saved(tmp_path, "cpu.json")
    assert [one["kind"] for one in body] == ["stats", "stats", "attention", "attention", "train", "decode", "decode"]
    for one in body:
        assert one["command"] == f"sharpmax bench --gpu --length 64 --repeat 2 --seed 0 --out {tmp_path.name}"
        assert {"commit", "versions", "hardware", "seed", "date"} <= set(one["provenance"])
        assert one["ratio"] == one["ours_ms"] / one["stock_ms"]
        assert one["rounds"] == (1 if one["shape"]["once"] else 2)
        assert one["case"] in outcome.out
    assert read_entries(file) == body
    for words in ("TFLOP/s", "TB/s", "extra B/row", "ratio, mean of 1 cases", "not judged", "No figure: drawing"):
        assert words in outcome.out
    assert "reached" not in outcome.out
    assert sharpmax_command.ok("report", file).out == f"wrote {tmp_path / 'cpu.svg'}\n"
    assert "<svg" in (tmp_path / "cpu.svg").read_text(encoding="utf-8")


def test_gpu_needs_one(sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device that torch can use; use --cpu" in sharpmax_command.refused("bench", "--gpu")


def test_a_monitor(sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "load_language_model", lambda name, **options: tiny.language())
    made = functools.partial(monitor_bench.monitor_tables, plans=TASK_PLANS, false_alarms=0.2)
    monkeypatch.setattr(monitor_bench, "monitor_tables", made)
    options = ("--device", "cpu", "--prompts", 12, "--repeat", 1, "--length", 40)
    outcome = sharpmax_command.ok("bench", "--monitor", *options, "--out", tmp_path)
    for words in ("model tiny, device cpu, dtype float32", "confidence", "false alarms (%): ", "overhead: "):
        assert words in outcome.out
    results = saved(tmp_path, "monitor.json")
    assert results["command"] == (
        "sharpmax bench --monitor --length 40 --repeat 1 --prompts 12 --seed 0 --device cpu --dtype float32 "
        f"--out {tmp_path.name}"
    )
    found = results["tables"]
    assert f"mean {found['false_alarms']['pooled']['mean']:.4g}" in outcome.out
    assert found["false_alarms"]["pooled"]["n"] == 3 * 24
    assert set(found["auroc/letters"]) == {"monitor", "confidence", "entropy", "energy", "length", "both"}
    counted = [found[f"auroc/{name}"]["confidence"]["pooled"] for name in (*found["setting"]["tasks"], "all")]
    assert [one["wrong"] + one["right"] for one in counted] == [3 * 12, 2 * 12, 5 * 12]
    assert counted[0]["right"] + counted[1]["right"] == counted[2]["right"]
    assert found["overhead"]["every"] == 16
    assert min(found["overhead"][name] for name in ("plain_ms", "watched_ms")) > 0
    assert found["overhead"]["targets"]["overhead_percent"]["reached"] is None
    assert installed(tiny.language().model) is None


def test_training(sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"vocab_size": 1000, "hidden_size": 36, "intermediate_size": 8}
    monkeypatch.setattr(latency, "_SHAPE", latency._SHAPE | shape)
    monkeypatch.setattr(latency, "training_tables", functools.partial(latency.training_tables, layers=1))
    options = ("--device", "cpu", "--length", 24, "--repeat", 1)
    printed = sharpmax_command.ok("bench", "--training", *options, "--out", tmp_path).out
    tables = saved(tmp_path, "training.json")["tables"]
    bench, cost = tables["training_bench"], tables["training_cost"]
    assert list(bench) == list(latency.TRAINING_CASES)
    assert bench["baseline"]["ratio"] == 1.0
    assert cost["observer_percent"] == pytest.approx(100.0 * (bench["observed"]["ratio"] - 1.0) / 20)
    assert cost["targets"]["clip_percent"] == {"at_most": 1.0, "reached": None}
    assert "device cpu, length 24" in printed
    assert re.search(r"\n *observed +[\d.]+ +[\d.]+", printed)
    assert re.search(r"training cost: .*observer percent [-\d.e]+, .*clip percent ≤ 1\b", printed)


def test_generate_times_the_baseline_and_every_policy_that_fits() -> None:
    model = FAMILIES["llama"].build()
    tables = generate_tables(model, "llama", contexts=(9, 12), batches=(1, 2), tokens=3, repeat=1, compiled=True)
    places = [f"eager, batch {batch}, {context} tokens" for batch in (1, 2) for context in (9, 12)]
    places += [f"static, batch {batch}, 9 tokens" for batch in (1, 2)]
    variants = ("baseline", "paper", "constant:1.5")
    assert list(tables["bench"]) == [f"{place}: {variant}" for place in places for variant in variants]
    for name, entry in tables["bench"].items():
        assert min(entry["prefill_ms"], entry["token_ms"]) > 0
        if name.endswith("baseline"):
            assert entry["prefill_ratio"] == entry["token_ratio"] == 1.0
            assert entry["targets"] == {}
    assert tables["setting"]["model"] == "llama"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("failing", ["paper", "baseline"])
def test_a_case_that_fails_does_not_end_the_others(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["llama"].build()

    def applied(model: Any, variant: str) -> Any:
        if variant == failing:
            raise RuntimeError("CUDA out of memory\nTried to allocate")
        return nullcontext()

    monkeypatch.setattr(latency, "_fits", lambda *given: True)
    monkeypatch.setattr(latency, "_applied", applied)
    policies = ["constant:1.5", "paper"]
    bench = generate_tables(model, "llama", policies=policies, contexts=(9,), tokens=3, repeat=1)["bench"]
    problem = {"problem": "RuntimeError: CUDA out of memory", "targets": {}}
    assert bench[f"eager, batch 1, 9 tokens: {failing}"] == problem
    assert bench["eager, batch 1, 9 tokens: constant:1.5"]["token_ms"] > 0
    assert ("token_ratio" in bench["eager, batch 1, 9 tokens: constant:1.5"]) == (failing == "paper")


@pytest.mark.parametrize(
    ("wrong", "says"), [({"tokens": 1}, "tokens: got 1"), ({"policies": ["nothing"]}, "policy: got 'nothing'")]
)
def test_generate_rejects_wrong_arguments(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        generate_tables(FAMILIES["llama"].build(), "llama", contexts=(9,), **wrong)


def test_the_command_writes_files_named_after_the_device(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "_CALLS", 2)
    monkeypatch.setattr(latency, "model_for", lambda *given: FAMILIES["llama"].build())
    line = ("bench", "--device", "cpu", "--repeat", 1, "--out", tmp_path)
    out = sharpmax_command.ok(*line, "--host").out
    assert "host/paper" in out
    assert "everyday/row-stats" in out
    sharpmax_command.ok(*line, "--generate", "random", "--length", 8, "--policy", "paper")
    results = saved(tmp_path, "generate-cpu.json")
    assert set(results["tables"]["bench"]) == {f"eager, batch 1, 8 tokens: {one}" for one in ("baseline", "paper")}
    assert "--generate random" in results["command"]
    assert (tmp_path / "host-cpu.json").is_file()
