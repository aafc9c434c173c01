"""Trainings and trained heads small enough for a test."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sharpmax import provenance
from sharpmax.experiments import stacked_training
from sharpmax.experiments.stacked_training import RECIPES, Recipe
from sharpmax.models.stacked import SingleHeads
from tests.experiments.reproduce.trained_heads import heads_of


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_git", lambda folder, *arguments: None)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of four steps, so that a short training has several, and word of every one of them."""
    monkeypatch.setattr(stacked_training, "BLOCK", 4)
    monkeypatch.setattr(stacked_training, "_SHOW_EVERY_S", 0.0)
    return 4


@pytest.fixture(params=list(RECIPES))
def small_recipe(request: pytest.FixtureRequest) -> Recipe:
    """Each recipe with few sets per step."""
    return replace(RECIPES[request.param], batch=4)


@pytest.fixture(scope="session")
def heads() -> list[SingleHeads]:
    """Two heads of the paper's recipe at full length."""
    return heads_of("paper")
