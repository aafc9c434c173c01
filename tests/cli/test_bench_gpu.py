"""`sharpmax bench --gpu`: what it prints and writes, and that it refuses to time what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.cli import bench as bench_gpu
from sharpmax.errors import MissingExtraError
from sharpmax.experiments.benchmarks import gpu as run
from sharpmax.experiments.benchmarks.gpu_inputs import Shape
from sharpmax.report.gpu import read_entries
from tests.experiments.gpu_cases import plain_decode, set_decode

CONTRACT = {"kind", "case", "ours_ms", "stock_ms", "ratio", "command", "provenance"}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the processor were a GPU, with few and small shapes."""
    monkeypatch.setattr(bench_gpu, "_gpu", lambda: torch.device("cpu"))
    prefill = [Shape(1, 2, 1, 24, 24, 8, causal=True), Shape(1, 2, 2, 48, 48, 8, counts=False, once=True)]
    decode = [Shape(2, 2, 1, 1, 40, 8), Shape(2, 2, 1, 1, 40, 8, page_size=16)]
    monkeypatch.setattr(run, "prefill_shapes", lambda length: prefill)
    monkeypatch.setattr(run, "decode_shapes", lambda length: decode)


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

    monkeypatch.setattr(bench_gpu, "draw_saved", missing)
    monkeypatch.setattr(run, "decode_shapes", lambda length: [])
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


def test_lengths_beyond_full_size_are_refused(sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "_gpu", lambda: torch.device("cpu"))
    assert "length: got 16385; allowed: 16 … 16384" in sharpmax_command.refused("bench", "--gpu", "--length", 16_385)
