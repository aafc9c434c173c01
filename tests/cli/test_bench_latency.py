"""`bench --host` and `bench --generate`: what they write, on a processor and with small models."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError
from sharpmax.experiments.benchmarks import latency
from sharpmax.experiments.benchmarks.latency import generate_tables
from tests.integrations.families import FAMILIES

VARIANTS = ("baseline", "paper", "constant:1.5")


def test_generate_times_the_baseline_and_every_policy_that_fits() -> None:
    model = FAMILIES["llama"].build()
    tables = generate_tables(model, "llama", contexts=(9, 12), batches=(1, 2), tokens=3, repeat=1, compiled=True)
    places = [f"eager, batch {batch}, {context} tokens" for batch in (1, 2) for context in (9, 12)]
    places += [f"static, batch {batch}, 9 tokens" for batch in (1, 2)]
    assert list(tables["bench"]) == [f"{place}: {variant}" for place in places for variant in VARIANTS]
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


def test_generate_refuses_what_it_cannot_do() -> None:
    model = FAMILIES["llama"].build()
    with pytest.raises(ArgumentError, match="tokens: got 1"):
        generate_tables(model, "llama", contexts=(9,), tokens=1)
    with pytest.raises(ArgumentError, match="policy: got 'nothing'"):
        generate_tables(model, "llama", contexts=(9,), policies=["nothing"])


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
    saved = json.loads((tmp_path / "generate-cpu.json").read_text(encoding="utf-8"))
    assert set(saved["tables"]["bench"]) == {f"eager, batch 1, 8 tokens: {one}" for one in ("baseline", "paper")}
    assert "--generate random" in saved["command"]
    assert saved["provenance"]["versions"]["torch"]
    assert (tmp_path / "host-cpu.json").is_file()
