"""Made-up results of `sharpmax clrs evaluate`: answers drawn at random, scored as real ones are, always the same."""

from __future__ import annotations

import copy
import math
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

from sharpmax.experiments.clrs.evaluation import Answer
from sharpmax.experiments.clrs.tables import evaluation_tables
from sharpmax.tasks.clrs_text.generation import Example
from sharpmax.tasks.clrs_text.sizes import ALGORITHMS, test_sizes, train_sizes
from tests.report.reproduce_tables import PROVENANCE

ARMS = ("none", "paper", "learned")
COMMAND = "sharpmax clrs evaluate none paper --per-cell 40 --out clrs-exam"
QUESTIONS = 40
# Nobody learns these two: what they answer is what is most frequent.
HOPELESS = ("optimal_bst", "strongly_connected_components")
_POLICIES = {
    "none": (None, "no policy"),
    "paper": ({"kind": "polynomial"}, "β = max(1, polynomial of the entropy of degree 4)"),
    "learned": ({"kind": "per-head"}, "30 layers × 9 heads, kinds: log-linear"),
}


def make_tables(
    algorithms: tuple[str, ...] = ALGORITHMS, arms: tuple[str, ...] = ARMS[:2], *, gain: float = 0.15
) -> dict[str, Any]:
    """Tables of a run; beyond training, all arms but the first are right so much more often."""
    return copy.deepcopy(_made(algorithms, arms, gain))


@cache
def _made(algorithms: tuple[str, ...], arms: tuple[str, ...], gain: float) -> dict[str, Any]:
    questions = [
        Example("q", f"{random.Random(f'{name}/{size}/{number}').randrange(4)}\n\n", name, size)
        for name in algorithms
        for size in test_sizes(name)
        for number in range(QUESTIONS)
    ]
    said = {
        (arm, item): Answer(_answer(arm, item, one, gain), 5, 0.01 * item, 0.01 * (item + 1))
        for arm in arms
        for item, one in enumerate(questions)
    }
    identity = {
        "arms": {arm: _about(arm) for arm in arms},
        "questions": {"count": len(questions), "fingerprint": "0123456789ab"},
        "data": {"algorithms": list(algorithms), "dataset": None, "per_cell": QUESTIONS, "trace": False, "seed": 0},
        "dtype": "bfloat16",
        "device": "cuda",
        "too_long": {"bfs": [47]} if "bfs" in algorithms else {},
    }
    exam: Any = SimpleNamespace(
        questions=questions, variants=[SimpleNamespace(name=arm) for arm in arms], identity=lambda: identity
    )
    store: Any = _Store(said)
    tables = evaluation_tables(exam, store, {name: train_sizes(name) for name in algorithms}, 0)
    return tables | {"training": {arm: _training(arm) for arm in arms}}


class _Store(dict[Any, Answer]):
    def remarks(self, arm: str) -> list[str]:
        return ["3.0% of the rows have count outside 2 … 512"] if arm == "paper" else []


def _answer(arm: str, item: int, one: Example, gain: float) -> str:
    """What two arms say is right for the same questions as often as can be: they are alike."""
    ease = random.Random(one.algo_name).uniform(0.55, 1.0)
    if one.algo_name == "minimum":
        ease = 1.0
    beyond = max(0.0, math.log2(one.length / max(train_sizes(one.algo_name))))
    share = 0.98 * ease - 0.75 * beyond
    if arm != ARMS[0]:
        share += gain if beyond else 0.0
    if one.algo_name in HOPELESS:
        return "0"
    luck = random.Random(f"{item}").random() + 0.1 * random.Random(f"{arm}/{item}").random()
    return one.answer if luck < share else "wrong"


def _about(arm: str) -> dict[str, Any]:
    policy, describe = _POLICIES[arm]
    return {
        "model": "smollm2", "trained": True, "steps": 3000, "weights": f"weights of {arm}", "policy": policy,
        "describe": describe, "touched": 0 if policy is None else 270,
    }  # fmt: skip


def _training(arm: str) -> dict[str, Any]:
    rng, place = random.Random(arm), ARMS.index(arm)
    curve = [[step, 2.5 * step**-0.4 * (1 - 0.05 * place) * rng.uniform(0.93, 1.07)] for step in range(8, 3001, 8)]
    return {
        "command": f"sharpmax clrs train smollm2 --policy {arm} --steps 3000 --out {arm}",
        "provenance": PROVENANCE,
        "setting": {
            "model": "smollm2", "steps": 3000, "batch_tokens": 65536, "rate": 0.0005, "epochs": 1.27, "seed": 0,
            "examples": {"count": 486000, "fingerprint": "ba9876543210", "dropped": 0}, "dtype": "bfloat16",
            "policy_name": arm, "policy_describe": _POLICIES[arm][1], "touched": 270 * bool(place), "devices": 1,
            "trained_weights": arm, "data": {"algorithms": ["minimum"], "dataset": None, "per_cell": 2000},
        },
        "curve": curve,
        "speed": {"tokens": 196608000, "tokens_per_second": 212345.6, "share": None if place else 0.41},
    }  # fmt: skip
