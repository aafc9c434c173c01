"""The measured horizon on rows whose top weights fall as they are told to, and on a tiny model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharpmax.errors import ArgumentError
from sharpmax.probing import measurement as measured
from sharpmax.probing.capture import capture
from sharpmax.probing.measurement import horizons_of, measure_horizons
from tests.experiments.evaluate import tiny


def readings(*tops: Any, sizes: tuple[int, ...] = (8, 16, 32, 64), noise: float = 0.0) -> Any:
    """Ten passages of each size for heads with these top weights as functions of n, in one layer."""
    rng = np.random.default_rng(0)
    found = {}
    for size in sizes:
        top = np.array([top(size) for top in tops])[None, None] + noise * rng.normal(size=(10, 1, len(tops)))
        flat = np.ones_like(top)
        found[size] = {"count": size * flat, "top": top, "entropy": np.log(size) * flat, "spread": size * flat}
    return found


def test_a_weight_that_falls_meets_the_mass_where_it_falls() -> None:
    """On a straight line against ln n, so that the place between two sizes is exact."""
    line = lambda n: 1.0 - 0.25 * np.log2(n / 8)  # noqa: E731
    found = horizons_of(readings(line, lambda n: 0.9, lambda n: 0.1, lambda n: 1.2 - line(n)), 0.6, "kv")
    kinds = [one.kind for one in found.heads]
    assert kinds == ["at", "beyond", "before", "beyond"]
    assert found.heads[0].tokens == pytest.approx(8 * 2**1.6)
    assert found.heads[0].low == pytest.approx(8 * 2**1.6)
    assert all(one.tokens is None for one in found.heads[1:])
    assert [one.slope for one in found.heads] == pytest.approx([1.0] * 4)
    assert (found.shortest, found.longest, found.prompts, found.sizes) == (8, 64, 40, (8, 16, 32, 64))
    assert (found.heads[0].spread, found.heads[0].widest) == (64.0, 64.0)


def test_intervals_widen_with_the_noise_of_prompts_and_hold_what_is_true() -> None:
    line = lambda n: 1.0 - 0.25 * np.log2(n / 8)  # noqa: E731
    little, much = (horizons_of(readings(line, noise=noise), 0.6, "kv").heads[0] for noise in (0.01, 0.1))
    widths = []
    for one in (little, much):
        assert one.low is not None
        assert one.high is not None
        assert one.low <= 8 * 2**1.6 <= one.high
        widths.append(one.high / one.low)
    assert 1.0 < widths[0] < widths[1]


def test_a_model_is_measured_as_it_computes() -> None:
    """The spread and the lengths are those of the last rows, captured again by hand."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    told: list[tuple[int, int]] = []
    found = measure_horizons(model, tokenizer, 0.3, seed=4, progress=lambda *one: told.append(one))
    assert [(one.layer, one.head) for one in found.heads] == [(i, j) for i in range(2) for j in range(4)]
    assert told[-1][0] == told[-1][1]
    assert len(told) == found.prompts
    from sharpmax.probing.inputs import task_inputs
    from sharpmax.tasks.registry import get_task

    passages = task_inputs(get_task("kv"), tokenizer, tiny.ROOM, None, None, 4).passages
    lengths = [one.length for ones in passages.values() for one in ones]
    assert (found.shortest, found.longest) == (min(lengths), max(lengths))
    spreads = []
    for one in passages[max(passages)]:
        with capture(model) as seen:
            model(**one.inputs)
        spreads.append(seen.stack("spread")[:, 0, :, 0].double().numpy())
    expected = np.mean(spreads, axis=0)
    for head in found.heads:
        assert head.spread == pytest.approx(expected[head.layer, head.head], rel=1e-4)
        assert head.widest >= head.spread


def test_too_little_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "LONGEST", 150)
    with pytest.raises(ArgumentError, match=r"^model: got kv prompts of .* two sizes, up to 150; .*--certified-only"):
        measure_horizons(tiny.model(), tiny.tokenizer())
