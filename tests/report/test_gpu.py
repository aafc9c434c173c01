"""Report of the GPU benchmark: verdicts from unrounded numbers, a figure and tables from the file alone."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import FileFormatError
from sharpmax.experiments.benchmarks.gpu import FLOORS, LIMITS
from sharpmax.report.gpu import draw_bars, gpu_tables, holds_entries, read_entries, verdicts
from tests.report.saved import PROVENANCE
from tests.test_golden import check


def entry(kind: str, case: str, ratio: float | None, **changes: Any) -> dict[str, Any]:
    right = ratio is not None
    return {
        "kind": kind, "case": case, "counts": True, "agrees": right, "problem": None, "full_size": True,
        "ours_ms": 2.0 * ratio if ratio is not None else None, "stock_ms": 2.0 if right else None,
        "stock_backend": "cuDNN", "ratio": ratio, "floor": FLOORS[kind], "limits": LIMITS[kind],
        "errors": {"output": {"ours": 0.01, "allowed": 0.02 if right else 0.001, "stock": 0.01, "stock_plain": 0.01}},
        "rounds": 20, "extra_bytes_per_row": 12.0 if right else None, "tflop_per_s": 612.3, "tb_per_s": 4.271,
        "command": "sharpmax bench --gpu --out benchmarks",
        "provenance": PROVENANCE | {"hardware": {"gpu": "NVIDIA H200"}}, **changes,
    }  # fmt: skip


def entries() -> list[dict[str, Any]]:
    return [
        entry("stats", "one", 0.6), entry("stats", "two", 0.64),
        entry("attention", "one", 1.5, extra_bytes_per_row=33.25), entry("attention", "two", 1.7),
        entry("attention", "long", 3.0, counts=False),
        entry("train", "one", None), entry("train", "two", 1.8), entry("decode", "8 × 32,768 keys", 1.1203),
    ]  # fmt: skip


def saved(folder: Path, body: Any) -> Path:
    path = folder / "h200.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    return path


def test_tables_of_targets_and_cases() -> None:
    """A miss never looks like a hit, only cases that count are judged, and a wrong case shows no number."""
    failed = entry("decode", "fails", None, problem="no memory", errors={})
    unknown = entry("train", "unknown", None, errors={"dq": {"ours": None, "allowed": 1.0}})
    lines = []
    for given in (entries(), [entry("decode", "close", 1.12)], [failed], [unknown]):
        for table in gpu_tables(given):
            assert all(len(row) == len(table.head) for row in table.rows)
            lines += [table.title, *(" | ".join(cell.text for cell in row) for row in (table.head, *table.rows))]
    check("reports/gpu", "\n".join(lines) + "\n")


def test_small_shapes_and_unknown_memory_are_not_judged() -> None:
    assert {one.reached for one in verdicts([one | {"full_size": False} for one in entries()])} == {None}
    found = verdicts([entry("attention", "one", 1.5, extra_bytes_per_row=None)])
    assert [one.reached for one in found] == [True, True, None]


def test_the_figure_says_everything(tmp_path: Path) -> None:
    path = draw_bars(read_entries(saved(tmp_path, entries())), tmp_path / "h200.svg")
    svg = path.read_text(encoding="utf-8")
    texts = ["".join(node.itertext()) for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert {
        "Sharp attention and PyTorch's attention on NVIDIA H200, bfloat16", "not correct: no speed", "long *", "1.70×",
        "Training step (forward and backward); target of the mean 1.9×",
        "Sharp attention, inference; floor 1.5×; target of the mean 1.62×",
    } <= set(texts)  # fmt: skip
    assert any(text.startswith("Medians of 20 rounds") for text in texts)
    assert 'fill="#ffffff"' in svg, "readable on a dark page"
    with pytest.raises(FileFormatError, match="KeyError: 'ratio'"):
        draw_bars([{"kind": "stats"}], path)


def test_other_files_are_refused_and_told_apart(tmp_path: Path) -> None:
    wrong = [entry("stats", "x", 0.5) | {"kind": "speed"}]
    for body, words in (({"schema": 1}, "not a list"), ([], "not a list"), (wrong, "kind 'speed'")):
        with pytest.raises(FileFormatError, match=words):
            read_entries(saved(tmp_path, body))
    assert holds_entries(saved(tmp_path, entries()))
    assert not holds_entries(saved(tmp_path, {"schema": 1}))
    assert not holds_entries(tmp_path)
