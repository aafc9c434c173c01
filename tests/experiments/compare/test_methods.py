"""Which methods there are, and what each may have of its own."""

from __future__ import annotations

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
from sharpmax.tasks.max_retrieval import sized_task
from tests.small_normalisers import shipped

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
