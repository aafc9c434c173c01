"""Packed rows: every document is there, and none sees another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharpmax.experiments.clrs.data import Documents, Packed, batch_of, pack, replies
from sharpmax.experiments.clrs.training import answer_loss, answers_only
from sharpmax.integrations.transformers.application import applied
from sharpmax.integrations.transformers.interface import observe
from sharpmax.models.scoring import reply_losses
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.per_head import PerHead
from tests.experiments.clrs import stub
from tests.experiments.evaluate import tiny

EXAMPLES = stub.examples(stub.ALGORITHMS, (4, 6), 6, "train", 0)


def packed(row_tokens: int = 128, **more: Any) -> Packed:
    usual = {"group_tokens": 256, "together": 1, "steps": None, "epochs": 1.0, "seed": 0}
    return Packed.of(Documents.of(tiny.tokenizer(), EXAMPLES), row_tokens, **{**usual, **more})


def test_every_document_is_packed_once_and_rows_are_nearly_full() -> None:
    lengths = np.random.default_rng(0).integers(10, 300, 2000)
    rows = pack(lengths, np.random.default_rng(1).permutation(2000), 2048)
    assert sorted(one for row in rows for one in row) == list(range(2000))
    filled = [sum(lengths[one] for one in row) for row in rows]
    assert max(filled) <= 2048
    assert sum(filled) > 0.97 * 2048 * len(rows)


@pytest.mark.parametrize("row_tokens", [128, 16], ids=["shared", "alone"])
@pytest.mark.parametrize("name", ["none", "length", "heads"])
def test_a_batch_has_exactly_the_losses_of_its_documents(name: str, row_tokens: int) -> None:
    grid = PerHead.of(Constant, value=[[0.5, 1.0, 2.0, 3.0]] * tiny.LAYERS)
    policy = {"none": None, "length": LogLength(reference=8), "heads": grid}[name]
    model = tiny.model().double()
    made = packed(row_tokens)
    batch: Any = batch_of([made[0]])
    labels = batch.pop("labels")
    known = list(replies(tiny.tokenizer(), EXAMPLES))
    alone = [known[one] for row in made.groups[0].rows for one in row]
    assert len(labels) >= 2
    assert len(alone) > 4 if row_tokens == 128 else len(alone) == len(labels)
    with applied(model, policy):
        with answers_only(model, labels):
            together = answer_loss(model(**batch).logits, labels, 1)
        apart = sum(reply_losses(model, [one])[0].sum() for one in alone)
        with answers_only(model, labels):
            mixed = answer_loss(model(batch["input_ids"], use_cache=False).logits, labels, 1)
    assert model(**batch).logits.shape[:2] == labels.shape
    # Losses are computed in float32.
    assert float(together) == pytest.approx(float(apart), rel=1e-6)
    # Without positions that start anew documents in one row would see each other.
    assert (abs(float(mixed) - float(apart)) > 1e-3 * float(apart)) is (row_tokens == 128)


def of_groups(made: Packed) -> list[int]:
    return [one for group in made.groups for row in group.rows for one in row]


def test_steps_and_passes() -> None:
    assert len(packed(steps=3, together=2)) == 6
    whole, many = packed(), packed(steps=40)
    n = len(whole.documents)
    # Each pass holds every document, in another order.
    assert sorted(of_groups(whole)) == list(range(n))
    assert whole.passes == 1.0
    assert of_groups(many)[:n] == of_groups(whole)
    assert sorted(of_groups(many)[n : 2 * n]) == list(range(n))
    assert of_groups(many)[n : 2 * n] != of_groups(whole)
    assert many.passes == len(of_groups(many)) / n
    assert packed(seed=1).groups != whole.groups
    assert packed().groups == whole.groups
    assert len(packed(epochs=2.0)) == 2 * len(whole)


def test_a_long_document_makes_no_short_one_expensive() -> None:
    short, long = (stub.examples(("first", "last"), sizes, 20, "train", 0) for sizes in ((4, 6), (40, 70)))
    documents = Documents.of(tiny.tokenizer(), [*short, *long])
    made = Packed.of(documents, 64, group_tokens=512, together=1, steps=None, epochs=1.0, seed=0)
    assert sorted(of_groups(made)) == list(range(len(documents)))
    most = documents.lengths.max()
    for number, group in enumerate(made.groups):
        assert group.size * len(group.rows) <= 512
        assert made[number]["ids"].shape == (len(group.rows), group.size)
        for row in group.rows:
            assert documents.lengths[list(row)].sum() <= group.size
            if group.size > 64:
                (one,) = row
                assert group.size in (64 * (group.size // 64), most)
                assert documents.lengths[one] > 64
    assert made.tokens(0, len(made)) == documents.lengths.sum()
    again = Packed.of(documents, 64, group_tokens=512, together=1, steps=None, epochs=2.0, seed=0)
    assert set(again.groups[len(made) :]) != set(made.groups)


def test_long_documents_need_no_mask() -> None:
    made = packed(16)
    seen: list[Any] = []
    model = tiny.model()
    observe(model, lambda call: seen.append((call.mask, call.offset is not None)))
    batch: Any = batch_of([made[0]])
    model(**{name: batch[name] for name in ("input_ids", "position_ids", "use_cache")})
    assert seen == [(None, True)] * tiny.LAYERS


def test_documents_that_are_too_long_are_counted() -> None:
    examples = stub.examples(stub.ALGORITHMS, (4, 60), 3, "train", 0)
    made = Documents.of(tiny.tokenizer(), examples, most=80)
    assert (len(made), made.dropped) == (6, 6)
