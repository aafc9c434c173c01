"""Key replication for forecasts: how often each key counts, and that attention computes with just that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sharpmax.integrations.transformers as hf
from sharpmax.integrations.transformers.interface import installed, observe
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.probing.forecast import Replication, measure_replicated, replication_of
from sharpmax.probing.inputs import Passage, task_inputs
from sharpmax.stats.call import AttentionCall
from sharpmax.tasks.registry import get_task
from tests.experiments.evaluate import tiny
from tests.integrations.families import FAMILIES


def passage(size: int = 24, once: int = 11, per: int = 3) -> Passage:
    """Five tokens, `size` items of `per` tokens each, and four more."""
    items = [0] * 5 + [1 + place // per for place in range(per * size)] + [-1] * 4
    return Passage({"input_ids": torch.randint(3, 97, (1, len(items)))}, tuple(items), once)


def chosen(more: float = 72.0, context: int | None = None, **options: Any) -> tuple[Passage, Replication]:
    one = passage(**options)
    found = replication_of(one, more, context)
    assert found is not None
    return one, found


def test_how_often_each_key_counts_and_where_it_stands() -> None:
    one, found = chosen(72.0)
    items, weights = torch.tensor(one.items), found.weights()
    assert int(weights[-1].sum()) == len(one.items) + 72 * 3
    for item in (0, -1, 1, 2, 3, 4, 21, 22, 23, 24, one.once):
        assert (found.times[items == item] == 1).all(), item
    assert (found.times > 1).any()
    # A block sees itself once and hides its beginning from others.
    for block in range(int(found.block.min()) + 1, int(found.block.max())):
        inside = found.block == block
        assert (weights[inside][:, inside] == 1).all()
    first = [int(items[(found.block == block)].min()) for block in range(4)]
    assert set(items[found.times == 0].tolist()) == {n for start in first for n in (start, start + 1)} - {one.once}
    # Tokens of a block stay together; the last one stands where it would in the long list.
    steps, same = found.positions.diff(), found.block.diff() == 0
    assert (steps[same] == 1).all()
    assert (steps[~same] >= 1).all()
    assert (steps > 1).any()
    assert int(found.positions[-1]) == len(one.items) + 72 * 3 - 1
    short = chosen(72.0, context=200)[1].positions
    assert int(short.max()) == 199
    assert (short.diff() >= 1).all()


@pytest.mark.parametrize("items", [(), (0, 0, -1), tuple(range(12))])
def test_too_few_items_are_not_replicated(items: tuple[int, ...]) -> None:
    assert replication_of(Passage({}, items), 10.0) is None


def oracle(seen: AttentionCall, found: Replication, beta: float) -> tuple[Tensor, Tensor]:
    """Entropy and top weight of the last row over keys that really are there as often as they count."""
    copies = found.weights()[-1]
    key = seen.k.double().repeat_interleave(seen.heads // seen.k.shape[1], 1).repeat_interleave(copies, 2)
    logits = beta * (seen.query[:, :, -1:].double() @ key.transpose(2, 3)).squeeze(2) * seen.query.shape[-1] ** -0.5
    weights = logits.softmax(-1)
    return -(weights * weights.log()).sum(-1), weights.amax(-1)


def first_layer(model: Any, one: Passage, found: Replication) -> AttentionCall:
    """What the first layer of a model without anything installed gets."""
    calls: list[AttentionCall] = []
    remove = observe(model, calls.append)
    model(input_ids=one.inputs["input_ids"], position_ids=found.positions[None])
    remove()
    return calls[0]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("beta", [None, 1.7])
def test_rows_equal_those_with_real_copies(attention: str, beta: float | None) -> None:
    """In the first layer, whose keys do not depend on what others see; with and without a rule."""
    model = FAMILIES["llama"].build(attention, max_position_embeddings=512)
    one, found = chosen()
    expected = oracle(first_layer(model, one, found), found, beta or 1.0)
    if beta is not None:
        hf.apply(model, Constant(beta))
    read = measure_replicated(model, one, found)
    for name, value in zip(("entropy", "top"), expected, strict=True):
        np.testing.assert_allclose(read[name][0], value[0].numpy(), rtol=1e-4, atol=1e-5)


def test_weights_and_copies_are_the_same_in_every_layer() -> None:
    """A rule that changes nothing leads through the copies, which everything after the first layer depends on."""
    model = FAMILIES["llama"].build(max_position_embeddings=512)
    one, found = chosen()
    weighted = measure_replicated(model, one, found)
    hf.apply(model, Constant(1.0 + 1e-7))
    state = installed(model)
    assert state is not None
    assert all(layer.rules for layer in state.layers)
    copied = measure_replicated(model, one, found)
    for name in ("entropy", "top"):
        np.testing.assert_allclose(weighted[name], copied[name], rtol=1e-3, atol=1e-4)


def test_a_rule_counts_the_copies() -> None:
    """A rule for the number of keys must see as many keys as the list stands for, not as many as were read."""
    model = FAMILIES["llama"].build(max_position_embeddings=512)
    one, found = chosen()
    many = int(found.weights()[-1].sum())
    beta = float(np.log(many) / np.log(16.0))
    expected = oracle(first_layer(model, one, found), found, beta)
    hf.apply(model, LogLength(reference=16.0))
    read = measure_replicated(model, one, found)
    np.testing.assert_allclose(read["entropy"][0], expected[0][0].numpy(), rtol=1e-3)


def test_a_sliding_window_is_not_replicated() -> None:
    """A layer that looks back five keys sees five, whatever the others see."""
    model = FAMILIES["mistral"].build(max_position_embeddings=512)
    one, found = chosen()
    assert (np.exp(measure_replicated(model, one, found)["entropy"]) <= 5.0 + 1e-4).all()


def test_nothing_stays_installed() -> None:
    model = FAMILIES["llama"].build(max_position_embeddings=512)
    one, found = chosen()
    before = model(input_ids=one.inputs["input_ids"]).logits
    measure_replicated(model, one, found)
    assert installed(model) is None
    assert torch.equal(model(input_ids=one.inputs["input_ids"]).logits, before)
    hf.apply(model, Constant(1.5))
    measure_replicated(model, one, found)
    state = installed(model)
    assert state is not None
    assert all(layer.repeated is None for layer in state.layers)


def test_a_list_of_names_is_read_as_its_lines() -> None:
    """kv: every line is an item, the one asked for counts once wherever it is."""
    words = tiny.tokenizer()
    prompts = get_task("kv").prompts(24, 6, seed=0)
    read = task_inputs(get_task("kv"), words, None, [24], 6, seed=0).passages[24]
    for prompt, one in zip(prompts, read, strict=True):
        asked = words.decode(one.inputs["input_ids"][0].tolist())
        lines = prompt.user.split("\n")
        place = lines.index(prompt.opening + prompt.answer)
        by_item: dict[int, str] = {}
        for letter, item in zip(asked, one.items, strict=True):
            by_item[item] = by_item.get(item, "") + letter
        assert by_item[0].startswith(lines[0])
        assert by_item[-1].endswith(prompt.opening)
        if one.once:
            assert by_item[one.once].strip("\n") == lines[place]
        else:  # at an end of the list, where it counts once anyway
            assert place in (1, 24)
        listed = [by_item[item].strip("\n") for item in sorted(by_item) if item > 0]
        assert set(listed) <= set(lines[1:-1])
        assert len(listed) in (23, 24)
