"""Training, tests and tables of every method on small models."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from sharpmax.experiments import stacked_training
from sharpmax.experiments.compare import run as cells
from sharpmax.experiments.compare.methods import SHIPPED_METHODS, Method, ModelSpec, methods_of_files, recipe_for
from sharpmax.experiments.compare.run import ComparisonPlan, evaluate, fit_power_law, ranks, train
from sharpmax.models.stacked import SingleHeads
from sharpmax.tasks.sized import seeded, sized_task
from tests.small_normalisers import shipped


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacked_training, "BLOCK", 10)


def common(method: Method, seeds: tuple[int, ...]) -> Any:
    return {"method": method, "model": ModelSpec(width=16), "task": "max", "seeds": list(seeds), "device": "cpu"}


def trained(method: Method, seeds: tuple[int, ...] = (0, 1), steps: int = 40) -> Any:
    return train(**common(method, seeds), steps=steps, batch=16)


def examined(method: Method, blob: Any, seeds: tuple[int, ...] = (0, 1), size: int = 64, samples: int = 8) -> Any:
    return evaluate(**common(method, seeds), size=size, samples=samples, blob=blob).record


@pytest.mark.parametrize("name", SHIPPED_METHODS)
def test_every_method_learns_and_is_finite_at_1024(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[float] = []

    def next_block(training: Any, really: Any = stacked_training.StackedTraining.next_block) -> Any:
        losses = really(training)
        blocks.append(float(losses.sum()))
        return losses

    monkeypatch.setattr(stacked_training.StackedTraining, "next_block", next_block)
    method = SHIPPED_METHODS[name]
    outcome = trained(method, steps=80)
    assert outcome.record["diverged"] == []
    assert sum(outcome.record["loss"]) == pytest.approx(blocks[-1])
    assert blocks[-1] < blocks[0] < 2 * 1.3 * math.log(10)
    record = examined(method, outcome.blob, size=1024, samples=2)
    measures = ("accuracy", "ranking", "hard", "whole", "entropy", "top")
    assert all(math.isfinite(number) for name in measures for number in record[name])


def test_records_of_an_untrained_model() -> None:
    """Each number of the record, computed again set by set."""
    seeds, size, samples = (0, 1), 12, 40
    blob = save(SingleHeads.initial(seeds, "softmax", {}, width=16).state_dict())
    record = examined(SHIPPED_METHODS["softmax"], blob, size=size, samples=samples)
    for at, seed in enumerate(seeds):
        heads = SingleHeads.initial((seed,), "softmax", {}, width=16)
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


def test_results_of_a_seed_do_not_depend_on_other_seeds_or_on_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = trained(SHIPPED_METHODS["ssmax"], seeds=(0, 1, 2))
    weights = load(outcome.blob)
    alone = save({name: tensor[1:2].contiguous() for name, tensor in weights.items()})
    stack = examined(SHIPPED_METHODS["ssmax"], outcome.blob, seeds=(0, 1, 2), samples=30)
    monkeypatch.setitem(cells._FEATURES, "cpu", 1)
    single = examined(SHIPPED_METHODS["ssmax"], alone, seeds=(1,), samples=30)
    for name in ("accuracy", "ranking", "hard", "close", "whole", "entropy", "top"):
        assert single[name][0] == pytest.approx(stack[name][1], rel=1e-4), name


def test_training_is_reproducible_to_the_bit() -> None:
    first, second = (trained(SHIPPED_METHODS["entmax15"], steps=12) for _ in range(2))
    assert first.blob == second.blob
    spent = {"seconds": 0, "memory": 0}
    assert first.record | spent == second.record | spent


def test_a_seed_that_diverges_is_recorded_and_counts_as_wrong() -> None:
    method = Method("wild", "softmax", recipe={"learning_rate": 1e30})
    outcome = trained(method, steps=8)
    assert outcome.record["diverged"] == [0, 1]
    assert outcome.record["loss"] == [None, None]
    record = examined(method, outcome.blob, samples=40)
    assert record["accuracy"] == [0.0, 0.0]


def test_another_normaliser_at_test() -> None:
    weights = trained(SHIPPED_METHODS["softmax"]).blob
    hard = examined(SHIPPED_METHODS["sharp"], weights)
    assert hard["accuracy"] == examined(SHIPPED_METHODS["softmax"], weights)["hard"]
    assert hard["top"] == [1.0, 1.0]


MAX = sized_task("max")


def recipe_of(method: Method, steps: int = 5000) -> Any:
    return recipe_for(ModelSpec(), method, MAX, steps, 64)


def test_shipped_methods_cover_every_normaliser_with_one_recipe() -> None:
    assert len({recipe_of(method) for method in SHIPPED_METHODS.values()}) == 1
    own = recipe_of(Method("x", "softmax", recipe={"l2": 0.5}), steps=50)
    assert (own.l2, own.batch, own.sizes, own.warmup) == (0.5, 64, (5, 16), 5)
    assert {method.normaliser for method in SHIPPED_METHODS.values()} == set(shipped())
    assert {method.feed_forward for method in SHIPPED_METHODS.values()} == {"gelu", "step", "hard-threshold"}
    for method in SHIPPED_METHODS.values():
        method.check(MAX)
        assert method.summary


def test_methods_of_the_ablation_differ_from_sharp_in_one_thing() -> None:
    file = Path(__file__).parents[3] / "docs" / "ablation.py"
    sharp = asdict(SHIPPED_METHODS["sharp"])
    for method in methods_of_files([file]):
        method.check(MAX)
        recipe_of(method)
        changed = {name for name, value in asdict(method).items() if value != sharp[name]} - {"name", "summary"}
        assert len(changed) == 1, method.name


def test_keys_of_a_plan_change_only_with_what_the_numbers_depend_on() -> None:
    own, hard = Method("mine", "softmax"), SHIPPED_METHODS["hard"]
    plan = ComparisonPlan((own, hard), (ModelSpec(),), "max", (0, 1, 2), 10, 4, (16, 32), 8, "cpu", files=("text",))
    tasks = plan.tasks()
    keys = [task.key for task in tasks]
    assert len(set(keys)) == len(tasks) == 2 * (1 + 2)
    assert all((task.after in keys) == ("/test " in task.key) for task in tasks)

    def key(**other: Any) -> str:
        changed = replace(plan, **other)
        return changed.key(changed.models[0], changed.methods[0])

    assert {key(sizes=(16,)), key(methods=(replace(own, summary="said otherwise"),))} == {key()}
    others = {
        key(files=("another text",)),
        key(methods=(replace(own, recipe={"l2": 0.1}),)),
        key(methods=(replace(own, data={"zoom": 0.1}),)),
        key(models=(ModelSpec(width=64),)),
    }
    assert len(others | {key()}) == 5
    assert key(methods=(hard,)) == key(methods=(hard,), files=()), "shipped methods do not depend on user files"


NOISE = np.array([1.0, -1.0, 0.5, -0.5, 0.0])


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        # Pairs differ significantly where means do not.
        ({"x": 50 + 40 * NOISE, "y": 52 + 40.1 * NOISE}, {"y": 1, "x": 2}),
        # z is behind x, the leader; that it is not behind y does not matter.
        ({"x": 50 + 0 * NOISE, "y": 49 + 2 * NOISE, "z": 48 + NOISE}, {"x": 1, "y": 1, "z": 3}),
        ({"x": np.array([1.0, 2.0]), "y": np.array([1.0, 2.0])}, {"x": 1, "y": 1}),
        # With one seed the score decides. So does the same difference in every seed.
        ({"x": np.array([3.0]), "y": np.array([4.0]), "z": np.array([3.0])}, {"y": 1, "x": 2, "z": 2}),
        ({"x": np.array([3.0, 5.0]), "y": np.array([4.0, 6.0])}, {"y": 1, "x": 2}),
    ],
)
def test_ranks(scores: dict[str, np.ndarray], wanted: dict[str, int]) -> None:
    assert {name: place.rank for name, place in ranks(scores).items()} == wanted


SIZES = tuple(2**power for power in range(4, 15))

X = np.log(np.array(SIZES, dtype=float))


def falling(at: float, seeds: int = 6, noise: float = 0.0) -> np.ndarray:
    """A measure [sizes, seeds] that crosses one half at a size."""
    rng = np.random.default_rng(int(at))
    shift = rng.normal(0.0, noise, seeds)
    found: np.ndarray = np.clip(0.5 - 0.1 * (X[:, None] - np.log(at) - shift), 0.0, 1.0)
    return found


class TestPowerLaw:
    def models(self) -> list[ModelSpec]:
        return [ModelSpec("encoder", w, h, d) for w in (16, 32, 64) for h in (1, 2) for d in (1, 2, 4)]

    def test_recovers_a_known_law(self) -> None:
        noisy = fit_power_law(X, {m: falling(8.0 * m.width**0.9, noise=0.3) for m in self.models()}, "top")
        width = noisy["exponents"]["width"]
        assert width["low"] < 0.9 < width["high"]
        curves = {m: falling(8.0 * m.width**0.9 * m.heads**-0.3 * m.depth**0.5) for m in self.models()}
        law = fit_power_law(X, curves, "top")
        assert law["used"] == law["models"] == 18
        exponents = {name: one["mean"] for name, one in law["exponents"].items()}
        assert exponents == pytest.approx({"width": 0.9, "heads": -0.3, "depth": 0.5}, abs=1e-6)
        assert law["constant"] == pytest.approx(8.0)
        assert law["r2"] == pytest.approx(1.0)

    def test_has_no_exponent_for_what_does_not_vary_and_needs_enough_models(self) -> None:
        some = [ModelSpec("encoder", w, 1, 1) for w in (16, 32)]
        law = fit_power_law(X, {m: falling(4.0 * m.width) for m in some}, "top")
        assert list(law["exponents"]) == ["width"]
        none = fit_power_law(X, {m: falling(1e9) for m in some}, "top")
        assert (none["exponents"], none["beyond"]) == (None, 2)
        diverged = fit_power_law(X, {m: np.full((len(X), 6), np.nan) for m in some}, "top")
        assert (diverged["exponents"], diverged["used"], diverged["beyond"]) == (None, 0, 0)
