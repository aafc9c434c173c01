"""Answers: generated ones and scored ones; scores against counts by hand, intervals against resampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sharpmax.experiments.clrs import evaluation as exams
from sharpmax.experiments.clrs.evaluation import Answer, Evaluation, Variant, evaluation_tables
from sharpmax.integrations.transformers.application import applied
from sharpmax.models.language import LanguageModel
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import load_policy
from sharpmax.tasks.clrs_text.generation import Example
from tests.experiments.clrs import toy
from tests.experiments.evaluate import tiny

PAPER = load_policy("paper")


def ending() -> Any:
    """The tiny model, which sometimes ends its answer."""
    model = tiny.model()
    words: Any = tiny.tokenizer()
    with torch.no_grad():
        model.lm_head.weight[words.eos_token_id].normal_(0.0, 0.5, generator=torch.Generator().manual_seed(5))
    return model


def alone(one: Evaluation, item: int, policy: Policy | None) -> str:
    """An answer generated token by token, without padding, batch or cache."""
    words: Any = tiny.tokenizer()
    model = one.variants[0].language.model
    ids = list(words(one.questions[item].question).input_ids)
    start = len(ids)
    with torch.no_grad(), applied(model, policy):
        while len(ids) < start + 12:
            token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if token == words.eos_token_id:
                break
            ids.append(token)
    return str(words.decode(ids[start:]))


def answers_of(one: Evaluation) -> list[Answer]:
    found: dict[int, Answer] = {}
    for some in one.answers(one.variants[0]):
        found |= some
    return [found[item] for item in range(len(one.questions))]


@pytest.mark.parametrize("policy", [None, PAPER])
def test_generated_answers_are_those_of_the_model_alone(policy: Policy | None) -> None:
    variant = Variant("a", LanguageModel("tiny", ending(), tiny.tokenizer()), policy, None)
    one = Evaluation([variant], toy.examples(toy.ALGORITHMS, (3, 4, 9), 3, "test", 0), 300, {})
    said = answers_of(one)
    for item, found in enumerate(said):
        assert found.text[:12] == alone(one, item, policy)[:12]
    # Some end by themselves; none is longer than the limit.
    assert len({found.tokens for found in said}) > 1
    assert max(found.tokens for found in said) <= exams._limit(one.expected["a"])
    assert all(found.seconds > 0.0 for found in said)


def test_scored_answers_are_those_of_greedy_decoding() -> None:
    language = LanguageModel("tiny", ending(), tiny.tokenizer())
    given = toy.examples(toy.ALGORITHMS, (3, 4), 4, "test", 0)
    first = Evaluation([Variant("a", language, PAPER, None)], given, 300, {})
    generated = answers_of(first)
    said = [one.text for one in generated]
    # Half of the expected answers become what the model generates.
    mixed = [
        replace(one, answer=text) if place % 2 else one
        for place, (one, text) in enumerate(zip(given, said, strict=True))
    ]
    second = Evaluation(first.variants, mixed, 300, {"scored": True})
    for place, (found, one, text) in enumerate(zip(answers_of(second), mixed, said, strict=True)):
        ended = generated[place].tokens < exams._limit(first.expected["a"])
        same = ended and text == one.answer and "�" not in text  # half a letter is not tokenized as it was
        assert (found.text == one.answer.strip()) == same
        assert found.entropy is not None
        assert 0.0 < found.entropy < 1.0


QUESTIONS = [
    Example("q", "a b | c\n\n", "first", 4), Example("q", "a c | c\n\n", "first", 4),
    Example("q", "b b | a\n\n", "first", 4), Example("q", "b b | b\n\n", "first", 8),
    Example("q", "b a | b", "first", 8), Example("q", "x | y", "last", 4), Example("q", "x | z", "last", 4),
]  # fmt: skip
BASE = ["a b | c", "a b | c", "b b | b", "b b | a", "no", "x | y", "x | y"]
SHARP = ["a b | c", "a c | c ", "b b | a", "z | b", "no", "x | y", ""]


def answers(texts: list[str]) -> list[Answer]:
    return [Answer(text, 3, 0.5, 0.25) for text in texts]


def tables_of(**said: list[list[Answer]]) -> dict[str, Any]:
    return evaluation_tables(QUESTIONS, said, {"scored": True}, {"first": [4], "last": [4]}, 0)


def test_seeds_are_pooled_and_also_reported_one_by_one() -> None:
    found = tables_of(base=[answers(BASE), answers(SHARP)], sharp=[answers(SHARP), answers(SHARP)])
    alone = tables_of(base=[answers(BASE)], sharp=[answers(SHARP)])
    each = [alone["means"][name]["in"]["mean"] for name in ("base", "sharp")]
    assert found["seeds"]["base"]["in"] == pytest.approx(each)
    assert found["means"]["base"]["in"]["mean"] == pytest.approx(sum(each) / 2)
    # A seed is compared with the same seed of the base.
    assert found["gains"]["sharp"]["in"]["mean"] == pytest.approx(alone["gains"]["sharp"]["in"]["mean"] / 2)
    assert (found["gains"]["sharp"]["in"]["gained"], found["gains"]["sharp"]["in"]["lost"]) == (1, 0)
    assert found["entropy"]["base"] == {"4": 0.25, "8": 0.25}
    assert "seeds" not in alone


def means(cells: dict[str, dict[str, Any]]) -> list[float]:
    return [cell["mean"] for by_size in cells.values() for cell in by_size.values()]


def test_accuracy_of_final_answers_and_of_the_most_frequent_one() -> None:
    tables = tables_of(base=[answers(BASE)], sharp=[answers(SHARP)])
    # Algorithm "first" at sizes 4 and 8, "last" at 4.
    assert means(tables["accuracy"]["base"]) == pytest.approx([200 / 3, 0.0, 50.0])
    assert means(tables["accuracy"]["sharp"]) == pytest.approx([100.0, 50.0, 50.0])
    assert means(tables["majority"]) == pytest.approx([200 / 3, 100.0, 50.0])
    assert tables["accuracy"]["sharp"]["first"]["8"]["n"] == 2
    assert tables["speed"]["base"] == {"tokens": 21, "seconds": 3.5, "tokens_per_second": 6.0}


def test_means_and_gains_over_algorithms_and_by_algorithm() -> None:
    tables = tables_of(base=[answers(BASE)], sharp=[answers(SHARP)])
    inside, outside = tables["means"]["base"]["in"], tables["means"]["base"]["out"]
    assert (inside["mean"], inside["algorithms"]) == (pytest.approx(100 * (2 / 3 + 1 / 2) / 2), 2)
    assert (outside["mean"], outside["algorithms"]) == (0.0, 1)
    assert means(tables["by_algorithm"]["base"]) == pytest.approx([200 / 3, 0.0, 50.0])
    assert list(tables["gains"]) == list(tables["gains_by_algorithm"]) == ["sharp"]
    gains = tables["gains_by_algorithm"]["sharp"]
    assert means(gains) == pytest.approx([100 / 3, 50.0, 0.0])
    assert tables["gains"]["sharp"]["in"]["mean"] == pytest.approx(100 * (1 / 3) / 2)
    for gain in (tables["gains"]["sharp"]["in"], gains["first"]["out"]):
        assert (gain["gained"], gain["lost"]) == (1, 0)


def test_intervals_are_those_of_resampled_answers() -> None:
    rng = np.random.default_rng(3)
    base = {"a": {4: rng.integers(0, 2, 60).tolist(), 8: [1] * 30}, "b": {4: rng.integers(0, 2, 40).tolist()}}
    other = {"a": {4: rng.integers(0, 2, 60).tolist(), 8: [1, 0] * 15}, "b": {4: rng.integers(0, 2, 40).tolist()}}
    chosen = {"a": [4, 8], "b": [4]}
    drawn_means, gains = [], []
    for _ in range(3000):
        here: list[tuple[float, float]] = []
        for name, sizes in chosen.items():
            cells = []
            for size in sizes:
                pick = rng.integers(0, len(base[name][size]), len(base[name][size]))
                cells.append((np.array(base[name][size])[pick].mean(), np.array(other[name][size])[pick].mean()))
            here.append(tuple(np.mean(cells, axis=0)))
        first, second = np.mean(here, axis=0)
        drawn_means.append(100 * first)
        gains.append(100 * (second - first))
    asked = [(name, size, place) for name, sizes in base.items() for size in sizes for place in range(len(sizes[size]))]
    said = {
        who: [[Answer(str(right[name][size][place]), 1, 0.1) for name, size, place in asked]]
        for who, right in (("base", base), ("other", other))
    }
    tables = evaluation_tables([Example("q", "1", name, size) for name, size, _ in asked], said, {}, chosen, 0)
    for found, drawn in ((tables["means"]["base"]["in"], drawn_means), (tables["gains"]["other"]["in"], gains)):
        low, high = np.quantile(drawn, [0.025, 0.975])
        assert found["low"] == pytest.approx(low, abs=1.0)
        assert found["high"] == pytest.approx(high, abs=1.0)
        assert found["low"] < found["mean"] < found["high"]
