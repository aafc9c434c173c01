"""`bench --training` on two layers: every case runs, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

from sharpmax.experiments.benchmarks import training

pytest.importorskip("transformers")


def test_every_case_is_measured_next_to_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        training, "_SHAPE", training._SHAPE | {"vocab_size": 1000, "hidden_size": 36, "intermediate_size": 8}
    )
    tables = training.training_tables(length=24, repeat=1, device=torch.device("cpu"), layers=1)
    assert list(tables["training_bench"]) == list(training.CASES)
    assert tables["training_bench"]["baseline"]["ratio"] == 1.0
    cost = tables["training_cost"]
    observed = tables["training_bench"]["observed"]["ratio"]
    assert cost["observer_percent"] == pytest.approx(100.0 * (observed - 1.0) / 20)
    assert cost["targets"]["clip_percent"] == {"at_most": 1.0, "reached": None}
