"""Trainings that are short enough for a test."""

from __future__ import annotations

import pytest

from sharpmax import provenance
from sharpmax.experiments import stacked_training


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_git", lambda folder, *arguments: None)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of four steps, each reported, so that a short training has several."""
    monkeypatch.setattr(stacked_training, "BLOCK", 4)
    monkeypatch.setattr(stacked_training, "_SHOW_EVERY_S", 0.0)
    return 4
