"""The pages of evaluate, calibrate and clrs in a real browser, on a desk and on a phone, without the network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sharpmax.report.page import write_page
from tests.report import calibrate_tables, clrs_tables, evaluate_tables
from tests.report.browser import DESK, PHONE, Visit, fits, visit
from tests.report.reproduce_tables import PROVENANCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STORIES = {
    "evaluate": (evaluate_tables, ["accuracy-kv", "accuracy-houses", "accuracy-json"]),
    "calibrate": (calibrate_tables, ["heads", "curve"]),
    "clrs": (clrs_tables, ["accuracy", "curve"]),
}
VISIBLE = """(arm) => [...document.querySelectorAll('.plot')].map((plot) =>
  plot.data.filter((trace) => trace.meta.arm === arm && trace.visible === true).length)"""


@pytest.fixture(scope="module")
def addresses(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name, (module, _) in STORIES.items():
        folder: Path = tmp_path_factory.mktemp(name)
        found[name] = write_page(module.COMMAND, PROVENANCE, module.make_tables(), folder).as_uri()
    return found


@pytest.fixture(scope="module", params=["desk", "phone"])
def screen(request: pytest.FixtureRequest) -> dict[str, int]:
    return DESK if request.param == "desk" else PHONE


@pytest.mark.parametrize("name", STORIES)
def test_every_figure_is_drawn_and_nothing_is_too_wide(
    name: str, screen: dict[str, int], browser: Browser, addresses: dict[str, str]
) -> None:
    with visit(browser, addresses[name], viewport=screen) as found:
        found.drawn()
        for figure in STORIES[name][1]:
            box = found.page.locator(f"#{figure} .main-svg").first.bounding_box()
            assert box is not None
            assert box["width"] > 300
            assert box["height"] > 250
            assert box["x"] + box["width"] <= screen["width"]
        assert fits(found)
        assert found.page.locator(".static:visible, .failed, .heading").count() == 0
        if name == "evaluate":
            hides_an_arm_everywhere(found)
        if name == "clrs":
            draws_thirty_panels_apart(found)
        found.page.emulate_media(media="print")
        assert found.page.locator(".static img:visible").count() == len(STORIES[name][1])
        assert found.page.locator(".plot:visible, button:visible").count() == 0
        found.check()


def hides_an_arm_everywhere(found: Visit) -> None:
    buttons = found.page.locator("button[data-arm='smollm2']")
    assert buttons.count() == 3
    assert found.page.evaluate(VISIBLE, "smollm2") == [2, 2, 2]
    buttons.last.click()
    assert {button.get_attribute("aria-pressed") for button in buttons.all()} == {"false"}
    assert found.page.evaluate(VISIBLE, "smollm2") == [0, 0, 0]
    buttons.first.click()
    assert found.page.evaluate(VISIBLE, "smollm2") == [2, 2, 2]


PANELS = """() => Object.values(document.querySelector('#accuracy')._fullLayout._plots).map(({ xaxis, yaxis }) =>
  [xaxis._offset, yaxis._offset, xaxis._offset + xaxis._length, yaxis._offset + yaxis._length])"""
TITLES = """() => [...document.querySelectorAll('#accuracy .annotation-text')].map((title) => {
  const box = title.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; })"""


def draws_thirty_panels_apart(found: Visit) -> None:
    """Neither a panel nor a title lies upon another, and every panel has a line of each arm."""
    assert len(found.page.evaluate(PANELS)) == 30
    for boxes in (found.page.evaluate(PANELS), found.page.evaluate(TITLES)):
        for place, (left, top, right, bottom) in enumerate(boxes):
            assert not [
                other
                for other in boxes[:place]
                if min(right, other[2]) - max(left, other[0]) > 1 and min(bottom, other[3]) - max(top, other[1]) > 1
            ]
    assert found.page.evaluate(VISIBLE, "paper") == [30, 1]
    found.page.locator("button[data-arm='paper']").first.click()
    assert found.page.evaluate(VISIBLE, "paper") == [0, 0]
    found.page.locator("button[data-arm='paper']").last.click()


@pytest.mark.parametrize("name", STORIES)
def test_without_scripts_the_static_figures_show(name: str, browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses[name], viewport=PHONE, java_script_enabled=False) as found:
        assert found.page.locator(".static img:visible").count() == len(STORIES[name][1])
        assert fits(found)
        found.check()
