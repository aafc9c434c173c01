"""Scoring: one pass over a reply says what generating token by token would, alone or among others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.models.scoring import Reply, batches, encode, judge, own_answers, reply_losses, window_losses
from sharpmax.tasks.prompt import Prompt
from tests.experiments.evaluate import tiny

QUESTIONS = ("a?", "What is the capital of France?", "Why?", "b b a b a a b?", "Tell me a joke, a long one.")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.tokenizer()


def generated(model: Any, asked: Sequence[int], new_tokens: int) -> list[int]:
    """What transformers itself makes of one question."""
    ids = torch.tensor([asked])
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    said: list[int] = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()
    return said[len(asked) :]


@pytest.fixture(scope="module")
def replies(model: Any, tokenizer: Any) -> list[Reply]:
    """The model's own answers, and the same with a token of it changed: at its end, in the middle, at its beginning."""
    found = []
    for number, question in enumerate(QUESTIONS):
        asked = tokenizer(question).input_ids
        own = generated(model, asked, 2 + number)
        for wrong in (None, -1, len(own) // 2, 0):
            answer = list(own)
            if wrong is not None:
                answer[wrong] += 1
            found.append(Reply((*asked, *answer), len(asked)))
    return found


def test_scores_equal_those_of_decoding_token_by_token(model: Any, replies: list[Reply]) -> None:
    judged = judge(model, replies)
    assert [one.right for one in judged] == [True, False, False, False] * len(QUESTIONS)
    for reply, one in zip(replies, judged, strict=True):
        assert one.right == (list(reply.ids[reply.start :]) == generated(model, reply.ids[: reply.start], reply.tokens))
        loss = 0.0
        for place in range(reply.start, len(reply.ids)):
            logits: Tensor = model(input_ids=torch.tensor([reply.ids[:place]])).logits[0, -1].double()
            loss += float(logits.exp().sum().log() - logits[reply.ids[place]])
        assert one.nll == pytest.approx(loss, abs=1e-4)
        assert one.tokens == reply.tokens == len(reply.ids) - reply.start


@pytest.mark.parametrize("most_tokens", [60, 10_000])
def test_other_replies_in_the_batch_change_nothing(most_tokens: int, model: Any, replies: list[Reply]) -> None:
    """Batches of unequal lengths, in any grouping, in the order that was given."""
    together = judge(model, replies[::-1], most_tokens)
    for reply, one in zip(replies[::-1], together, strict=True):
        (alone,) = judge(model, [reply])
        assert one.right == alone.right
        assert one.nll == pytest.approx(alone.nll, abs=1e-5)


def test_every_reply_once_and_never_too_many_tokens() -> None:
    lengths = [3, 50, 7, 7, 90, 1, 12, 50, 300]
    replies = [Reply(tuple(range(n)), 0) for n in lengths]
    found = list(batches(replies, 100))
    assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 100
    assert len(found) < len(lengths)


def test_places_where_nothing_is_to_be_said_count_for_nothing(model: Any) -> None:
    """Two replies that overlap nowhere: each has only its own places, and is neither wrong nor charged there."""
    nll, right = reply_losses(model, [Reply((9, 70, 65), 2), Reply((1, 2, 3, 4, 5, 6, 7), 5)])
    assert nll.shape == (2, 3)
    assert (nll != 0).tolist() == [[True, False, False], [False, True, True]]
    assert right[0, 1:].all()
    assert right[1, 0]


TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "asked"),
    [(None, "First. Which?\nSo:"), (TEMPLATE, "<user>First. Which?<assistant>So:")],
    ids=["plain", "chat"],
)
def test_the_answer_begins_after_the_opening(template: str | None, asked: str) -> None:
    words = tiny.tokenizer()
    words.chat_template = template
    reply = encode(words, Prompt("Which?", "So:", "ab"), before="First. ")
    assert words.decode(reply.ids) == f"{asked}ab"
    assert words.decode(reply.ids[: reply.start]) == asked


def test_a_tokenizer_that_joins_opening_and_answer() -> None:
    """The model has to generate the joined token: the opening's own last token is not part of its input."""
    words = tiny.tokenizer()
    backend = json.loads(words.backend_tokenizer.to_str())
    backend["model"]["vocab"][":a"] = len(words)
    backend["model"]["merges"] = [[":", "a"]]
    words.backend_tokenizer.model = type(words.backend_tokenizer).from_str(json.dumps(backend)).model
    joined = encode(words, Prompt("Which?", "So:", "ab"))
    assert words.decode(joined.ids) == "Which?\nSo:ab"
    assert words.convert_ids_to_tokens(list(joined.ids[joined.start :])) == [":a", "b"]
    apart = encode(words, Prompt("Which?", "So:", "ba"))
    assert words.convert_ids_to_tokens(list(apart.ids[apart.start :])) == ["b", "a"]


def test_window_losses_are_those_of_transformers(model: Any) -> None:
    windows = torch.randint(0, 256, (3, 40)).tolist()
    got = window_losses(model, windows)
    for loss, window in zip(got.tolist(), windows, strict=True):
        ids = torch.tensor([window])
        assert loss == pytest.approx(float(model(input_ids=ids, labels=ids).loss), abs=1e-5)


@pytest.mark.parametrize("at_once", [1, 2, 32])
def test_batches_answer_as_each_question_alone(at_once: int, model: Any, tokenizer: Any) -> None:
    answers = own_answers(model, tokenizer, QUESTIONS, new_tokens=7, at_once=at_once)
    for question, reply in zip(QUESTIONS, answers, strict=True):
        asked = tokenizer(f"{question}\n").input_ids
        assert list(reply.ids) == asked + generated(model, asked, 7)
        assert reply.start == len(asked)
    assert len({reply.ids[reply.start :] for reply in answers}) > 1


@pytest.mark.parametrize("several", [False, True])
def test_an_answer_ends_where_the_model_ends_it(several: bool, tokenizer: Any) -> None:
    """What stands behind the end is padding, not an answer."""
    model = tiny.model()
    end = tokenizer.convert_tokens_to_ids("b")
    model.generation_config.eos_token_id = [end, 256] if several else end
    answers = own_answers(model, tokenizer, QUESTIONS, new_tokens=9)
    for question, reply in zip(QUESTIONS, answers, strict=True):
        assert list(reply.ids) == [*(asked := tokenizer(f"{question}\n").input_ids), *generated(model, asked, 9)]
        assert end not in reply.ids[reply.start : -1]
    assert len({reply.tokens for reply in answers}) > 1
    assert all(one.right for one in judge(model, answers))


def test_a_model_that_cannot_leave_out_logits(model: Any) -> None:
    """Its forward does not know `logits_to_keep`."""
    from transformers import LlamaForCausalLM

    class Whole(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, use_cache: Any = None) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    whole = Whole(model.config).eval()
    whole.load_state_dict(model.state_dict())
    replies = [Reply((9, 70, 65, 66), 2), Reply((1, 2, 3, 4, 5, 6, 7, 8), 5)]
    torch.testing.assert_close(reply_losses(whole, replies), reply_losses(model, replies), rtol=0, atol=1e-6)
    windows = [[1, 2, 3, 4], [9, 8, 7, 6]]
    torch.testing.assert_close(window_losses(whole, windows), window_losses(model, windows), rtol=0, atol=1e-6)
