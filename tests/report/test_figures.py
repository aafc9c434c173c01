"""Figures come from tables alone, the same from the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sharpmax.errors import ArgumentError, FileFormatError, MissingExtraError
from sharpmax.report import figures
from sharpmax.report.figures import draw, drawable
from tests.report.reproduce_tables import make_tables

TABLES = {name: table for name, table in make_tables().items() if name in ("accuracy", "comparison", "setting")}


def test_files_are_complete_and_the_same_every_time(tmp_path: Path) -> None:
    first, second = draw(TABLES, tmp_path / "a"), draw(TABLES, tmp_path / "b")
    assert [path.name for path in first] == ["accuracy.svg", "accuracy.png"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"accuracy.svg", "accuracy.png"}
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
    assert drawable(TABLES) == ["accuracy"]
    assert drawable({"weight": {}, "setting": {}}) == []
    with pytest.raises(FileFormatError, match="nothing to draw"):
        draw({"weight": {}}, "unused")


def test_damaged_tables_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="damaged"):
        draw({**TABLES, "accuracy": {"softmax": {"many": {"mean": 1.0}}}}, tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot write"):
        draw(TABLES, tmp_path / "file")
    (tmp_path / "accuracy.png").mkdir()
    with pytest.raises(ArgumentError, match="cannot write"):
        draw(TABLES, tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'jinja2>=.*' 'matplotlib>=.*' 'plotly>="):
        draw(TABLES, tmp_path)


def test_report_imports_neither_experiments_nor_torch() -> None:
    code = (
        "import sys, sharpmax.report.figures as f; "
        "sys.exit(any(n in ('torch', 'matplotlib') or n.startswith('sharpmax.experiments') for n in sys.modules))"
    )
    source = str(Path(figures.__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False).returncode == 0
