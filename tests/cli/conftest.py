"""The command line as a function, cut off from the checkout around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from sharpmax.cli import main
from sharpmax.experiments import provenance


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_git", lambda folder, *arguments: None)


@pytest.fixture
def sharpmax_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*words: Any) -> Outcome:
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
