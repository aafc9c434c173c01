"""The pages of evaluate, calibrate, clrs and compare in a real browser, on a desk and a phone, without the network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sharpmax.report.page import write_page
from tests.report import calibrate_tables, clrs_tables, compare_tables, evaluate_tables
from tests.report.browser import DESK, PHONE, Visit, fits, visit
from tests.report.reproduce_tables import PROVENANCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

STORIES = {
    "evaluate": (evaluate_tables, ["accuracy-kv", "accuracy-houses", "accuracy-json"]),
    "calibrate": (calibrate_tables, ["heads", "curve"]),
    "clrs": (clrs_tables, ["accuracy", "curve"]),
    "compare": (compare_tables, ["accuracy", "sharpness", "causes"]),
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
        if name == "compare":
            fifteen_methods_stay_readable(found)
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


NAMES = """() => [...document.querySelectorAll('#accuracy .textpoint text')].filter((text) => text.textContent)
  .map((text) => { const box = text.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; })"""
WIDTHS = """(arm) => document.querySelector('#accuracy').data.filter((trace) => trace.meta.arm === arm)
  .map((trace) => [trace.line.width, trace.opacity ?? 1])"""


def fifteen_methods_stay_readable(found: Visit) -> None:
    """Every method has its name beside its curve, none upon another; one that is pointed at stands out."""
    names = found.page.evaluate(NAMES)
    assert len(names) == 15
    width = found.page.viewport_size["width"] if found.page.viewport_size else 0
    for place, (left, top, right, bottom) in enumerate(names):
        assert left > 0
        assert right <= width
        assert not [other for other in names[:place] if min(bottom, other[3]) - max(top, other[1]) > 3.5]
    assert found.page.evaluate(VISIBLE, "linear") == [2, 2, 0]
    before = {arm: found.page.evaluate(WIDTHS, arm) for arm in ("linear", "softmax")}
    chip = found.page.locator("button[data-arm='linear']").first
    chip.hover()
    found.page.wait_for_function("() => document.querySelector('#accuracy').data.some((trace) => trace.opacity < 1)")
    assert [3.5, 1] in found.page.evaluate(WIDTHS, "linear")
    assert {opacity for _, opacity in found.page.evaluate(WIDTHS, "softmax")} == {0.3}
    chip.click()
    assert found.page.evaluate(VISIBLE, "linear") == [0, 0, 0]
    chip.click()
    found.page.mouse.move(1, 1)
    found.page.wait_for_function(
        "() => document.querySelector('#accuracy').data.every((trace) => !(trace.opacity < 1))"
    )
    assert {arm: found.page.evaluate(WIDTHS, arm) for arm in before} == before


CAPACITY = ["capacity-softmax-accuracy", "capacity-softmax-top", "capacity-softmax-layers"]


def test_capacity_of_several_methods_is_shown_one_at_a_time(
    screen: dict[str, int], browser: Browser, tmp_path: Path
) -> None:
    tables = compare_tables.make_capacity(("softmax", "ssmax"))
    address = write_page(compare_tables.CAPACITY_COMMAND, PROVENANCE, tables, tmp_path).as_uri()
    with visit(browser, address, viewport=screen) as found:
        for method in ("softmax", "ssmax"):
            found.page.locator(f"button[data-show='capacity-{method}']").click()
            found.drawn()
            for figure in CAPACITY:
                box = found.page.locator(f"#{figure.replace('softmax', method)} .main-svg").first.bounding_box()
                assert box is not None
                assert box["x"] + box["width"] <= screen["width"]
            assert fits(found)
        assert found.page.locator(".failed").count() == 0
        found.check()


@pytest.mark.parametrize("name", STORIES)
def test_without_scripts_the_static_figures_show(name: str, browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses[name], viewport=PHONE, java_script_enabled=False) as found:
        assert found.page.locator(".static img:visible").count() == len(STORIES[name][1])
        assert fits(found)
        found.check()
