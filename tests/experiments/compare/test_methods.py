"""Which methods there are, and what each may have of its own."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError
from sharpmax.experiments.compare.methods import (
    SHIPPED_METHODS,
    Method,
    ModelSpec,
    methods_named,
    methods_of_files,
    recipe_for,
)
from sharpmax.experiments.compare.run import ComparisonPlan
from sharpmax.normalisers.base import normaliser
from sharpmax.tasks.max_retrieval import sized_task
from tests.small_normalisers import shipped

MAX = sized_task("max")


def test_the_comparison_has_every_normaliser_of_the_package() -> None:
    assert {method.normaliser for method in SHIPPED_METHODS.values()} == set(shipped())
    assert {method.feed_forward for method in SHIPPED_METHODS.values()} == {"gelu", "step", "hard-threshold"}
    for method in SHIPPED_METHODS.values():
        name, options = method.tested_with()
        normaliser(name, **options)
        assert method.summary
        assert Method(**json.loads(json.dumps(asdict(method)))) == method


def test_methods_by_name_once_each_and_ones_own_always() -> None:
    own = Method("mine", "softmax")
    assert [method.name for method in methods_named(["hard", "softmax", "hard"], [own])] == ["hard", "softmax", "mine"]
    assert [method.name for method in methods_named([], [own])] == [*SHIPPED_METHODS, "mine"]
    with pytest.raises(ArgumentError, match=r"METHODS: got 'soft'; allowed: softmax, .*, mine; --with FILE"):
        methods_named(["soft"], [own])


def test_all_share_one_recipe_but_for_what_is_their_own() -> None:
    recipes = {
        recipe_for(ModelSpec(), method, MAX, 5000, 64) for method in SHIPPED_METHODS.values() if not method.recipe
    }
    assert len(recipes) == 1
    own = recipe_for(ModelSpec(), Method("x", "softmax", recipe={"l2": 0.5}), MAX, 5000, 64)
    assert (own.l2, own.batch, own.sizes) == (0.5, 64, (5, 16))
    assert recipe_for(ModelSpec(), SHIPPED_METHODS["hard"], MAX, 50, 64).warmup == 5, (
        "a short training has a short warm-up"
    )


def test_no_method_may_train_on_larger_sizes_or_by_what_there_is_not() -> None:
    with pytest.raises(ArgumentError, match=r"sizes \(5, 64\) of method 'big'; allowed: up to 16 items"):
        recipe_for(ModelSpec(), Method("big", "softmax", recipe={"sizes": (5, 64)}), MAX, 10, 4)
    with pytest.raises(ArgumentError, match="'rate' of method 'odd'"):
        recipe_for(ModelSpec(), Method("odd", "softmax", recipe={"rate": 1.0}), MAX, 10, 4)
    with pytest.raises(ArgumentError, match="'noise' of method 'odd'; allowed: zoom, anywhere for the task 'max'"):
        Method("odd", "softmax", data={"noise": 1.0}).check(MAX)
    with pytest.raises(ArgumentError, match="feed_forward: got 'relu' of method 'odd'; allowed: gelu, step"):
        Method("odd", "softmax", feed_forward="relu").check(MAX)
    with pytest.raises(ArgumentError, match="name: got 'hardest'"):
        Method("odd", "softmax", at_test={"normaliser": "hardest"}).check(MAX)
    Method("fine", "softmax", data={"zoom": 0.1}).check(MAX)


def test_a_task_without_an_option_of_the_examples_draws_the_usual_ones() -> None:
    method = Method("x", "softmax", data={"zoom": 0.1})
    assert method.examples(MAX) == {"zoom": 0.1}
    for name in ("sort", "copy", "recall"):
        task = sized_task(name)
        method.check(task)
        SHIPPED_METHODS["sharp"].check(task)
        assert method.examples(task) == {}


class TestSharp:
    def test_it_is_ssmax_of_the_common_recipe_but_for_its_sets_and_its_test(self) -> None:
        sharp = SHIPPED_METHODS["sharp"]
        assert recipe_for(ModelSpec(), sharp, MAX, 5000, 64) == recipe_for(
            ModelSpec(), SHIPPED_METHODS["softmax"], MAX, 5000, 64
        )
        assert (sharp.normaliser, sharp.feed_forward, sharp.tested_with()[0]) == ("ssmax", "gelu", "hard")


def test_the_ablation_changes_one_thing_of_sharp_at_a_time() -> None:
    file = Path(__file__).parents[3] / "docs" / "ablation.py"
    for method in methods_of_files([file]):
        method.check(MAX)
        recipe_for(ModelSpec(), method, MAX, 10, 4)
        changed = [
            name
            for name, value in asdict(method).items()
            if name not in ("name", "summary") and value != asdict(SHIPPED_METHODS["sharp"])[name]
        ]
        assert len(changed) == 1, method.name


def test_a_plan_trains_every_stack_once_and_tests_it_at_every_size() -> None:
    methods = tuple(methods_named(["softmax", "hard"]))
    plan = ComparisonPlan(methods, (ModelSpec(),), "max", (0, 1, 2), 10, 4, (16, 32), 8, "cpu", 2)
    tasks = plan.tasks()
    assert len({task.key for task in tasks}) == len(tasks) == 2 * 2 * (1 + 2)
    keys = [task.key for task in tasks]
    assert re.fullmatch(r"max/single w128/softmax [0-9a-f]{8}/seeds 0-1/train", keys[0])
    assert re.fullmatch(r"max/single w128/hard [0-9a-f]{8}/seeds 2-2/test 16", keys[-1])
    for task in tasks:
        assert (task.after in keys) == ("/test " in task.key)


def test_a_key_changes_with_what_the_numbers_depend_on_alone() -> None:
    own = Method("mine", "softmax")
    plan = ComparisonPlan((own,), (ModelSpec(),), "max", (0,), 10, 4, (16,), 8, "cpu", 1, files=("text",))

    def key(**other: Any) -> str:
        changed = replace(plan, **other)
        return changed.key(changed.models[0], changed.methods[0], (0,))

    same: list[dict[str, Any]] = [
        {"sizes": (16, 32)},
        {"seeds": (0, 1)},
        {"methods": (replace(own, summary="said otherwise"), SHIPPED_METHODS["hard"])},
    ]
    assert {key(**one) for one in same} == {key()}
    others: list[dict[str, Any]] = [
        {"files": ("another text",)},
        {"methods": (replace(own, recipe={"l2": 0.1}),)},
        {"methods": (replace(own, data={"zoom": 0.1}),)},
        {"methods": (replace(own, at_test={"normaliser": "hard"}),)},
        {"models": (ModelSpec(width=64),)},
    ]
    assert len({key(**one) for one in others} | {key()}) == 6
    shipped: dict[str, Any] = {"methods": (SHIPPED_METHODS["hard"],)}
    assert key(**shipped) == key(**shipped, files=()), "a method of the league does not depend on a user's file"
