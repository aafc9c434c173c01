"""Answering: what is generated, that it is kept, and that nothing is asked twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments.clrs import evaluation as exams
from sharpmax.experiments.clrs.data import replies
from sharpmax.experiments.clrs.evaluation import Answer, AnswerStore, Evaluation, Variant
from sharpmax.integrations.transformers.application import applied
from sharpmax.models.language import LanguageModel
from sharpmax.policies.base import Policy
from sharpmax.policies.registry import load_policy
from tests.experiments.clrs import stub
from tests.experiments.evaluate import tiny

PAPER = load_policy("paper")


def ending() -> Any:
    """The tiny model, which now and then ends what it says."""
    model = tiny.model()
    words: Any = tiny.tokenizer()
    with torch.no_grad():
        model.lm_head.weight[words.eos_token_id].normal_(0.0, 0.5, generator=torch.Generator().manual_seed(5))
    return model


def arm(name: str = "a", policy: Policy | None = None) -> Variant:
    return Variant(name, LanguageModel("tiny", ending(), tiny.tokenizer()), policy, None)


def exam(*arms: Variant, batch_tokens: int = 300) -> Evaluation:
    questions = stub.examples(stub.ALGORITHMS, (3, 4, 9), 3, "test", 0)
    return Evaluation(arms or (arm(),), questions, batch_tokens, {})


def alone(one: Evaluation, item: int, policy: Policy | None) -> str:
    """An answer token by token, without padding, batch or cache."""
    words: Any = tiny.tokenizer()
    model = one.variants[0].language.model
    ids = list(next(replies(words, [one.questions[item]])).ids)
    ids = ids[: len(ids) - len(words(one.questions[item].answer.rstrip()).input_ids) - 1]
    start = len(ids)
    with torch.no_grad(), applied(model, policy):
        while len(ids) < start + 12:
            token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if token == words.eos_token_id:
                break
            ids.append(token)
    return str(words.decode(ids[start:]))


@pytest.mark.parametrize("policy", [None, PAPER])
def test_answers_are_what_the_model_says_alone(tmp_path: Path, policy: Policy | None) -> None:
    one = exam(arm(policy=policy))
    store = one.store(tmp_path, resume=False)
    one.answer(store)
    said = [store["a", item] for item in range(len(one.questions))]
    for item, found in enumerate(said):
        assert found.text[:12] == alone(one, item, policy)[:12]
    # Some end by themselves, and none says more than it may.
    assert len({found.tokens for found in said}) > 1
    assert max(found.tokens for found in said) <= exams._limit(one.expected(one.variants[0]))
    assert all(found.seconds > 0.0 for found in said)


def test_a_killed_examination_asks_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = exam(arm("a"), arm("b", PAPER))
    whole = one.store(tmp_path / "whole", resume=False)
    one.answer(whole)
    asked: list[int] = []
    real = exams._generated

    def killed(arm: Variant, wanted: Any, texts: Any) -> list[Answer]:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append(len(wanted))
        return real(arm, wanted, texts)

    folder = tmp_path / "cut"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(exams, "_generated", killed)
        with pytest.raises(KeyboardInterrupt):
            one.answer(one.store(folder, resume=False))
    with (folder / "answers.jsonl").open("ab") as file:
        file.write(b'{"key": "a/')  # a kill cut the last line short
    with pytest.raises(ArgumentError, match="--resume"):
        one.store(folder, resume=False)
    with pytest.raises(ArgumentError, match="with other arms"):
        exam(arm("a"), arm("b")).store(folder, resume=True)
    again = one.store(folder, resume=True)
    count = 0

    def counted(arm: Variant, wanted: Any, texts: Any) -> list[Answer]:
        nonlocal count
        count += len(wanted)
        return real(arm, wanted, texts)

    monkeypatch.setattr(exams, "_generated", counted)
    one.answer(again)
    assert count == 2 * len(one.questions) - sum(asked)
    read = AnswerStore(folder)
    for name in ("a", "b"):
        for item in range(len(one.questions)):
            assert read[name, item].text == whole[name, item].text


def test_text_is_cut_once_for_arms_that_cut_it_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(tokenizer: Any, questions: Any) -> Any:
        asked.append(len(questions))
        return replies(tokenizer, questions)

    monkeypatch.setattr(exams, "replies", counted)
    questions = stub.examples(stub.ALGORITHMS, (3, 4, 9), 3, "test", 0)
    one = Evaluation.fitting((arm("a"), arm("b", PAPER)), questions, 300, {})
    assert one.expected(one.variants[0]) == one.expected(one.variants[1]) == list(replies(tiny.tokenizer(), questions))
    assert asked == [len(questions)]
    other = arm("c")
    words: Any = other.language.tokenizer
    words.eos_token = words.convert_ids_to_tokens(5)
    two = Evaluation.fitting((arm("a"), other), questions, 300, {})
    ends = [{reply.ids[-1] for reply in two.expected(known)} for known in two.variants]
    assert ends == [{tiny.tokenizer().eos_token_id}, {5}]
    assert len(asked) == 3


def test_scored_answers_are_those_of_greedy_decoding(tmp_path: Path) -> None:
    model = ending()
    words: Any = tiny.tokenizer()
    language = LanguageModel("tiny", model, words)
    given = stub.examples(stub.ALGORITHMS, (3, 4), 4, "test", 0)
    first = Evaluation([Variant("a", language, PAPER, None)], given, 300, {})
    generated = first.store(tmp_path / "one", resume=False)
    first.answer(generated)
    said = [generated["a", item].text for item in range(len(given))]
    # Half of the answers become what the model says itself.
    mixed = [
        replace(one, answer=text) if place % 2 else one
        for place, (one, text) in enumerate(zip(given, said, strict=True))
    ]
    second = Evaluation(first.variants, mixed, 300, {"scored": True})
    store = second.store(tmp_path / "two", resume=False)
    second.answer(store)
    for place, (one, text) in enumerate(zip(mixed, said, strict=True)):
        found = store["a", place]
        ended = generated["a", place].tokens < exams._limit(first.expected(first.variants[0]))
        same = ended and text == one.answer and "�" not in text  # what is half a letter is not tokenized as it was
        assert (found.text == one.answer.strip()) == same
        assert found.entropy is not None
        assert 0.0 < found.entropy < 1.0


def test_a_line_that_is_not_ours_is_named(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.add("a", {0: Answer("yes", 1, 1.0)})
    with (tmp_path / "answers.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"item": 3}\n')
    with pytest.raises(FileFormatError, match=r"line 2 of .*answers.jsonl.* remove that line .*--resume"):
        AnswerStore(tmp_path)
