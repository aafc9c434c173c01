"""`sharpmax report` of probed models: one, or two on one page."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import sharpmax
from tests.experiments.evaluate import tiny
from tests.report.calibrate_tables import make_tables as calibrated
from tests.report.probe_tables import COMMAND, make_tables, tiny_tables
from tests.report.reproduce_tables import PROVENANCE

ROOT = Path(sharpmax.__file__).parents[2]
NAMES = {f"{kind}-kv.{form}" for kind in ("heads", "curves", "layers") for form in ("svg", "png")}


def save(folder: Path, tables: dict[str, Any]) -> Path:
    folder.mkdir()
    body = {"schema": 1, "command": COMMAND, "provenance": PROVENANCE, "tables": tables}
    (folder / "results.json").write_text(json.dumps(body), encoding="utf-8")
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return save(tmp_path / "one", tiny_tables())


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return save(tmp_path / "other", make_tables(2, 4, model="tiny", policy="paper", tasks=("kv",)))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_probed_model_is_drawn_beside_its_results(one: Path, sharpmax_command: Any) -> None:
    outcome = sharpmax_command.ok("report", one)
    assert names(one) == NAMES | {"results.json", "report.html"}
    assert outcome.out.rstrip().endswith("report.html")


def test_or_somewhere_else(one: Path, sharpmax_command: Any, tmp_path: Path) -> None:
    sharpmax_command.ok("report", one / "results.json", "--out", tmp_path / "else")
    assert names(one) == {"results.json"}
    assert names(tmp_path / "else") == NAMES | {"report.html"}


def test_two_are_compared(
    one: Path, other: Path, sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sharpmax_command.ok("report", one, other / "results.json")
    assert names(tmp_path / "report") == NAMES | {"forecast-kv.svg", "forecast-kv.png", "report.html"}
    assert names(one) == names(other) == {"results.json"}
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<code>sharpmax report one other --out report</code>" in page
    assert "On kv, " in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize(("tables", "says"), [(calibrated(), "cannot be compared"), ({}, "nothing to compare")])
def test_what_cannot_be_compared_leaves_nothing(
    tables: dict[str, Any], says: str, one: Path, sharpmax_command: Any, tmp_path: Path
) -> None:
    assert says in sharpmax_command.refused("report", one, save(tmp_path / "wrong", tables), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_report_beside_committed_results_changes_no_tracked_file(sharpmax_command: Any, tmp_path: Path) -> None:
    committed = ROOT / "results" / "reproduce"
    listed = subprocess.run(["git", "ls-files", "."], cwd=committed, capture_output=True, text=True, check=False)
    tracked = listed.stdout.split() or [file.name for file in committed.iterdir()]  # a source package has no history
    assert "results.json" in tracked
    folder = tmp_path / "reproduce"
    shutil.copytree(committed, folder)
    sharpmax_command.ok("report", folder)
    assert (folder / "report.html").is_file()
    assert [file for file in tracked if (folder / file).read_bytes() != (committed / file).read_bytes()] == []
    # It has drawn the figure of the README.
    image = pytest.importorskip("PIL.Image")
    drawn, shown = (image.open(path) for path in (folder / "accuracy.png", ROOT / "docs" / "images" / "accuracy.png"))
    if drawn.info["Software"] != shown.info["Software"]:
        pytest.skip("another matplotlib has drawn the figure of the README")
    chops = pytest.importorskip("PIL.ImageChops")
    assert drawn.size == shown.size
    apart = chops.difference(drawn.convert("L"), shown.convert("L")).histogram()
    # Another machine may round the edge of a line differently, not more.
    assert sum(level * count for level, count in enumerate(apart)) / (drawn.width * drawn.height) < 0.1


def test_what_a_probe_from_python_saves_is_drawn(sharpmax_command: Any, tmp_path: Path) -> None:
    found = sharpmax.probe(tiny.model(), tiny.tokenizer(), tasks=[tiny.LETTERS], sizes=[4, 8, 16], prompts=2)
    file = found.save(tmp_path / "probed")
    assert file == tmp_path / "probed" / "results.json"
    for given in (file, file.parent):
        sharpmax_command.ok("report", given, "--out", tmp_path / "drawn")
        assert "heads-letters.svg" in names(tmp_path / "drawn")
        assert "LlamaForCausalLM" in (tmp_path / "drawn" / "report.html").read_text(encoding="utf-8")
    sharpmax_command.ok("report", file.parent, file.parent, "--out", tmp_path / "two")
