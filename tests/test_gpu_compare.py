"""Training and tests of every method of `sharpmax compare` on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sharpmax.experiments.compare.methods import SHIPPED_METHODS, ModelSpec
from sharpmax.experiments.compare.run import evaluate, train
from sharpmax.experiments.stacked_training import StackedTraining
from tests.numerics import NEEDS_GPU

pytestmark = NEEDS_GPU

MODELS = [ModelSpec(width=32), ModelSpec("encoder", 32, 2, 2), ModelSpec("encoder", 32, 2, 2, causal=True)]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.label)
@pytest.mark.parametrize("name", SHIPPED_METHODS)
def test_every_method_is_trained_as_a_graph_and_tested(
    name: str, model: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ("sparsemax", "entmax15"):
        pytest.importorskip("entmax", reason="needs the extra entmax")
    captured: list[bool] = []
    real = StackedTraining._captured

    def noting(training: StackedTraining[Any]) -> Any:
        advance = real(training)
        captured.append(advance != training._one_step)
        return advance

    monkeypatch.setattr(StackedTraining, "_captured", noting)
    common: dict[str, Any] = {"model": model, "task": "max", "seeds": [0, 1], "device": "cuda"}
    common |= {"method": SHIPPED_METHODS[name]}
    outcome = train(**common, steps=300, batch=64)
    assert captured == [True]
    assert outcome.record["diverged"] == []
    assert sum(outcome.record["loss"]) < 2 * 1.3 * math.log(10)
    assert outcome.record["memory"] > 0
    assert outcome.blob is not None
    record = evaluate(**common, size=2048, samples=4, blob=outcome.blob)
    assert all(math.isfinite(value) for value in record.record["entropy"])


def test_the_memory_of_a_method_does_not_depend_on_earlier_methods() -> None:
    def memory(name: str) -> float:
        common: dict[str, Any] = {"model": MODELS[0], "task": "max", "seeds": [0, 1], "device": "cuda"}
        found = train(**common, method=SHIPPED_METHODS[name], steps=200, batch=64).record["memory"]
        assert found > 0
        return float(found)

    torch._C._cuda_clearCublasWorkspaces()  # as in a fresh process
    first = memory("softmax")
    memory("adaptive")
    assert memory("softmax") == pytest.approx(first, rel=0.02)
