"""The page about GPUs shows the committed benchmark, and says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gpu_tables import page_tables, with_tables

from sharpmax.experiments.benchmarks.gpu import FLOORS
from sharpmax.report.gpu import draw_bars, read_entries

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
MEASURED = ROOT / "benchmarks" / "h200.json"


def test_the_floors_are_those_of_the_file() -> None:
    for kind, words in (("stats", "Statistics, {}×"), ("attention", "Sharp attention, {}×"), ("decode", "Decode, {}×")):
        assert f"**{words.format(FLOORS[kind])}.**" in PAGE
    assert FLOORS["train"] is None


def test_the_tables_are_the_committed_run() -> None:
    assert with_tables(PAGE, page_tables(read_entries(MEASURED), "../benchmarks/h200.svg")) == PAGE


def test_the_figure_is_the_committed_run(tmp_path: Path) -> None:
    drawn = draw_bars(read_entries(MEASURED), tmp_path / "h200.svg")
    # All texts; where exactly they stand is up to the version of Vega.
    texts = [
        re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for path in (drawn, MEASURED.with_suffix(".svg"))
    ]
    assert texts[0] == texts[1]


def test_every_entry_keeps_the_contract() -> None:
    for one in read_entries(MEASURED):
        assert {"kind", "case", "ours_ms", "stock_ms", "ratio", "command", "provenance"} <= set(one)
        if one["agrees"]:
            assert one["ratio"] == one["ours_ms"] / one["stock_ms"]


def test_host_times_are_those_of_the_committed_file() -> None:
    bench = json.loads((ROOT / "benchmarks" / "host-h200.json").read_text(encoding="utf-8"))["tables"]["bench"]
    section = PAGE.split("## Host time per call")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    names = ("pytorch", "constant", "per-head constants", "paper", "row-stats", "decode")
    assert [row[1] for row in rows] == [f"{bench[f'host/{name}']['median_us']:.1f}" for name in names]
    ratios = [bench.get(f"everyday/{name}") for name in names]
    assert [row[3] for row in rows] == ["–" if one is None else f"{one['ratio']:.2f}×" for one in ratios]
