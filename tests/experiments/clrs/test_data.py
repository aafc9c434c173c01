"""Batches hold every document, and padding changes no loss."""

from __future__ import annotations

from typing import Any

import pytest

from sharpmax.experiments.clrs.data import Batches, Documents, replies
from sharpmax.experiments.clrs.training import answer_loss, answers_only
from sharpmax.integrations.transformers.application import applied
from sharpmax.models.scoring import reply_losses
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.per_head import PerHead
from tests.experiments.clrs import toy
from tests.experiments.evaluate import tiny

EXAMPLES = toy.examples(toy.ALGORITHMS, (4, 6), 6, "train", 0)


def batches(**more: Any) -> Batches:
    usual = {"group_tokens": 256, "together": 1}
    return Batches.of(Documents.of(tiny.tokenizer(), EXAMPLES), **{**usual, **more})


@pytest.mark.parametrize("name", ["none", "length", "heads"])
def test_the_loss_of_a_batch_is_that_of_its_documents(name: str) -> None:
    grid = PerHead.of(Constant, value=[[0.5, 1.0, 2.0, 3.0]] * tiny.LAYERS)
    policy = {"none": None, "length": LogLength(reference=8), "heads": grid}[name]
    model = tiny.model().double()
    made = batches()
    batch: Any = made[0]
    labels, _ = batch.pop("labels"), batch.pop("answers")
    known = list(replies(tiny.tokenizer(), EXAMPLES))
    alone = [known[one] for one in made.groups[0]]
    assert len({len(one.ids) for one in alone}) > 1
    with applied(model, policy):
        with answers_only(model, labels):
            together = answer_loss(model(**batch).logits, labels, 1)
        apart = sum(reply_losses(model, [one])[0].sum() / one.tokens for one in alone)
    assert model(**batch).logits.shape[:2] == labels.shape
    # Losses are computed in float32.
    assert float(together) == pytest.approx(float(apart), rel=1e-6)


def of_groups(made: Batches) -> list[int]:
    return [one for group in made.groups for one in group]


def test_steps_and_passes() -> None:
    assert len(batches(steps=3, together=2)) == 6
    whole, many = batches(), batches(steps=40)
    n = len(whole.documents.ids)
    # Each pass holds every document, in another order.
    assert sorted(of_groups(whole)) == list(range(n))
    assert whole.passes == 1.0
    assert of_groups(many)[:n] == of_groups(whole)
    assert sorted(of_groups(many)[n : 2 * n]) == list(range(n))
    assert of_groups(many)[n : 2 * n] != of_groups(whole)
    assert many.passes == len(of_groups(many)) / n
    assert batches(seed=1).groups != whole.groups
    assert batches().groups == whole.groups


def test_documents_are_grouped_by_length() -> None:
    short, long = (toy.examples(toy.ALGORITHMS, sizes, 20, "train", 0) for sizes in ((4, 6), (40, 70)))
    documents = Documents.of(tiny.tokenizer(), [*short, *long])
    made = Batches.of(documents, 512, 1)
    assert sorted(of_groups(made)) == list(range(len(documents.ids)))
    most = documents.lengths.max()
    for number, group in enumerate(made.groups):
        rows, size = made[number]["input_ids"].shape
        assert rows == len(group)
        assert rows * size <= 512
        assert size == most or (size % 16 == 0 and size - documents.lengths[group].max() < 16)
    places = sum(made[number]["input_ids"].numel() for number in range(len(made)))
    assert made.tokens(0, len(made)) == documents.lengths.sum() > 0.8 * places


def test_documents_that_are_too_long_are_dropped_and_counted() -> None:
    examples = toy.examples(toy.ALGORITHMS, (4, 60), 3, "train", 0)
    made = Documents.of(tiny.tokenizer(), examples, most=80)
    assert (len(made.ids), made.about["examples"]["dropped"]) == (6, 6)
