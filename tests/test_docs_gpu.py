"""The page about GPUs shows the committed benchmark, and says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sharpmax.experiments.benchmarks.gpu import FLOORS
from sharpmax.report.gpu import BEGIN, END, draw_bars, page_tables, read_entries, with_tables

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
MEASURED = ROOT / "benchmarks" / "h200.json"
needs_run = pytest.mark.skipif(not MEASURED.exists(), reason="no run is committed yet")


def test_the_page_has_a_place_for_tables() -> None:
    assert PAGE.count(BEGIN) == PAGE.count(END) == 1


def test_the_floors_are_those_of_the_file() -> None:
    for kind, words in (("stats", "Statistics, {}×"), ("attention", "Sharp attention, {}×"), ("decode", "Decode, {}×")):
        assert f"**{words.format(FLOORS[kind])}.**" in PAGE
    assert FLOORS["train"] is None


@needs_run
def test_the_tables_are_the_committed_run() -> None:
    assert with_tables(PAGE, page_tables(read_entries(MEASURED), "../benchmarks/h200.svg")) == PAGE


@needs_run
def test_the_figure_is_the_committed_run(tmp_path: Path) -> None:
    drawn = draw_bars(read_entries(MEASURED), tmp_path / "h200.svg")
    # All texts; where exactly they stand is up to the version of Vega.
    texts = [
        re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for path in (drawn, MEASURED.with_suffix(".svg"))
    ]
    assert texts[0] == texts[1]


@needs_run
def test_every_entry_keeps_the_contract() -> None:
    for one in read_entries(MEASURED):
        assert {"kind", "case", "ours_ms", "stock_ms", "ratio", "command", "provenance"} <= set(one)
        if one["agrees"]:
            assert one["ratio"] == one["ours_ms"] / one["stock_ms"]
