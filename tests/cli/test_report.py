"""`sharpmax report` of probed models, one or two on one page, and `sharpmax explore`."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest

import sharpmax
from tests.experiments.evaluate import tiny
from tests.report.saved import PROVENANCE, probed
from tests.report.saved import tables as committed

NAMES = {f"{kind}-kv.{form}" for kind in ("heads", "curves") for form in ("svg", "png")}


def save(folder: Path, tables: dict[str, Any]) -> Path:
    folder.mkdir()
    body = {"schema": 1, "command": "sharpmax probe smollm2", "provenance": PROVENANCE, "tables": tables}
    (folder / "results.json").write_text(json.dumps(body), encoding="utf-8")
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return save(tmp_path / "one", probed(layers=2))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_two_are_compared(one: Path, sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = save(tmp_path / "other", probed(layers=2, policy="paper"))
    outcome = sharpmax_command("report", one, other / "results.json")
    assert (outcome.code, outcome.err) == (0, "")
    assert names(tmp_path / "report") == NAMES | {"report.html"}
    assert names(one) == names(other) == {"results.json"}
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<code>sharpmax report one other --out report</code>" in page
    assert "lose focus on kv: " in page
    assert str(tmp_path) not in page


def test_what_cannot_be_compared_leaves_nothing(one: Path, sharpmax_command: Any, tmp_path: Path) -> None:
    wrong = save(tmp_path / "wrong", committed("calibrate-smollm2"))
    words = "'one' (probe) and 'wrong' (calibrate) cannot be compared"
    assert words in sharpmax_command.refused("report", one, wrong, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_probe_from_python_saves_is_drawn(sharpmax_command: Any, tmp_path: Path) -> None:
    found = sharpmax.probe(tiny.model(), tiny.tokenizer(), tasks=[tiny.LETTERS], sizes=[4, 8, 16], prompts=2)
    file = found.save(tmp_path / "probed")
    assert file == tmp_path / "probed" / "results.json"
    sharpmax_command.ok("report", file, "--out", tmp_path / "drawn")
    assert "heads-letters.svg" in names(tmp_path / "drawn")
    assert "LlamaForCausalLM" in (tmp_path / "drawn" / "report.html").read_text(encoding="utf-8")


def test_explore_writes_a_page_and_opens_it(
    sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str] = []

    def opened(address: str) -> bool:
        addresses.append(address)
        return len(addresses) < 2

    monkeypatch.setattr(webbrowser, "open", opened)
    monkeypatch.chdir(tmp_path)
    assert sharpmax_command.ok("explore").out == "wrote explore/explore.html\n"
    page = tmp_path / "explore" / "explore.html"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert addresses == [page.as_uri()]
    assert "No browser found" in sharpmax_command.ok("explore").out
    page.unlink()
    page.mkdir()
    sharpmax_command.refused("explore")
    assert len(addresses) == 2
