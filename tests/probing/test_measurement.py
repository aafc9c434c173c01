"""Inputs of growing size, and curves, slopes and horizons of heads whose every number is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sharpmax.probing.measurement import (
    Numbers,
    Passage,
    ProbeInputs,
    curves_of,
    fit,
    slope,
    task_inputs,
)
from sharpmax.tasks.registry import get_task
from tests.calibration.small import TEXT
from tests.experiments.evaluate import tiny

SIZES = (8, 16, 32, 64, 128, 256, 512)
KEYS = {size: 8 * size for size in SIZES}


def readings(
    entropy: Callable[[float], Any], top: Callable[[float], Any] = lambda n: 0.2, prompts: int = 4, noise: float = 0.0
) -> dict[int, dict[str, Numbers]]:
    """Statistics `[prompts, layers, heads]` at every size, from functions of the number of keys."""
    rng = np.random.default_rng(0)
    found = {}
    for size, keys in KEYS.items():
        values = np.asarray(entropy(keys), dtype=float)
        shape = (prompts, *values.shape)
        found[size] = {
            "entropy": values + noise * rng.normal(size=shape),
            "top": np.clip(np.broadcast_to(top(keys), shape) + 0.1 * noise * rng.normal(size=shape), 0.0, 1.0),
            **{name: np.full(shape, value) for name, value in (("spread", 9.0), ("sink", 0.1), ("local", 0.1))},
            "count": np.full(shape, float(keys)),
        }
    return found


def test_a_window_of_fixed_length_has_no_slope() -> None:
    assert np.isnan(slope(np.full((3, 1, 1), 5.0), np.array([1.0, 2.0, 3.0])[:, None, None])).all()


def test_a_nested_curve_is_not_moved_by_which_passages_are_left() -> None:
    """Each passage has a level of its own; the two that are read at large sizes happen to be the low ones."""
    levels = np.sort(np.random.default_rng(2).normal(3.0, 0.5, size=8))
    rise = {size: 0.1 * place for place, size in enumerate(SIZES)}
    read = {
        size: {
            "entropy": (levels[: 8 if size <= 64 else 2] + rise[size])[:, None, None],
            "count": np.full((8 if size <= 64 else 2, 1, 1), 1000.0),
        }
        for size in SIZES
    }
    paired = curves_of(read, nested=True)["entropy"][:, 0, 0]
    np.testing.assert_allclose(paired, levels.mean() + np.array(list(rise.values())))
    assert abs(curves_of(read, nested=False)["entropy"][-1, 0, 0] - paired[-1]) > 0.4
    # It may add up to more than so many keys can have; e^H must not.
    steep = curves_of(readings(lambda n: np.array([[1.2 * math.log(n)]])), nested=True)
    assert (steep["effective"] <= steep["count"] * (1 + 1e-12)).all()


def test_intervals_hold_what_is_true_and_shrink_with_prompts() -> None:
    """Entropy rises by 0.4 per ln n; the top weight is a half at 500 keys."""

    def found(prompts: int) -> Numbers:
        top = lambda n: 0.5 - 0.1 * math.log(n / 500)  # noqa: E731
        read = readings(lambda n: np.full((1, 8), 0.4 * math.log(n)), top, prompts, noise=0.2)
        return np.stack([one[:, 0] for one in fit(read, False, 0.5, seed=0)[1:]])

    few, many = found(6), found(24)
    for (at, low, high), expected in zip(many, (0.4, 500.0), strict=True):
        assert at == pytest.approx(expected, rel=0.2)
        assert ((low < expected) & (expected < high)).mean() >= 0.75
        assert ((low <= at) & (at <= high)).all()
    assert (many[0, 2] - many[0, 1]).mean() < 0.6 * (few[0, 2] - few[0, 1]).mean()
    assert np.isnan(found(1)[:, 1:]).all()  # one prompt has no interval


def test_a_horizon_is_where_the_top_weight_falls_under_the_mass_for_good() -> None:
    """Heads whose top weight falls, stays high, stays low, rises, alternates, and is not a number."""

    def tops(keys: float) -> Numbers:
        doublings = math.log2(keys / 64)
        alternating = 0.6 - 0.1 * math.cos(math.pi * doublings)  # under, over, under, over, under, over, under
        return np.array([[1.0 - 0.25 * doublings, 0.9, 0.1, 0.2 + 0.25 * doublings, alternating, math.nan]])

    read = readings(lambda n: np.full((1, 6), math.log(n)), tops, prompts=10)
    _, slopes, horizons = fit(read, nested=False, mass=0.6, seed=0)
    np.testing.assert_allclose(slopes[0], 1.0)
    for at in horizons[:2]:
        np.testing.assert_allclose(at, [[64 * 2**1.6, np.inf, -np.inf, np.inf, 64 * 2**5.5, np.nan]])


def windows(text: str, context: int, sizes: list[int] | None = None, prompts: int | None = None) -> ProbeInputs:
    return task_inputs("text", tiny.tokenizer(), context, sizes, prompts, 0, text)


def ids(one: Passage) -> list[int]:
    found: list[int] = one.inputs["input_ids"][0].tolist()
    return found


WORDS, KV = tiny.tokenizer(), get_task("kv")


def test_a_list_of_names_is_read_as_its_lines() -> None:
    """kv: every line is an item, the one asked for counts once wherever it is."""
    prompts = KV.prompts(24, 6, seed=0)
    for prompt, one in zip(prompts, task_inputs("kv", WORDS, None, [8, 24], 6).passages[24], strict=True):
        asked = WORDS.decode(ids(one))
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


def test_sizes_and_amounts_follow_from_the_model() -> None:
    found = task_inputs(KV, WORDS, 600)
    assert found.sizes == (8, 16, 32)
    assert all(one.length <= 600 for passages in found.passages.values() for one in passages)
    assert task_inputs(KV, WORDS, None, prompts=1).sizes == KV.sizes
    long = windows(TEXT * 8, 8192)
    assert {size: len(one) for size, one in long.passages.items()} == {
        64: 12, 128: 12, 256: 12, 512: 12, 1024: 8, 2048: 4, 4096: 2, 8192: 2,
    }  # fmt: skip
    asked = windows(TEXT * 8, 8192, [64, 4096], 3)
    assert {len(one) for one in asked.passages.values()} == {3}


def test_windows_of_text_end_alike() -> None:
    """Sizes are compared on the same last tokens; otherwise the difference is which tokens these are."""
    found = windows(TEXT, 512)
    assert found.nested
    ends: set[tuple[int, ...]] = set()
    for place in range(12):
        nested = [ids(found.passages[size][place]) for size in found.sizes]
        for small, large in itertools.pairwise(nested):
            assert large[-len(small) :] == small
        ends.add(tuple(nested[0]))
    assert len(ends) == 12


def test_special_tokens_are_around_each_window_and_count() -> None:
    from tokenizers.processors import TemplateProcessing

    words = tiny.tokenizer()
    end = words.eos_token_id
    words.backend_tokenizer.post_processor = TemplateProcessing(single="</s> $A </s>", special_tokens=[("</s>", end)])
    found = task_inputs("text", words, 64, [16, 32], 2, 0, TEXT, causal=False)
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
