"""`sharpmax explore`: where the page goes, and whether it is opened."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import pytest


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


def test_it_can_go_elsewhere_and_stay_closed(asked: list[str], sharpmax_command: Any, tmp_path: Path) -> None:
    sharpmax_command.ok("explore", "--out", tmp_path / "new", "--no-open")
    assert (tmp_path / "new" / "explore.html").is_file()
    assert asked == []


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
