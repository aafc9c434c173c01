"""The command line as a function, cut off from the checkout around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sharpmax import provenance
from sharpmax.cli import main, terminal
from tests.calibration.small import TEXT
from tests.experiments.evaluate import tiny


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_git", lambda folder, *arguments: None)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a task of the user's own and a text; a module that needs more puts it there too."""
    folder = tmp_path_factory.mktemp("home")
    tiny.save(folder / "model")
    (folder / "letters.py").write_text(tiny.LETTERS_FILE)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def sharpmax_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Outcome]:
    """Run a command here. Its lines of progress, of which tests/cli/test_terminal.py speaks, are left out."""
    if request.module.__name__.rpartition(".")[2] != "test_terminal":
        monkeypatch.setattr(terminal._Lines, "show", lambda self, stage, detail="": None)

    def run(*words: Any) -> Outcome:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
