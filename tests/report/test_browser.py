"""Pages in a real browser: light and dark, on a desk and on a phone, tooltips and legends, no network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from sharpmax.report.page import write_page
from tests.report.browser import DESK, PHONE, Visit, fits, visit
from tests.report.saved import PROVENANCE, SAVED

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PAGES = {
    "evaluate": "accuracy",
    "probe": "heads-kv",
    "capacity": "capacity-1-accuracy",
}
"""Pages to try, with a figure of each."""


@pytest.fixture(scope="module")
def addresses(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    for name in PAGES:
        (folder / name).mkdir()
    return {name: write_page(f"sharpmax {name}", PROVENANCE, SAVED[name](), folder / name).as_uri() for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_is_drawn_and_nothing_is_too_wide(name: str, browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses[name], viewport=DESK) as found:
        for width in (DESK, PHONE):
            found.page.set_viewport_size({"width": width["width"], "height": width["height"]})
            found.drawn()
            assert fits(found)
            assert found.page.locator(".plot svg.marks").count() == found.page.locator(".plot").count()
            box = found.page.locator(f"#{PAGES[name]} svg.marks").bounding_box()
            assert box is not None
            assert box["width"] > 0.8 * (width["width"] - 80) or name == "capacity"
            assert box["height"] > 150
            assert not found.page.evaluate(
                "() => [...document.querySelectorAll('.plot')].some((one) => one.scrollWidth > one.clientWidth)"
            )
        found.check()


@pytest.fixture(scope="module")
def page(browser: Browser, addresses: dict[str, str]) -> Iterator[Visit]:
    with visit(browser, addresses["evaluate"], viewport=DESK) as found:
        found.drawn()
        yield found


def test_a_point_has_a_tooltip(page: Visit) -> None:
    page.page.locator("#accuracy .mark-symbol.role-mark path").first.hover()
    tip = page.page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    text = tip.inner_text()
    assert "accuracy (%)" in text
    assert "baseline" in text
    page.check()


def test_the_legend_highlights_a_variant(page: Visit) -> None:
    lines = page.page.locator("#accuracy .mark-line path")

    def faint() -> int:
        return sum(line.get_attribute("opacity") == "0.1" for line in lines.all())

    entry = page.page.locator("#accuracy .role-legend-label text", has_text="constant")
    assert faint() == 0
    entry.click()
    page.until(lambda: faint() == lines.count() - 2)  # one line in each panel stays
    entry.click()
    page.until(lambda: faint() == 0)
    page.check()


def test_a_dark_page_has_dark_figures(page: Visit) -> None:
    background = "() => document.querySelector('#accuracy svg.marks').style.backgroundColor"
    light = page.page.evaluate(background)
    assert light == "rgb(255, 255, 255)"
    page.page.emulate_media(color_scheme="dark")
    page.page.wait_for_function(f"(light) => ({background})() !== light", arg=light)
    page.drawn()
    assert page.page.evaluate("() => getComputedStyle(document.body).backgroundColor") == page.page.evaluate(background)
    page.page.emulate_media(color_scheme="light")
    page.page.wait_for_function(f"(light) => ({background})() === light", arg=light)
    page.check()


def test_a_head_that_is_clicked_shows_its_curves(browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses["probe"], viewport=DESK) as found:
        found.drawn()
        menu = found.page.locator("#curves-kv select")
        before = menu.input_value()
        lines = found.page.locator("#curves-kv .mark-line path")
        shown = lines.nth(1).get_attribute("d")
        cell = found.page.locator("#heads-kv .mark-rect path").nth(5)
        cell.click(position={"x": 5, "y": 5})
        found.until(lambda: menu.input_value() != before)
        found.until(lambda: lines.nth(1).get_attribute("d") != shown)
        menu.select_option(before)
        found.until(lambda: lines.nth(1).get_attribute("d") == shown)
        found.check()


def test_without_scripts_the_numbers_are_there(browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses["evaluate"], viewport=PHONE, java_script_enabled=False) as found:
        assert "The figures need JavaScript" in found.page.locator("noscript").inner_text()
        assert found.page.get_by_text("Variants", exact=True).first.is_visible()
        found.check()
