"""The command line as a function, independent of the checkout around it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sharpmax.cli import main, terminal
from tests.calibration.small import TEXT
from tests.cli.lines import is_one_error_line
from tests.experiments.conftest import no_git as no_git
from tests.experiments.evaluate import tiny


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Command:
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *words: Any) -> Outcome:
        code = main([str(word) for word in words])
        captured = self.capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    def ok(self, *words: Any) -> Outcome:
        """Run a command that succeeds and writes nothing to stderr."""
        outcome = self(*words)
        assert (outcome.code, outcome.err) == (0, "")
        return outcome

    def refused(self, *words: Any) -> str:
        """The one-line error of a command that prints nothing else."""
        outcome = self(*words)
        assert (outcome.code, outcome.out) == (2, "")
        assert is_one_error_line(outcome.err), outcome.err
        return outcome.err


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a task of the user and a text; test modules add files of their own."""
    folder = tmp_path_factory.mktemp("home")
    tiny.save(folder / "model")
    (folder / "letters.py").write_text(tiny.LETTERS_FILE)
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture
def sharpmax_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in this process, without its lines of progress."""
    monkeypatch.setattr(terminal, "_print_line", lambda line: None)
    return Command(capsys)
