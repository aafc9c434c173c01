"""Forecasts by lines and by key replication: how often each key counts, and that attention computes with just that."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sharpmax.integrations.transformers.interface import installed, observe
from sharpmax.probing.forecast import REPLICATION, Replication, measure_replicated, predict, replication_of
from sharpmax.probing.measurement import Numbers, Passage
from sharpmax.stats.call import AttentionCall
from tests.integrations.families import FAMILIES
from tests.probing.test_measurement import KEYS, SIZES

RISES = np.array([[0.0, 0.0, 0.05], [0.9, 0.6, 0.3], [0.1, 0.0, 0.5]])


def rising(n: float) -> Numbers:
    return 1.0 + RISES * math.log(n / KEYS[8])


def curves(entropy: Callable[[float], Any], top: Callable[[float], Any] = lambda n: 0.3) -> dict[str, Numbers]:
    values = {"entropy": entropy, "top": top, "count": lambda n: n}
    return {name: np.stack([one(KEYS[size]) * np.ones_like(RISES) for size in SIZES]) for name, one in values.items()}


def test_a_straight_line_is_forecast_exactly_without_a_look_at_larger_sizes() -> None:
    known = curves(rising)
    for name in ("entropy", "top"):
        known[name][SIZES.index(64) + 1 :] = np.nan
    found = predict(known, SIZES, 64, {})
    assert (found.method, found.fitted, list(found.values)) == ("line", (8, 16, 32, 64), [128, 256, 512])
    np.testing.assert_allclose(found.values[512]["entropy"], rising(KEYS[512]))
    np.testing.assert_allclose(found.values[512]["top"], 0.3)


def test_key_replication_is_three_quarters_of_a_forecast_that_it_reaches() -> None:
    """Straight up to 64 items; then something happens that no curve shows."""
    known = curves(lambda n: rising(n) + (1.5 * math.log(n / 512) if n > 512 else 0.0))
    names, at = ("entropy", "top"), SIZES.index(64)
    changes = {
        to: {name: known[name][SIZES.index(to)] - known[name][at] for name in names} for to in (64, 128, 256, 512)
    }
    found = predict(known, SIZES, 64, changes)
    assert (found.method, set(found.values)) == (REPLICATION, {128, 256, 512})
    expected = 0.75 * known["entropy"][-1] + 0.25 * rising(KEYS[512])
    np.testing.assert_allclose(found.values[512]["entropy"], expected)
    del changes[512]
    assert predict(known, SIZES, 64, changes).method == "line"


def test_forecasts_are_entropies_and_weights() -> None:
    steep = curves(lambda n: 0.2 + 1.4 * (math.log(n) - 4.0), lambda n: min(1.0, 40.0 / n))
    found = predict(steep, SIZES, 64, {}).values[512]
    assert ((found["entropy"] >= 0.0) & (found["entropy"] <= math.log(KEYS[512]))).all()
    assert ((found["top"] >= 1.0 / KEYS[512]) & (found["top"] <= 1.0)).all()


def chosen(context: int | None = None) -> tuple[Passage, Replication]:
    """Five tokens, 24 items of three tokens each, of which the 11th stays single, and four more; 72 items are added."""
    items = [0] * 5 + [1 + place // 3 for place in range(72)] + [-1] * 4
    one = Passage({"input_ids": torch.randint(3, 97, (1, len(items)))}, tuple(items), 11)
    found = replication_of(one, 72.0, context)
    assert found is not None
    return one, found


def test_how_often_each_key_counts_and_where_it_stands() -> None:
    one, found = chosen()
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
    short = chosen(context=200)[1].positions
    assert int(short.max()) == 199
    assert (short.diff() >= 1).all()


@pytest.mark.parametrize("items", [(), (0, 0, -1), tuple(range(12))])
def test_too_few_items_are_not_replicated(items: tuple[int, ...]) -> None:
    assert replication_of(Passage({}, items), 10.0) is None


def oracle(seen: AttentionCall, found: Replication) -> tuple[Tensor, Tensor]:
    """Entropy and top weight of the last row over keys that really are there as often as they count."""
    copies = found.weights()[-1]
    key = seen.k.double().repeat_interleave(seen.heads // seen.k.shape[1], 1).repeat_interleave(copies, 2)
    logits = (seen.query[:, :, -1:].double() @ key.transpose(2, 3)).squeeze(2) * seen.query.shape[-1] ** -0.5
    weights = logits.softmax(-1)
    return -(weights * weights.log()).sum(-1), weights.amax(-1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_equal_those_with_real_copies(attention: str) -> None:
    """In the first layer, whose keys do not depend on what others see; nothing stays installed."""
    model = FAMILIES["llama"].build(attention, max_position_embeddings=512)
    one, found = chosen()
    before = model(**one.inputs).logits
    calls: list[AttentionCall] = []
    remove = observe(model, calls.append)
    model(**one.inputs, position_ids=found.positions[None])
    remove()
    read = measure_replicated(model, one, found)
    for name, value in zip(("entropy", "top"), oracle(calls[0], found), strict=True):
        np.testing.assert_allclose(read[name][0], value[0].numpy(), rtol=1e-4, atol=1e-5)
    assert installed(model) is None
    assert torch.equal(model(**one.inputs).logits, before)


def test_a_sliding_window_is_not_replicated() -> None:
    """A layer that looks back five keys sees five, whatever the others see."""
    model = FAMILIES["mistral"].build(max_position_embeddings=512)
    one, found = chosen()
    assert (np.exp(measure_replicated(model, one, found)["entropy"]) <= 5.0 + 1e-4).all()
