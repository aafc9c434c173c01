"""Training, testing and tables of every method, on small models: what they record and what it depends on."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from sharpmax.errors import ArgumentError
from sharpmax.experiments import stacked_training
from sharpmax.experiments.compare import run as cells
from sharpmax.experiments.compare.methods import (
    SHIPPED_METHODS,
    Method,
    ModelSpec,
    methods_named,
    methods_of_files,
    recipe_for,
)
from sharpmax.experiments.compare.run import ComparisonPlan, evaluate, train
from sharpmax.experiments.compare.tables import fit_power_law, layer_slopes, ranks
from sharpmax.models.single_head import SetHeads
from sharpmax.probing.measurement import crossing
from sharpmax.tasks.max_retrieval import seeded, sized_task
from tests.small_normalisers import shipped

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


MAX = sized_task("max")


def recipe_of(method: Method, steps: int = 5000) -> Any:
    return recipe_for(ModelSpec(), method, MAX, steps, 64)


def test_the_comparison_has_every_normaliser_of_the_package() -> None:
    assert {method.normaliser for method in SHIPPED_METHODS.values()} == set(shipped())
    assert {method.feed_forward for method in SHIPPED_METHODS.values()} == {"gelu", "step", "hard-threshold"}
    for method in SHIPPED_METHODS.values():
        method.check(MAX)
        assert method.summary


def test_methods_by_name_once_each_and_ones_own_always() -> None:
    own = Method("mine", "softmax")
    assert [method.name for method in methods_named(["hard", "softmax", "hard"], [own])] == ["hard", "softmax", "mine"]
    assert [method.name for method in methods_named([], [own])] == [*SHIPPED_METHODS, "mine"]
    with pytest.raises(ArgumentError, match=r"METHODS: got 'soft'; allowed: softmax, .*, mine; --with FILE"):
        methods_named(["soft"], [own])


def test_all_share_one_recipe_but_for_what_is_their_own() -> None:
    assert len({recipe_of(method) for method in SHIPPED_METHODS.values() if not method.recipe}) == 1
    own = recipe_of(Method("x", "softmax", recipe={"l2": 0.5}))
    assert (own.l2, own.batch, own.sizes) == (0.5, 64, (5, 16))
    assert recipe_of(SHIPPED_METHODS["hard"], 50).warmup == 5, "a short training has a short warm-up"
    sharp = SHIPPED_METHODS["sharp"]
    assert (sharp.normaliser, sharp.feed_forward, sharp.tested_with()[0]) == ("ssmax", "gelu", "hard")


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"recipe": {"sizes": (5, 64)}}, r"sizes \(5, 64\) of method 'odd'; allowed: up to 16 items"),
        ({"recipe": {"rate": 1.0}}, "'rate' of method 'odd'"),
        ({"data": {"noise": 1.0}}, "'noise' of method 'odd'; allowed: zoom, anywhere for the task 'max'"),
        ({"feed_forward": "relu"}, "feed_forward: got 'relu' of method 'odd'; allowed: gelu, step"),
        ({"at_test": {"normaliser": "hardest"}}, "name: got 'hardest'"),
    ],
)
def test_no_method_may_train_on_larger_sizes_or_by_what_there_is_not(own: dict[str, Any], says: str) -> None:
    def check(method: Method) -> None:
        recipe_of(method)
        method.check(MAX)

    with pytest.raises(ArgumentError, match=says):
        check(Method("odd", "softmax", **own))


def test_a_task_without_an_option_of_the_examples_draws_the_usual_ones() -> None:
    method = Method("x", "softmax", data={"zoom": 0.1})
    assert method.examples(MAX) == {"zoom": 0.1}
    for name in ("sort", "copy", "recall"):
        method.check(sized_task(name))
        assert method.examples(sized_task(name)) == {}


def test_the_ablation_changes_one_thing_of_sharp_at_a_time() -> None:
    file = Path(__file__).parents[3] / "docs" / "ablation.py"
    sharp = asdict(SHIPPED_METHODS["sharp"])
    for method in methods_of_files([file]):
        method.check(MAX)
        recipe_of(method)
        changed = {name for name, value in asdict(method).items() if value != sharp[name]} - {"name", "summary"}
        assert len(changed) == 1, method.name


def test_a_plan_trains_every_stack_once_and_tests_it_at_every_size() -> None:
    methods = tuple(methods_named(["softmax", "hard"]))
    plan = ComparisonPlan(methods, (ModelSpec(),), "max", (0, 1, 2), 10, 4, (16, 32), 8, "cpu", 2)
    tasks = plan.tasks()
    keys = [task.key for task in tasks]
    assert len(set(keys)) == len(tasks) == 2 * 2 * (1 + 2)
    assert re.fullmatch(r"max/single w128/softmax [0-9a-f]{8}/seeds 0-1/train", keys[0])
    assert re.fullmatch(r"max/single w128/hard [0-9a-f]{8}/seeds 2-2/test 16", keys[-1])
    assert all((task.after in keys) == ("/test " in task.key) for task in tasks)


def test_a_key_changes_with_what_the_numbers_depend_on_alone() -> None:
    own, hard = Method("mine", "softmax"), SHIPPED_METHODS["hard"]
    plan = ComparisonPlan((own,), (ModelSpec(),), "max", (0,), 10, 4, (16,), 8, "cpu", 1, files=("text",))

    def key(**other: Any) -> str:
        changed = replace(plan, **other)
        return changed.key(changed.models[0], changed.methods[0], (0,))

    renamed = (replace(own, summary="said otherwise"), hard)
    assert {key(sizes=(16, 32)), key(seeds=(0, 1)), key(methods=renamed)} == {key()}
    others = {
        key(files=("another text",)),
        key(methods=(replace(own, recipe={"l2": 0.1}),)),
        key(methods=(replace(own, data={"zoom": 0.1}),)),
        key(methods=(replace(own, at_test={"normaliser": "hard"}),)),
        key(models=(ModelSpec(width=64),)),
    }
    assert len(others | {key()}) == 6
    assert key(methods=(hard,)) == key(methods=(hard,), files=()), "a shipped method does not depend on a user's file"


def test_methods_whose_difference_is_not_significant_share_a_rank() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0.0, 5.0, 8)  # what seeds have in common cancels in pairs
    scores = {
        "c": 60 + base + rng.normal(0, 0.1, 8),
        "a": 80 + base + rng.normal(0, 1, 8),
        "b": 79.9 + base + rng.normal(0, 1, 8),
        "d": 20 + base,
    }
    got = ranks(scores)
    assert set(list(got)[:2]) == {"a", "b"}
    assert [got[name].rank for name in "abcd"] == [1, 1, 3, 4]
    assert got["c"].leader == "c"


NOISE = np.array([1.0, -1.0, 0.5, -0.5, 0.0])


@pytest.mark.parametrize(
    ("scores", "wanted"),
    [
        # Pairs differ significantly where means do not.
        ({"x": 50 + 40 * NOISE, "y": 52 + 40.1 * NOISE}, {"y": 1, "x": 2}),
        # y is not behind x, z is; that z is not behind y either does not help it.
        ({"x": 50 + 0 * NOISE, "y": 49 + 2 * NOISE, "z": 48 + NOISE}, {"x": 1, "y": 1, "z": 3}),
        ({"x": np.array([1.0, 2.0]), "y": np.array([1.0, 2.0])}, {"x": 1, "y": 1}),
        # One seed goes by its score, and the same difference in every seed is a difference.
        ({"x": np.array([3.0]), "y": np.array([4.0]), "z": np.array([3.0])}, {"y": 1, "x": 2, "z": 2}),
        ({"x": np.array([3.0, 5.0]), "y": np.array([4.0, 6.0])}, {"y": 1, "x": 2}),
    ],
)
def test_ranks(scores: dict[str, np.ndarray], wanted: dict[str, int]) -> None:
    assert {name: place.rank for name, place in ranks(scores).items()} == wanted


SIZES = tuple(2**power for power in range(4, 15))

X = np.log(np.array(SIZES, dtype=float))


def end(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return crossing(x, y, 0.5)


def falling(at: float, seeds: int = 6, noise: float = 0.0) -> np.ndarray:
    """A measure [sizes, seeds] that crosses one half at a size."""
    rng = np.random.default_rng(int(at))
    shift = rng.normal(0.0, noise, seeds)
    found: np.ndarray = np.clip(0.5 - 0.1 * (X[:, None] - np.log(at) - shift), 0.0, 1.0)
    return found


class TestLaw:
    def models(self) -> list[ModelSpec]:
        return [ModelSpec("encoder", w, h, d) for w in (16, 32, 64) for h in (1, 2) for d in (1, 2, 4)]

    def test_a_law_is_found_again(self) -> None:
        curves = {m: falling(8.0 * m.width**0.9 * m.heads**-0.3 * m.depth**0.5) for m in self.models()}
        law = fit_power_law(X, curves, end)
        assert law["used"] == law["models"] == 18
        exponents = {name: one["mean"] for name, one in law["exponents"].items()}
        assert exponents == pytest.approx({"width": 0.9, "heads": -0.3, "depth": 0.5}, abs=1e-6)
        assert law["constant"] == pytest.approx(8.0)
        assert law["r2"] == pytest.approx(1.0)

    def test_intervals_hold_the_truth_and_widen_with_noise(self) -> None:
        laws = [
            fit_power_law(X, {m: falling(8.0 * m.width**0.9, noise=noise) for m in self.models()}, end)
            for noise in (0.1, 0.8)
        ]
        narrow, wide = (law["exponents"]["width"] for law in laws)
        assert narrow["low"] <= 0.9 <= narrow["high"]
        assert wide["high"] - wide["low"] > 2 * (narrow["high"] - narrow["low"]) > 0

    def test_models_beyond_the_sizes_are_counted_and_left_out(self) -> None:
        curves = {m: falling(64.0 * m.width if m.width < 64 else 1e9) for m in self.models()}
        law = fit_power_law(X, curves, end)
        assert (law["used"], law["beyond"]) == (12, 6)
        assert law["exponents"]["width"]["mean"] == pytest.approx(1.0, abs=1e-6)

    def test_what_does_not_vary_has_no_exponent_and_too_few_models_no_law(self) -> None:
        some = [ModelSpec("encoder", w, 1, 1) for w in (16, 32)]
        law = fit_power_law(X, {m: falling(4.0 * m.width) for m in some}, end)
        assert list(law["exponents"]) == ["width"]
        none = fit_power_law(X, {m: falling(1e9) for m in some}, end)
        assert (none["exponents"], none["beyond"]) == (None, 2)


class TestLayers:
    def test_straight_lines_are_forecast(self) -> None:
        slopes = np.array([0.1, 0.6, 0.3])
        entropy = (0.2 + slopes * X[:, None])[..., None].repeat(2, axis=2)
        top = np.full_like(entropy, 0.5)
        found = layer_slopes(SIZES, entropy, top)
        assert found is not None
        assert found["measured"] == pytest.approx(slopes.tolist())
        assert found["forecast"] == pytest.approx(slopes.tolist())
        assert (found["first_measured"], found["first_forecast"]) == (1, 1)

    def test_a_layer_that_breaks_later_is_not_foreseen(self) -> None:
        entropy = np.stack((0.3 * X, np.where(np.array(SIZES) <= 64, 0.1, 0.1 + 0.9 * (X - np.log(64)))), axis=1)
        found = layer_slopes(SIZES, entropy[..., None], np.full((len(SIZES), 2, 1), 0.5))
        assert found is not None
        assert (found["first_measured"], found["first_forecast"]) == (1, 0)

    def test_none_without_sizes_on_both_sides(self) -> None:
        entropy = np.ones((2, 2, 1))
        assert layer_slopes((16, 32), entropy, entropy) is None
        assert layer_slopes((128, 256), entropy, entropy) is None
