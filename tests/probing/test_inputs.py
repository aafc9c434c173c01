"""What a model is given to read: sizes, amounts, windows that end alike."""

from __future__ import annotations

import itertools

import pytest
import torch

from sharpmax.errors import ArgumentError, ArgumentTypeError
from sharpmax.models.scoring import encode
from sharpmax.probing.inputs import Passage, ProbeInputs, own_inputs, task_inputs, text_inputs
from sharpmax.tasks.registry import get_task
from tests.calibration.small import TEXT
from tests.experiments.evaluate import tiny

WORDS = tiny.tokenizer()
KV = get_task("kv")


def ids(one: Passage) -> list[int]:
    found: list[int] = one.inputs["input_ids"][0].tolist()
    return found


def test_prompts_end_where_the_answer_begins() -> None:
    read = task_inputs(KV, WORDS, None, [8], 3, seed=5).passages[8]
    for prompt, one in zip(KV.prompts(8, 3, seed=5), read, strict=True):
        reply = encode(WORDS, prompt)
        assert ids(one) == list(reply.ids[: reply.start])


def test_sizes_and_amounts_follow_from_the_model() -> None:
    found = task_inputs(KV, WORDS, 600, None, None, seed=0)
    assert found.sizes == (8, 16, 32)
    assert all(one.length <= 600 for passages in found.passages.values() for one in passages)
    assert task_inputs(KV, WORDS, None, None, 1, seed=0).sizes == KV.sizes
    long = text_inputs(TEXT * 8, WORDS, 8192, None, None)
    assert {size: len(one) for size, one in long.passages.items()} == {
        64: 12, 128: 12, 256: 12, 512: 12, 1024: 8, 2048: 4, 4096: 2, 8192: 2,
    }  # fmt: skip
    asked = text_inputs(TEXT * 8, WORDS, 8192, [64, 4096], 3)
    assert {len(one) for one in asked.passages.values()} == {3}
    with pytest.raises(ArgumentError, match=r"sizes: got 64 for the task 'kv', a prompt of \d+ tokens; .*up to 600"):
        task_inputs(KV, WORDS, 600, [8, 64], 1, seed=0)
    with pytest.raises(ArgumentError, match="sizes: got 512 for text; allowed: 2 … 300 tokens"):
        text_inputs(TEXT, WORDS, 300, [64, 512], 1)
    with pytest.raises(ArgumentError, match="smallest prompt is no longer than 50 tokens"):
        task_inputs(KV, WORDS, 50, None, None, seed=0)


def test_windows_of_text_end_alike() -> None:
    """Sizes are compared on the same last tokens; otherwise the difference is which tokens these are."""
    found = text_inputs(TEXT, WORDS, 512, None, None)
    assert found.nested
    ends: set[tuple[int, ...]] = set()
    for place in range(12):
        windows = [ids(found.passages[size][place]) for size in found.sizes]
        for small, large in itertools.pairwise(windows):
            assert large[-len(small) :] == small
        ends.add(tuple(windows[0]))
    assert len(ends) == 12


def test_special_tokens_are_around_each_window_and_count() -> None:
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    end = words.eos_token_id
    words.backend_tokenizer.post_processor = TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", end)])
    found = text_inputs(TEXT, words, 64, [16, 32], 2, causal=False)
    for size in (16, 32):
        for one in found.passages[size]:
            assert one.length == size
            assert ids(one)[0] == ids(one)[-1] == end
            assert end not in ids(one)[1:-1]


@pytest.mark.parametrize(
    ("unit", "sizes", "known"),
    [
        ("items", (8, 16, 32, 64, 128, 256, 512), 64),
        ("tokens", (64, 128, 256, 512, 1024), 512),
        ("tokens", (64, 128, 256, 512), 128),  # all are small: half of them
        ("items", (128, 256, 512), 256),  # all are large: two of them
    ],
)
def test_what_forecasts_may_know(unit: str, sizes: tuple[int, ...], known: int) -> None:
    assert ProbeInputs("any", unit, {size: [] for size in sizes}).fit_up_to == known


def test_inputs_of_the_callers_own() -> None:
    one, two = ({"input_ids": torch.zeros(1, n, dtype=torch.long)} for n in (4, 8))
    found = own_inputs({8: [two, two], 4: one})  # type: ignore[dict-item]
    assert {size: len(passages) for size, passages in found.passages.items()} == {4: 1, 8: 2}
    assert found.sizes == (4, 8)
    with pytest.raises(ArgumentTypeError, match=r"inputs: got list; allowed: a mapping"):
        own_inputs([one])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="two sizes or more"):
        own_inputs({4: [one]})
    with pytest.raises(ArgumentError, match=r"inputs: got .* for 8; allowed: for each size"):
        own_inputs({4: [one], 8: [torch.zeros(2)]})  # type: ignore[list-item]
