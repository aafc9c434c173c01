"""The interactive page: one file, its texts and arithmetic against sharpmax in float64, and its use in a browser."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

import sharpmax as sm
from sharpmax import theory
from sharpmax.errors import OutOfRangeWarning
from sharpmax.report.explore import CHOICES, SCENES, START, Place, write
from sharpmax.stats.statistics import dense_stats
from tests.report.browser import DESK, PHONE, Visit, fits, visit

if TYPE_CHECKING:
    from playwright.sync_api import Browser


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
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("explore") / "explore.html")


@pytest.fixture(scope="module")
def page(file: Path) -> str:
    return file.read_text(encoding="utf-8")


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


LOOK = """(place) => {
  const policy = JSON.parse(document.getElementById("explore").textContent).policies[place.policy].policy;
  const seen = maths.look(place, place.temperature, policy);
  const weights = maths.weights(place, seen.beta / place.temperature, 32);
  return { ...seen, horizon: String(seen.horizon), looseHigh: String(seen.bounds.looseHigh), weights };
}"""
# Few and many items, no spread and a large one, items all over it and all at its bottom, warm and cold, every policy.
LEADS, TEMPERATURES = (0.0, 0.35, 1.0), (0.3, 4.0)
GRID = [Place(*place) for place in itertools.product((2, 33, 4096), (0.0, 4.0, 240.0), LEADS, TEMPERATURES, CHOICES)]
GRID += [*SCENES.values(), *(Place(1_000_000, 8.0, 0.25, 0.5, name) for name in CHOICES)]


@pytest.fixture(scope="module")
def desk(browser: Browser, file: Path) -> Iterator[Visit]:
    with visit(browser, file.as_uri(), viewport=DESK) as found:
        yield found


def near(value: Any) -> Any:
    return pytest.approx(value, rel=0, abs=1e-6)


def agrees(place: Place, seen: dict[str, Any]) -> None:
    def same_logarithm(found: str, wanted: float) -> None:  # of numbers that may be infinite, which come as text
        assert math.log(float(found)) == pytest.approx(math.log(wanted), rel=1e-6, abs=1e-6)

    expected = measured(place)
    spread = expected.beta * place.spread / place.temperature
    assert seen["beta"] == pytest.approx(expected.beta, rel=1e-6)
    assert seen["spread"] == pytest.approx(spread, rel=1e-6)
    for name, there in (("plain", expected.plain), ("sharp", expected.sharp)):
        assert seen[name]["top"] == near(there.top)
        assert seen[name]["entropy"] == near(there.entropy)
    assert seen["weights"]["first"] == near(expected.sharp.weights)
    assert sum(seen["weights"]["first"]) + seen["weights"]["rest"] == near(1.0)
    low, high = theory.weight_bounds(spread, place.items)
    assert (seen["bounds"]["low"], seen["bounds"]["high"]) == near((low, high))
    loose_low, loose_high = theory.loose_weight_bounds(spread, place.items)
    assert seen["bounds"]["looseLow"] == near(loose_low)
    same_logarithm(seen["looseHigh"], loose_high)
    same_logarithm(seen["horizon"], theory.horizon(spread))
    assert seen["floor"] == near(theory.entropy_floor(spread, place.items))
    assert seen["ceiling"] == near(theory.entropy_ceiling(place.items))


@pytest.mark.parametrize("policy", CHOICES)
def test_the_arithmetic_is_that_of_sharpmax(desk: Visit, policy: str) -> None:
    places = [place for place in GRID if place.policy == policy]
    found = desk.page.evaluate(f"(places) => places.map({LOOK})", [asdict(place) for place in places])
    for place, seen in zip(places, found, strict=True):
        agrees(place, seen)


TEXTS = """() => Object.fromEntries(
  [...document.querySelectorAll(".knob output, #summary, .metrics dd")].map((one) => [one.id, one.textContent]))"""


def shown(found: Visit) -> dict[str, str]:
    """The texts of the page, by their ids."""
    texts = dict(found.page.evaluate(TEXTS))
    assert len(texts) == 4 + 1 + 2 * 5
    assert all(texts.values())
    return texts


def pixels(found: Visit) -> list[str]:
    drawn = "() => [...document.querySelectorAll('.chart canvas')].map((canvas) => canvas.toDataURL())"
    return list(found.page.evaluate(drawn))


def at_the_start(found: Visit) -> None:
    found.page.get_by_role("button", name="Back to the start").click()


def test_it_starts_on_dispersion(desk: Visit) -> None:
    at_the_start(desk)
    expected = measured(START)
    texts = shown(desk)
    assert [texts[f"{name}-value"] for name in ("items", "spread", "temperature")] == ["256 items", "4 nats", "1"]
    assert desk.page.locator("input[name=policy]:checked").get_attribute("value") == START.policy
    assert texts["entropy-number"] == f"{expected.sharp.entropy:.2f} nats"
    assert texts["top-number"] == f"{100 * expected.sharp.top:.1f}%"
    assert f"{100 * expected.plain.top:.1f}% of the weight" in texts["summary"]
    summary = desk.page.locator("#summary")  # a screen reader gets names and changes
    assert (summary.get_attribute("role"), summary.get_attribute("aria-live")) == ("status", "polite")
    roles = [desk.page.get_by_role(role).count() for role in ("slider", "radio", "img")]
    assert roles == [4, len(CHOICES), 3]
    desk.check()


def test_a_slider_moves_by_keys_and_everything_with_it(desk: Visit) -> None:
    at_the_start(desk)
    before, drawn = shown(desk), pixels(desk)
    slider = desk.page.get_by_role("slider", name="Logit spread")
    slider.focus()
    desk.page.keyboard.press("End")
    after = shown(desk)
    assert slider.get_attribute("aria-valuetext") == after["spread-value"] != before["spread-value"]
    for part in ("top-number", "entropy-number", "summary"):
        assert after[part] != before[part]
    assert all(new != old for new, old in zip(pixels(desk), drawn, strict=True))
    desk.check()


def test_the_temperature_and_the_policy_change_beta(desk: Visit) -> None:
    at_the_start(desk)
    betas = {}
    for policy in CHOICES:
        desk.page.get_by_label(policy, exact=True).check()
        texts = shown(desk)
        betas[policy] = texts["beta-number"]
        assert measured(replace(START, policy=policy)).beta == pytest.approx(float(betas[policy]), rel=5e-3)
        assert desk.page.locator("[data-rule]:visible").get_attribute("data-rule") == policy
        assert (CHOICES[policy].label in texts["summary"]) == (policy != "none")
    assert betas["none"] == "1"
    assert len(set(betas.values())) == len(CHOICES)
    desk.page.get_by_role("slider", name="Temperature").focus()
    desk.page.keyboard.press("ArrowLeft")
    assert shown(desk)["beta-number"] != betas[policy]
    desk.check()


def test_every_scene_is_shown_by_its_button_and_kept_in_the_address(desk: Visit, browser: Browser) -> None:
    for button, place in zip(desk.page.get_by_role("button", name="Show it").all(), SCENES.values(), strict=True):
        button.click()
        assert shown(desk)["items-value"] == f"{place.items:,} items"
    with visit(browser, desk.page.url, viewport=DESK) as other:
        assert shown(other) == shown(desk)
    desk.check()


def test_an_address_that_makes_no_sense_does_no_harm(browser: Browser, file: Path) -> None:
    with visit(browser, f"{file.as_uri()}#items=many&spread=-5&policy=toString&lead=9", viewport=DESK) as found:
        texts = shown(found)
        assert (texts["items-value"], texts["spread-value"], texts["lead-value"]) == ("256 items", "0 nats", "100%")
        assert found.problems == []


@pytest.fixture
def phone(browser: Browser, file: Path) -> Iterator[Visit]:
    with visit(browser, file.as_uri(), viewport=PHONE, has_touch=True, is_mobile=True) as found:
        yield found


def test_a_phone_shows_everything_and_nothing_is_too_wide(phone: Visit) -> None:
    page = phone.page
    assert fits(phone)
    for name in ("weights", "entropy", "top"):
        box = page.locator(f"#{name} canvas").bounding_box()
        assert box is not None
        assert box["width"] > 330
        assert box["x"] + box["width"] <= PHONE["width"]
    boxes = [slider.bounding_box() for slider in page.get_by_role("slider").all()]
    assert all(box is not None and box["height"] >= 24 for box in boxes)
    before = shown(phone)
    page.locator("#top").scroll_into_view_if_needed()
    box = page.get_by_role("slider", name="Items, n").bounding_box()
    assert box is not None
    assert box["y"] >= 0, "the sliders stay in sight of the last chart"
    page.touchscreen.tap(box["x"] + 0.1 * box["width"], box["y"] + box["height"] / 2)
    phone.until(lambda: shown(phone)["summary"] != before["summary"])
    assert fits(phone)
    phone.check()


def test_a_dark_page_has_dark_charts(desk: Visit) -> None:
    light = pixels(desk)
    desk.page.emulate_media(color_scheme="dark")
    desk.until(lambda: all(new != old for new, old in zip(pixels(desk), light, strict=True)))
    desk.page.emulate_media(color_scheme="light")
    desk.check()


def test_without_scripts_the_page_says_why_it_is_empty(browser: Browser, file: Path) -> None:
    with visit(browser, file.as_uri(), viewport=PHONE, java_script_enabled=False) as found:
        assert "JavaScript, which is off" in found.page.inner_text("header")
        assert found.page.locator("input:visible, button:visible").count() == 0
        assert fits(found)
