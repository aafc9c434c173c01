"""The page to explore: one file, and what it says of its own scenes is so."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from sharpmax import theory
from sharpmax.report.explore import CHOICES, SCENES, START, Place, write
from tests.report.explore_rows import measured

SCENE = {scene.title: scene for scene in SCENES}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("explore") / "explore.html")


def test_it_is_one_small_file_that_asks_for_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert page.stat().st_size < 150_000
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    assert "url(" not in text


def test_the_plotting_library_keeps_its_licence(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "uPlot 1.6.32" in text
    assert "The MIT License (MIT)" in text
    assert "https://github.com/leeoniya/uPlot (v1.6.32)" in text


def test_every_scene_and_policy_is_on_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for scene in SCENES:
        assert scene.title.replace("'", "&#39;") in text
        assert scene.place.policy in CHOICES
    for name in CHOICES:
        assert f'value="{name}"' in text
    assert START.policy in CHOICES


def test_the_paper_s_head_far_from_home() -> None:
    found = measured(START)
    assert found.plain.top < 0.02
    assert found.sharp.top / found.plain.top == pytest.approx(2, rel=0.1)


def test_the_paper_s_head_at_home() -> None:
    place = SCENE["The same head at home"].place
    assert place.spread / (place.items - 1) == 16.0
    assert measured(place).plain.top > 0.999


def test_as_sharp_as_bounded_logits_allow() -> None:
    place = SCENE["As sharp as bounded logits allow"].place
    assert math.floor(theory.horizon(place.spread)) == 55
    assert "the horizon is 55 items" in SCENE["As sharp as bounded logits allow"].text
    assert measured(place).plain.top == pytest.approx(theory.weight_bounds(place.spread, place.items)[1])
    assert measured(place).plain.top < 0.5


def test_where_the_polynomial_ends() -> None:
    found = measured(SCENE["Where the polynomial ends"].place)
    assert found.plain.entropy > 5.94
    assert found.beta == 1.0


def test_ln_n_has_a_threshold() -> None:
    place = SCENE["ln n has a threshold"].place
    assert place.lead * place.spread < math.log(16) < 3.0

    def top(items: int, spread: float) -> float:
        return measured(Place(items, spread, place.lead, policy=place.policy)).sharp.top

    assert top(16, 2.0) > top(1000, 2.0) > top(65_536, 2.0)
    assert top(16, 3.0) < top(1000, 3.0) < top(65_536, 3.0)


def test_the_entropy_held() -> None:
    place = SCENE["The entropy held"].place
    for items in (1024, place.items):
        assert measured(Place(items, place.spread, policy=place.policy)).sharp.top > 0.98


def test_a_lower_temperature_for_all() -> None:
    place = SCENE["A lower temperature for all"].place
    assert place.temperature == 0.1
    # Ten times as many items, less the ends, bring the same rows about.
    cold = measured(place).plain
    warm = measured(Place((place.items - 1) // 10, place.spread)).plain
    assert cold.top == pytest.approx(warm.top, rel=2e-3)
