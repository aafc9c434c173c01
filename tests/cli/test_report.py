"""`sharpmax report` of probed models, one or two on one page, and `sharpmax explore`."""

from __future__ import annotations

import json
import shutil
import subprocess
import webbrowser
from pathlib import Path
from typing import Any

import pytest

import sharpmax
from tests.cli.lines import is_one_error_line
from tests.experiments.evaluate import tiny
from tests.report.saved import PROVENANCE, probed
from tests.report.saved import tables as committed

ROOT = Path(sharpmax.__file__).parents[2]
COMMAND = "sharpmax probe smollm2"
NAMES = {f"{kind}-kv.{form}" for kind in ("heads", "curves", "forecast") for form in ("svg", "png")}


def save(folder: Path, tables: dict[str, Any]) -> Path:
    folder.mkdir()
    body = {"schema": 1, "command": COMMAND, "provenance": PROVENANCE, "tables": tables}
    (folder / "results.json").write_text(json.dumps(body), encoding="utf-8")
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return save(tmp_path / "one", probed(layers=2))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return save(tmp_path / "other", probed(layers=2, policy="paper"))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_probed_model_is_drawn_beside_its_results(one: Path, sharpmax_command: Any) -> None:
    outcome = sharpmax_command("report", one)
    assert (outcome.code, outcome.err) == (0, "")
    assert names(one) == NAMES | {"results.json", "report.html"}
    assert outcome.out.rstrip().endswith("report.html")


def test_two_are_compared(
    one: Path, other: Path, sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = sharpmax_command("report", one, other / "results.json")
    assert (outcome.code, outcome.err) == (0, "")
    assert names(tmp_path / "report") == NAMES | {"report.html"}
    assert names(one) == names(other) == {"results.json"}
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<code>sharpmax report one other --out report</code>" in page
    assert "lose focus on kv: " in page
    assert str(tmp_path) not in page


@pytest.mark.parametrize(
    ("tables", "says"), [(committed("calibrate-smollm2"), "cannot be compared"), ({}, "nothing to compare")]
)
def test_what_cannot_be_compared_leaves_nothing(
    tables: dict[str, Any], says: str, one: Path, sharpmax_command: Any, tmp_path: Path
) -> None:
    outcome = sharpmax_command("report", one, save(tmp_path / "wrong", tables), "--out", tmp_path / "out")
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert says in outcome.err
    assert not (tmp_path / "out").exists()


def test_a_report_beside_committed_results_changes_no_tracked_file(sharpmax_command: Any, tmp_path: Path) -> None:
    committed = ROOT / "results" / "reproduce"
    listed = subprocess.run(["git", "ls-files", "."], cwd=committed, capture_output=True, text=True, check=False)
    tracked = listed.stdout.split() or [file.name for file in committed.iterdir()]  # a source package has no history
    assert "results.json" in tracked
    folder = tmp_path / "reproduce"
    shutil.copytree(committed, folder)
    assert sharpmax_command("report", folder).code == 0
    assert (folder / "report.html").is_file()
    assert [file for file in tracked if (folder / file).read_bytes() != (committed / file).read_bytes()] == []


def test_what_a_probe_from_python_saves_is_drawn(sharpmax_command: Any, tmp_path: Path) -> None:
    found = sharpmax.probe(tiny.model(), tiny.tokenizer(), tasks=[tiny.LETTERS], sizes=[4, 8, 16], prompts=2)
    file = found.save(tmp_path / "probed")
    assert file == tmp_path / "probed" / "results.json"
    sharpmax_command.ok("report", file, "--out", tmp_path / "drawn")
    assert "heads-letters.svg" in names(tmp_path / "drawn")
    assert "LlamaForCausalLM" in (tmp_path / "drawn" / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses a browser was asked to open."""
    addresses: list[str] = []

    def note(address: str) -> bool:
        addresses.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", note)
    return addresses


def test_the_page_is_written_here_and_opened(
    asked: list[str], sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = sharpmax_command("explore")
    assert (outcome.code, outcome.out, outcome.err) == (0, "wrote explore/explore.html\n", "")
    page = tmp_path / "explore" / "explore.html"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert asked == [page.as_uri()]


def test_a_machine_without_a_browser_says_so(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    outcome = sharpmax_command("explore", "--out", tmp_path)
    assert outcome.code == 0
    assert "No browser found" in outcome.out


def test_a_file_that_cannot_be_written_is_one_line(asked: list[str], sharpmax_command: Any, tmp_path: Path) -> None:
    (tmp_path / "explore.html").mkdir()
    sharpmax_command.refused("explore", "--out", tmp_path)
    assert asked == []
