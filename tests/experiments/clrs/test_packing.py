"""Packed rows: every document is there, and none sees another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sharpmax.experiments.clrs.curve import answer_loss
from sharpmax.experiments.clrs.documents import Documents
from sharpmax.experiments.clrs.packing import IGNORED, Packed, batch_of, pack
from sharpmax.hf import applied
from sharpmax.models.scoring import reply_losses
from sharpmax.policies import Constant, LogLength, PerHead
from tests.experiments.clrs import stub
from tests.experiments.evaluate import tiny


def documents(per_cell: int = 6) -> Documents:
    return Documents.of(tiny.tokenizer(), stub.examples(stub.ALGORITHMS, (4, 6), per_cell, "train", 0))


def packed(room: int = 128, **more: Any) -> Packed:
    return Packed.of(documents(), room, **{"together": 2, "steps": None, "epochs": 1.0, "seed": 0, **more})


def test_every_document_is_packed_once_and_rows_are_nearly_full() -> None:
    lengths = np.random.default_rng(0).integers(10, 300, 2000)
    rows = pack(lengths, np.random.default_rng(1).permutation(2000), 2048)
    assert sorted(one for row in rows for one in row) == list(range(2000))
    filled = [sum(lengths[one] for one in row) for row in rows]
    assert max(filled) <= 2048
    assert sum(filled) > 0.97 * 2048 * len(rows)


def test_a_row_reads_back_as_its_documents() -> None:
    made = packed()
    words: Any = tiny.tokenizer()
    row = made[0]
    begins = [i for i, p in enumerate(row["positions"].tolist()) if p == 0]
    first = row["ids"][: begins[1]].tolist()
    text = words.decode(first)
    assert text.startswith(("first:\nkey:", "last:\nkey:"))
    assert text.endswith("</s>")
    said = [i for i, label in enumerate(row["labels"][: begins[1]].tolist()) if label != IGNORED]
    assert said == list(range(said[0], begins[1]))
    assert words.decode(first[: said[0]]).endswith("trace | pred:\n")
    assert [row["labels"][i] for i in said] == [row["ids"][i] for i in said]


@pytest.mark.parametrize("name", ["none", "paper", "length", "heads"])
def test_a_packed_batch_has_exactly_the_losses_of_its_documents(name: str) -> None:
    grid = PerHead.of(Constant, value=[[0.5, 1.0, 2.0, 3.0]] * tiny.LAYERS)
    policy = {"none": None, "paper": "paper", "length": LogLength(reference=8), "heads": grid}[name]
    model = tiny.model().double()
    made = packed()
    batch: Any = batch_of([made[0], made[1]])
    labels = batch.pop("labels")
    alone = [made.documents[one] for row in made.rows[:2] for one in row]
    assert len(alone) > 4
    with applied(model, policy):
        together = answer_loss(model(**batch).logits, labels, 1)
        apart = sum(reply_losses(model, [one])[0].sum() for one in alone)
        mixed = answer_loss(model(batch["input_ids"], use_cache=False).logits, labels, 1)
    # Losses are computed in float32.
    assert float(together) == pytest.approx(float(apart), rel=1e-6)
    # Without positions that start anew the documents would see each other.
    assert abs(float(mixed) - float(apart)) > 1e-3 * float(apart)


def test_steps_and_passes() -> None:
    short = packed(steps=3)
    assert len(short) == 6
    whole = packed()
    many = packed(steps=40)
    assert many.passes > 3 * whole.passes
    n = len(packed().documents)
    # Each pass holds every document, in another order.
    flat = [one for row in many.rows for one in row]
    assert flat[:n] != flat[n : 2 * n]
    assert packed(seed=1).rows != whole.rows
    assert packed().rows == whole.rows
    assert whole.tokens(0, 2) == int((torch.cat([whole[0]["ids"], whole[1]["ids"]]) != 0).sum())


def test_documents_that_are_too_long_are_counted() -> None:
    examples = stub.examples(stub.ALGORITHMS, (4, 60), 3, "train", 0)
    made = Documents.of(tiny.tokenizer(), examples, most=80)
    assert (len(made), made.dropped) == (6, 6)
