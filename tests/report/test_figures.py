"""Figures come from tables alone, the same from the same."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, FileFormatError, MissingExtraError
from sharpmax.report import dispersion
from sharpmax.report.figures import draw, drawable

SIZES = ("16", "256", "4096")


def cells(*means: float) -> dict[str, Any]:
    return {n: {"mean": mean, "sem": 0.1, "n": 4} for n, mean in zip(SIZES, means, strict=True)}


TABLES: dict[str, Any] = {
    "weight": {"softmax": cells(60.0, 10.0, 1.0), "paper": cells(90.0, 80.0, 1.0), "mine": cells(60.0, 60.0, 60.0)},
    "entropy": {"softmax": cells(1.3, 4.9, 7.8), "paper": cells(0.4, 1.3, 7.8), "mine": cells(1.3, 1.3, 1.3)},
    "theory": {
        "spread": 6.0,
        "largest_weight": dict(zip(SIZES, (96.0, 61.0, 9.0), strict=True)),
        "least_entropy": dict(zip(SIZES, (0.2, 2.3, 5.1), strict=True)),
        "paper_acts_below": 5.9442,
    },
}


def test_two_panels_with_labels_units_and_every_arm() -> None:
    figure = dispersion.draw_dispersion(TABLES)
    left, right = figure.axes
    assert left.get_ylabel() == "weight of the best item (%)"
    assert "(nats)" in right.get_ylabel()
    for panel in (left, right):
        assert panel.get_xscale() == "log"
        assert panel.get_xlabel() == "number of items n"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:3] == ["plain softmax", "the paper's polynomial", "mine"]
    assert "bound" in labels[3]
    assert any("5.94" in text.get_text() for text in left.texts)


def test_the_end_of_the_polynomial_lies_where_plain_entropy_passes_it() -> None:
    start = dispersion._crossing(TABLES["entropy"]["softmax"], 5.9442)
    assert start is not None
    assert 256 < start < 4096
    assert dispersion._crossing(TABLES["entropy"]["softmax"], 9.0) is None
    without = copy.deepcopy(TABLES)
    without["theory"]["paper_acts_below"] = None
    assert dispersion.draw_dispersion(without).axes[0].texts[:] == []
    without["theory"]["paper_acts_below"] = 9.0
    assert dispersion.draw_dispersion(without).axes[0].texts[:] == []


def test_files_are_complete_and_the_same_every_time(tmp_path: Path) -> None:
    first, second = draw(TABLES, tmp_path / "a"), draw(TABLES, tmp_path / "b")
    assert [path.name for path in first] == ["dispersion.svg", "dispersion.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"dispersion.svg", "dispersion.png"}
    svg = first[0].read_text(encoding="utf-8")
    assert svg.rstrip().endswith("</svg>")
    assert not re.search(r"<dc:date>|[ \t]$", svg, re.MULTILINE)
    assert first[1].read_bytes().startswith(b"\x89PNG")


def test_drawing_leaves_the_users_settings_alone(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw(TABLES, tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_what_can_be_drawn() -> None:
    assert drawable(TABLES) == ["dispersion"]
    assert drawable({"weight": {}, "accuracy": {}}) == []
    with pytest.raises(FileFormatError, match="nothing to draw"):
        draw({"accuracy": {}}, "unused")


def test_damaged_tables_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="damaged"):
        draw({**TABLES, "weight": {"softmax": {"many": {"mean": 1.0}}}}, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot write"):
        draw(TABLES, tmp_path / "file")
    (tmp_path / "dispersion.png").mkdir()
    with pytest.raises(ArgumentError, match="cannot write"):
        draw(TABLES, tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"sharpmax\[report\]"):
        draw(TABLES, tmp_path)


def test_report_imports_neither_experiments_nor_torch() -> None:
    code = (
        "import sys, sharpmax.report.figures as f; "
        "sys.exit(any(n in ('torch', 'matplotlib') or n.startswith('sharpmax.experiments') for n in sys.modules))"
    )
    source = str(Path(dispersion.__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False).returncode == 0
