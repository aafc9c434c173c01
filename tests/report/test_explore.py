"""The page to explore: one file, and what it says of its own examples is so; rows measured by sharpmax in float64."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

import sharpmax as sm
from sharpmax import theory
from sharpmax.errors import OutOfRangeWarning
from sharpmax.report.explore import CHOICES, SCENES, START, Place, write
from sharpmax.stats.statistics import dense_stats


class Measured(NamedTuple):
    top: float
    entropy: float
    weights: list[float]
    """The 32 largest at most."""


class Sharpened(NamedTuple):
    beta: float
    plain: Measured
    sharp: Measured


def measured(place: Place) -> Sharpened:
    """What the page draws: the best item at 0, the others evenly from its lead down to the spread."""
    others = torch.arange(1, place.items, dtype=torch.float64) / (place.items - 1)
    low = -place.spread * (place.lead + (1 - place.lead) * others)
    row = torch.cat((torch.zeros(1, dtype=torch.float64), low)) / place.temperature
    chosen = CHOICES[place.policy].policy
    visible, beta = torch.ones_like(row, dtype=torch.bool), 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        plain, sharp = (sm.softmax(row, policy=policy) for policy in (None, chosen))
        if chosen is not None:
            beta = float(chosen.beta(dense_stats(row, visible), lambda factor: dense_stats(row * factor, visible)))
    seen = [
        Measured(float(weights[0]), float(sm.entropy(logits)), weights[:32].tolist())
        for logits, weights in ((row, plain), (row * beta, sharp))
    ]
    return Sharpened(beta, *seen)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("explore") / "explore.html").read_text(encoding="utf-8")


def test_one_file_with_everything_and_the_licence_of_its_library(page: str) -> None:
    assert len(page.encode()) < 150_000
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["'](?!#)""", page)
    assert "url(" not in page
    assert all(words in page for words in ("uPlot 1.6.32", "The MIT License (MIT)", "leeoniya/uPlot (v1.6.32)"))
    assert page.count("Show it</button>") == len(SCENES)
    assert all(f'value="{name}"' in page for name in CHOICES)


def test_it_opens_on_dispersion_with_a_spread_of_4(page: str) -> None:
    few, many = (measured(replace(START, items=items)) for items in (16, 256))
    assert START.items == 256
    shares = f"gets at most {few.plain.top:.0%} of the weight, the best of 256 at most {many.plain.top:.0%}"
    assert f"the best of 16 items {shares}" in page
    assert f"raises it to {many.sharp.top:.0%}" in page
    assert many.plain.top == pytest.approx(theory.weight_bounds(START.spread, START.items)[1])
    assert f"the horizon is {math.floor(theory.horizon(START.spread))} items" in page


def test_what_the_page_says_of_its_scenes_is_so() -> None:
    far, near, end = (measured(SCENES[name]) for name in ("far", "near", "end"))
    assert far.plain.top < 0.02
    assert far.sharp.top / far.plain.top == pytest.approx(2, rel=0.1)
    assert SCENES["near"].spread / (SCENES["near"].items - 1) == 16.0
    assert near.plain.top > 0.999
    assert (end.plain.entropy > 5.94, end.beta) == (True, 1.0)
    place = SCENES["threshold"]
    assert place.lead * place.spread < math.log(16) < 3.0
    low, high = (
        [measured(replace(place, items=items, spread=spread)).sharp.top for items in (16, 1000, 65_536)]
        for spread in (2.0, 3.0)
    )
    assert (low, high) == (sorted(low, reverse=True), sorted(high))
    for items in (1024, 16384):
        assert measured(replace(SCENES["target"], items=items)).sharp.top > 0.98
    cold = SCENES["cold"]
    assert cold.temperature == 0.1
    # Ten times as many items, less the ends, bring the same rows about.
    warm = measured(Place((cold.items - 1) // 10, cold.spread)).plain
    assert measured(cold).plain.top == pytest.approx(warm.top, rel=2e-3)
