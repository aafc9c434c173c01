"""Answers: generated ones, and scored ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sharpmax.experiments.clrs import evaluation as exams
from sharpmax.experiments.clrs.evaluation import Answer, Evaluation, Variant
from sharpmax.integrations.transformers.application import applied
from sharpmax.models.language import LanguageModel
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import load_policy
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
