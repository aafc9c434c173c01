"""The page in a real browser: drawn, switchable, on a desk, on a phone, on paper, and without the network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sharpmax.report.page import write_page
from tests.report.browser import DESK, PHONE, WIDTHS, Visit, visit
from tests.report.reproduce_tables import COMMAND, PROVENANCE, make_tables

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FIGURES = ("heat", "accuracy", "focus", "fit", "detection")

TRACES = """(arm) => Object.fromEntries([...document.querySelectorAll('.recipe:not(.off) .plot')].map((plot) =>
[plot.id, {
  known: plot.data.filter((trace) => trace.meta.arm === arm).length,
  visible: plot.data.filter((trace) => trace.meta.arm === arm && trace.visible === true).length,
  drawn: plot.querySelectorAll('.scatterlayer .trace').length}]))"""


@pytest.fixture(scope="module")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("page")
    return write_page(COMMAND, PROVENANCE, make_tables(), folder).as_uri()


# Loading the page takes longer than trying it, so tests share one and leave it as they found it.
@pytest.fixture(scope="module")
def desk(browser: Browser, address: str) -> Iterator[Visit]:
    with visit(browser, address, viewport=DESK) as found:
        yield found


@pytest.fixture(scope="module")
def phone(browser: Browser, address: str) -> Iterator[Visit]:
    with visit(browser, address, viewport=PHONE) as found:
        yield found


@pytest.mark.parametrize("device", ["desk", "phone"])
def test_every_figure_is_drawn_and_nothing_is_too_wide(device: str, request: pytest.FixtureRequest) -> None:
    found: Visit = request.getfixturevalue(device)
    page, width = found.page, (DESK if device == "desk" else PHONE)["width"]
    for recipe, label in (("sharp", "The sharp recipe"), ("paper", "The paper's recipe")):
        button = page.get_by_role("button", name=label)
        button.click()
        found.drawn()
        assert button.get_attribute("aria-pressed") == "true"
        assert [section.get_attribute("data-recipe") for section in page.locator(".recipe:visible").all()] == [recipe]
        for name in FIGURES:
            box = page.locator(f"#{name}-{recipe} .main-svg").first.bounding_box()
            assert box is not None
            assert box["width"] > 300
            assert box["height"] > 250
            assert box["x"] + box["width"] <= width
        scroll, client = page.evaluate(WIDTHS)
        assert scroll <= client
    assert page.locator(".static:visible, .failed").count() == 0
    found.check()


@pytest.mark.parametrize(
    ("arm", "figures"),
    [
        ("entropy-target", {"accuracy-paper", "focus-paper"}),
        ("paper", {"accuracy-paper", "focus-paper", "fit-paper"}),
    ],
)
def test_an_arm_is_hidden_and_shown_everywhere_at_once(desk: Visit, arm: str, figures: set[str]) -> None:
    desk.drawn()
    before = desk.page.evaluate(TRACES, arm)
    assert {name for name, traces in before.items() if traces["known"] and not name.startswith("heat")} == figures
    buttons = desk.page.locator(f".recipe:not(.off) button[data-arm='{arm}']")
    assert buttons.count() == len(figures)
    buttons.last.click()
    assert {button.get_attribute("aria-pressed") for button in buttons.all()} == {"false"}
    hidden = desk.page.evaluate(TRACES, arm)
    for name in figures:
        assert hidden[name]["visible"] == 0
        assert hidden[name]["drawn"] == before[name]["drawn"] - before[name]["known"]
    buttons.first.click()
    assert desk.page.evaluate(TRACES, arm) == before
    desk.check()


def test_the_heat_map_changes_its_arm(phone: Visit) -> None:
    def shown(arm: str) -> int:
        return int(phone.page.evaluate(TRACES, arm)["heat-paper"]["visible"])

    phone.drawn()
    assert (shown("softmax"), shown("entropy-target")) == (6, 0)
    phone.page.locator(".recipe:not(.off) button[data-heat='entropy-target']").click()
    assert (shown("softmax"), shown("entropy-target")) == (0, 6)
    # The arms of the lines are another matter.
    chip = phone.page.locator(".recipe:not(.off) button[data-arm='entropy-target']").first
    chip.click()
    assert (shown("softmax"), shown("entropy-target")) == (0, 6)
    chip.click()
    phone.page.locator(".recipe:not(.off) button[data-heat='softmax']").click()
    phone.check()


def test_paper_shows_static_figures_of_every_recipe(desk: Visit) -> None:
    desk.drawn()
    desk.page.emulate_media(media="print")
    images = desk.page.locator(".static img")
    assert images.count() == 2 * len(FIGURES)
    for image in images.all():
        assert image.is_visible()
        assert image.evaluate("(image) => image.naturalWidth") > 0
    assert desk.page.locator(".plot:visible, .controls:visible, button:visible").count() == 0
    assert desk.page.locator(".recipe:visible").count() == 2
    desk.page.emulate_media(media="screen")
    desk.check()


def test_a_dark_page_has_dark_figures(desk: Visit) -> None:
    ink = "() => getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()"
    same = "(ink) => document.getElementById('accuracy-paper').layout.font.color === ink"
    desk.drawn()
    light = desk.page.evaluate(ink)
    assert desk.page.evaluate(same, light)
    desk.page.emulate_media(color_scheme="dark")
    dark = desk.page.evaluate(ink)
    assert dark != light
    desk.page.wait_for_function(same, arg=dark)
    desk.page.emulate_media(color_scheme="light")
    desk.page.wait_for_function(same, arg=light)
    desk.check()


def test_without_scripts_the_static_figures_show(browser: Browser, address: str) -> None:
    with visit(browser, address, viewport=PHONE, java_script_enabled=False) as found:
        assert found.page.locator(".static img:visible").count() == 2 * len(FIGURES)
        assert found.page.locator(".plot:visible, .controls:visible").count() == 0
        scroll, client = found.page.evaluate(WIDTHS)
        assert scroll <= client
        found.check()
