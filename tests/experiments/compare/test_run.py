"""Training and testing of every method, on small models: what they record and what it depends on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from sharpmax.experiments import stacked_training
from sharpmax.experiments.compare import run as cells
from sharpmax.experiments.compare.methods import SHIPPED_METHODS, Method, ModelSpec
from sharpmax.experiments.compare.run import evaluate, train
from sharpmax.models.single_head import SetHeads
from sharpmax.tasks.max_retrieval import seeded, sized_task

SINGLE = ModelSpec(width=16)
ENCODER = ModelSpec("encoder", width=16, heads=2, depth=2)
SPENT = ("seconds", "memory")


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_training, "BLOCK", 10)


def common(method: Method, model: ModelSpec = SINGLE, task: str = "max", seeds: tuple[int, ...] = (0, 1)) -> Any:
    return {"method": method, "model": model, "task": task, "seeds": list(seeds), "device": "cpu"}


def trained(
    method: Method, model: ModelSpec = SINGLE, task: str = "max", seeds: tuple[int, ...] = (0, 1), **how: int
) -> Any:
    return train(**common(method, model, task, seeds), steps=how.get("steps", 40), batch=how.get("batch", 16))


def examined(method: Method, blob: bytes | None, model: ModelSpec = SINGLE, task: str = "max",
             seeds: tuple[int, ...] = (0, 1), *, size: int = 64, samples: int = 8) -> dict[str, Any]:  # fmt: skip
    assert blob is not None
    return evaluate(**common(method, model, task, seeds), size=size, samples=samples, blob=blob).record


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for key, one in value.items() if key != "close" for number in numbers(one)]
    return [number for one in value for number in numbers(one)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", SHIPPED_METHODS)
def test_every_method_learns_and_is_finite_at_1024(name: str) -> None:
    method = SHIPPED_METHODS[name]
    outcome = trained(method, steps=80)
    first, last = outcome.record["curve"][0][1], outcome.record["curve"][-1][1]
    assert outcome.record["diverged"] == [False, False]
    assert all(math.isfinite(loss) for loss in last)
    assert sum(last) < sum(first) < 2 * 1.3 * math.log(10)
    record = examined(method, outcome.blob, size=1024, samples=2)
    assert all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers(record))


@pytest.mark.parametrize(
    ("task", "name"), [("max", "ssmax"), ("sort", "stick-breaking"), ("copy", "ssmax"), ("recall", "stick-breaking")]
)
def test_encoders_do_every_task(task: str, name: str) -> None:
    model = ModelSpec("encoder", 16, 2, 2, causal=sized_task(task).ordered)
    outcome = trained(SHIPPED_METHODS[name], model, task, (0,), steps=4, batch=4)
    record = examined(SHIPPED_METHODS[name], outcome.blob, model, task, (0,), size=24, samples=3)
    assert all(math.isfinite(number) for number in numbers(record))
    assert len(record["layers_entropy"][0]) == 2
    assert len(record["layers_entropy"][0][0]) == 2


def test_what_is_measured_is_what_an_untrained_model_does() -> None:
    """Each number of the record once more, set by set, from the model itself."""
    seeds, size, samples = (0, 1), 12, 40
    blob = save(SetHeads(seeds, "softmax", {}, width=16).state_dict())
    record = examined(SHIPPED_METHODS["softmax"], blob, size=size, samples=samples)
    for at, seed in enumerate(seeds):
        heads = SetHeads((seed,), "softmax", {}, width=16)
        batch = sized_task("max").draw((samples,), size, seeded(torch.device("cpu"), seed, size, 2))
        right = ranked = hard = near = near_ranked = 0
        tops, entropies = [], []
        for inputs, answer, close in zip(batch.inputs, batch.answer, batch.close, strict=True):
            with torch.no_grad():
                h = heads.features(inputs[None, :-1, :11])[0]
                s = heads.logits(h[None], inputs[None, -1, 11])[0].double()
                p = s.softmax(-1)
                scores = heads.classify((p.float()[:, None] * h).sum(0)[None])[0]
                hard += int(heads.classify(h[p.argmax()][None])[0].argmax() == answer)
            best = int(inputs[:-1, 0].argmax())
            right += int(scores.argmax() == answer)
            ranked += int(p.argmax()) == best
            near += bool(close)
            near_ranked += bool(close) and int(p.argmax()) == best
            tops.append(float(p.max()))
            entropies.append(float(-(p * p.log()).sum()))
        assert record["accuracy"][at] == right / samples
        assert record["ranking"][at] == ranked / samples
        assert record["hard"][at] == hard / samples
        assert record["close"][at] == pytest.approx(near_ranked / near)
        assert record["top"][at] == pytest.approx(sum(tops) / samples, rel=1e-4)
        assert record["entropy"][at] == pytest.approx(sum(entropies) / samples, rel=1e-4)


def test_a_seed_is_tested_on_the_same_sets_whatever_stands_beside_it_and_however_they_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome = trained(SHIPPED_METHODS["ssmax"], seeds=(0, 1, 2))
    weights = load(outcome.blob)
    alone = save({name: tensor[1:2].contiguous() for name, tensor in weights.items()})
    stack = examined(SHIPPED_METHODS["ssmax"], outcome.blob, seeds=(0, 1, 2), samples=30)
    monkeypatch.setitem(cells._FEATURES, "cpu", 1)
    single = examined(SHIPPED_METHODS["ssmax"], alone, seeds=(1,), samples=30)
    for name in ("accuracy", "ranking", "hard", "close", "whole", "entropy", "top"):
        assert single[name][0] == pytest.approx(stack[name][1], rel=1e-4), name


def test_training_again_gives_the_same_bytes() -> None:
    first, second = (trained(SHIPPED_METHODS["entmax15"], steps=12) for _ in range(2))
    assert first.blob == second.blob
    for name in SPENT:
        first.record.pop(name)
        second.record.pop(name)
    assert first.record == second.record


def test_a_seed_that_diverges_is_recorded_and_counts_as_wrong() -> None:
    method = Method("wild", "softmax", recipe={"learning_rate": 1e30})
    outcome = trained(method, steps=8)
    assert outcome.record["diverged"] == [True, True]
    assert outcome.record["loss"] == [None, None]
    record = examined(method, outcome.blob, samples=40)
    assert record["accuracy"] == [0.0, 0.0]


def test_another_normaliser_at_test() -> None:
    weights = trained(SHIPPED_METHODS["softmax"]).blob
    hard = examined(SHIPPED_METHODS["sharp"], weights)
    assert hard["accuracy"] == examined(SHIPPED_METHODS["softmax"], weights)["hard"]
    assert hard["top"] == [1.0, 1.0]
    ssmax = Method("later", "softmax", at_test={"normaliser": "ssmax", "options": {"s": 1.0}})
    assert examined(ssmax, weights)["entropy"] != examined(SHIPPED_METHODS["softmax"], weights)["entropy"]
