"""The page of `sharpmax probe` in a real browser: pressed, typed, linked to, compared; on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sharpmax.report.page import write_page
from sharpmax.report.registry import together
from tests.report.browser import DESK, PHONE, WIDTHS, Visit, fits, visit
from tests.report.probe_tables import COMMAND, make_tables, tiny_tables
from tests.report.reproduce_tables import PROVENANCE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator

TABLES = make_tables()
CALM = make_tables(policy="paper", calm=0.7)
FIGURES = ("curves", "layers", "forecast")
LINES = """(id) => document.getElementById(id).data.map((trace) => [trace.name, [...trace.y], trace.visible])"""


@pytest.fixture(scope="module")
def addresses(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    pages = {
        "one": TABLES,
        "tiny": tiny_tables(),
        "pair": together([
            (name, {"command": COMMAND, "provenance": PROVENANCE, "tables": tables})
            for name, tables in (("a", TABLES), ("b", CALM))
        ]),
    }  # fmt: skip

    def address(name: str) -> str:
        folder: Path = tmp_path_factory.mktemp(name)
        return write_page(COMMAND, PROVENANCE, pages[name], folder).as_uri()

    return {name: address(name) for name in pages}


# Loading the page takes longer than trying it, so tests share one; each begins with what it presses itself.
@pytest.fixture(scope="module")
def desk(browser: Browser, addresses: dict[str, str]) -> Iterator[Visit]:
    with visit(browser, addresses["one"], viewport=DESK) as found:
        yield found


@pytest.fixture(scope="module")
def phone(browser: Browser, addresses: dict[str, str]) -> Iterator[Visit]:
    with visit(browser, addresses["one"], viewport=PHONE, has_touch=True, is_mobile=True) as found:
        yield found


def spot(found: Visit, name: str) -> Locator:
    return found.page.locator(f".recipe:not(.off) [data-spot='{name}']").first


def show(found: Visit, task: str) -> None:
    found.page.get_by_role("button", name=f"Task {task}").click()
    found.drawn()


def shows(found: Visit, head: str, task: str, tables: dict[str, Any] = TABLES) -> None:
    """The curves, the words and the map are those of the head."""
    layer, number = head.split(".")
    section = found.page.locator(f"[data-recipe='{task}']")
    assert section.locator(".picked strong").inner_text() == f"Layer {layer}, head {number}"
    about = tables[f"heads/{task}"][head]
    lines = {(name, len(y)): y for name, y, _ in found.page.evaluate(LINES, f"curves-{task}")[:4]}
    entropy = [cell["entropy"] for cell in about["curve"].values()]
    assert lines["measured", len(entropy)] == pytest.approx(entropy, rel=1e-3)
    assert about["kind"] in section.locator(".about tbody tr").first.inner_text()
    pressed = section.locator(".spot[aria-pressed='true']")
    assert {button.get_attribute("data-spot") for button in pressed.all()} == {head}


@pytest.mark.parametrize("device", ["desk", "phone"])
def test_every_figure_is_drawn_and_nothing_is_too_wide(device: str, request: pytest.FixtureRequest) -> None:
    found: Visit = request.getfixturevalue(device)
    width = (DESK if device == "desk" else PHONE)["width"]
    for task in ("text", "kv"):
        show(found, task)
        for name in FIGURES:
            box = found.page.locator(f"#{name}-{task} .main-svg").first.bounding_box()
            assert box is not None
            assert box["width"] > 300
            assert box["x"] + box["width"] <= width
        cells = found.page.locator(".recipe:not(.off) .spot")
        assert cells.count() == 270
        box = cells.first.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) >= 24  # the least that a finger finds
        assert fits(found)
    assert found.page.locator(".static:visible, .failed").count() == 0
    found.check()


def test_pressing_a_head_shows_its_curves(desk: Visit) -> None:
    show(desk, "kv")
    for head in ("12.3", "0.0"):
        spot(desk, head).click()
        shows(desk, head, "kv")
    # Map and curves stand side by side, so nothing has to be scrolled.
    left, right = (desk.page.locator(f".recipe:not(.off) figure.{kind}").bounding_box() for kind in ("heads", "curves"))
    assert left is not None
    assert right is not None
    assert left["x"] + left["width"] <= right["x"]
    desk.check()


def test_a_finger_presses_a_head_and_sees_its_curves(phone: Visit) -> None:
    show(phone, "kv")
    spot(phone, "20.5").tap()
    shows(phone, "20.5", "kv")
    assert phone.page.locator("#curves-kv").is_visible()
    phone.page.wait_for_function(
        "() => { const at = document.getElementById('curves-kv').getBoundingClientRect();"
        " return at.top >= 0 && at.top < window.innerHeight; }"
    )
    phone.page.locator(".recipe:not(.off) .back").tap()
    phone.page.wait_for_function("() => document.getElementById('heads-kv').getBoundingClientRect().top > -100")
    phone.check()


def test_the_keyboard_goes_from_head_to_head(desk: Visit) -> None:
    show(desk, "kv")
    spot(desk, "5.5").click()
    keyboard = desk.page.keyboard
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"):
        keyboard.press(key)
    focused = "() => document.activeElement.dataset.spot"
    assert desk.page.evaluate(focused) == "6.5"
    shows(desk, "5.5", "kv")  # nothing is chosen before Enter
    keyboard.press("Enter")
    shows(desk, "6.5", "kv")
    keyboard.press("End")
    keyboard.press("ArrowRight")  # there is nothing further
    assert desk.page.evaluate(focused) == "6.8"
    keyboard.press("Home")
    keyboard.press("Space")
    shows(desk, "6.0", "kv")
    # One stop for the whole map, and it is the chosen head.
    keyboard.press("Tab")
    assert desk.page.evaluate(
        "() => document.activeElement.closest('table') === null || !document.activeElement.dataset.spot"
    )
    keyboard.press("Shift+Tab")
    assert desk.page.evaluate(focused) == "6.0"
    desk.check()


def test_another_task_keeps_the_head(desk: Visit) -> None:
    show(desk, "kv")
    spot(desk, "7.7").click()
    show(desk, "text")
    shows(desk, "7.7", "text")
    assert desk.page.url.endswith("#head=7.7&task=text")
    show(desk, "kv")
    shows(desk, "7.7", "kv")
    desk.check()


def test_hovering_says_the_numbers(desk: Visit) -> None:
    show(desk, "kv")
    tip = desk.page.locator(".recipe:not(.off) .tip")
    spot(desk, "3.2").hover()
    slope = f"{TABLES['heads/kv']['3.2']['slope']:+.2f}".replace("-", "−")
    assert tip.inner_text().startswith("Layer 3, head 2: ")
    assert slope in tip.inner_text()
    box = tip.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    desk.page.keyboard.press("Escape")
    assert tip.is_hidden()
    desk.check()


def test_a_kind_can_be_seen_alone(desk: Visit) -> None:
    show(desk, "kv")
    button = desk.page.locator(".recipe:not(.off) [data-only='dispersing']")
    many = sum(about["kind"] == "dispersing" for about in TABLES["heads/kv"].values())
    button.click()
    assert desk.page.locator(".recipe:not(.off) .spot:not(.dim)").count() == many
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert desk.page.locator(".spot.dim").count() == 0
    desk.check()


def test_a_link_leads_to_a_head(browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses["one"] + "#head=12.3&task=text", viewport=DESK) as found:
        found.drawn()
        assert found.page.locator(".recipe:visible").get_attribute("data-recipe") == "text"
        shows(found, "12.3", "text")
        found.page.wait_for_function("() => window.scrollY > 300")
        # Links change while the page is open, and some lead nowhere or to other parts of the page.
        found.page.evaluate("() => { window.location.hash = '#head=1.1&task=kv'; }")
        found.page.wait_for_function("() => !document.querySelector('[data-recipe=kv]').classList.contains('off')")
        shows(found, "1.1", "kv")
        for nowhere in ("#head=99.99&task=kv", "#head=&task=none", "#method"):
            found.page.evaluate("(hash) => { window.location.hash = hash; }", nowhere)
            shows(found, "1.1", "kv")
        assert found.problems == []


def test_two_runs_beside_each_other(browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses["pair"], viewport=DESK) as found:
        found.drawn()
        boxes = [one.bounding_box() for one in found.page.locator(".recipe:not(.off) .map").all()]
        assert len(boxes) == 3
        assert len({box["y"] for box in boxes if box}) == 1
        spot(found, "4.4").click()
        lines = found.page.evaluate(LINES, "curves-kv")
        for label, tables in (("A: smollm2 as it comes", TABLES), ("B: smollm2 with paper", CALM)):
            entropy = next(y for name, y, _ in lines if name == label)
            cells = tables["heads/kv"]["4.4"]["curve"].values()
            assert entropy == pytest.approx([cell["entropy"] for cell in cells], rel=1e-3)
        assert found.page.locator(".recipe:not(.off) .spot[aria-pressed='true']").count() == 3
        found.page.locator(".recipe:not(.off) [data-arm='B']").first.click()
        lines = found.page.evaluate(LINES, "curves-kv")
        assert {name[0] for name, _, visible in lines if visible is not True} == {"B"}
        assert fits(found)
        found.page.set_viewport_size({"width": PHONE["width"], "height": PHONE["height"]})
        found.page.wait_for_function("() => document.querySelector('.plot').dataset.narrow === 'true'")
        found.page.wait_for_function(f"() => {{ const [all, seen] = ({WIDTHS})(); return all <= seen; }}")
        found.check()


def test_a_dark_page_has_dark_cells_and_curves(desk: Visit) -> None:
    show(desk, "kv")
    colour = "() => getComputedStyle(document.querySelector('i.s10')).backgroundColor"
    ink = "() => document.getElementById('curves-kv').layout.font.color"
    light, before = desk.page.evaluate(colour), desk.page.evaluate(ink)
    desk.page.emulate_media(color_scheme="dark")
    assert desk.page.evaluate(colour) != light
    desk.page.wait_for_function(f"(before) => ({ink})() !== before", arg=before)
    desk.page.emulate_media(color_scheme="light")
    desk.page.wait_for_function(f"(before) => ({ink})() === before", arg=before)
    desk.check()


@pytest.mark.parametrize("screen", [DESK, PHONE], ids=["desk", "phone"])
def test_a_tiny_model_with_numbers_missing(screen: dict[str, int], browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses["tiny"], viewport=screen) as found:
        found.drawn()
        spot(found, "1.2").click()
        assert "not known" in found.page.locator(".about").inner_text()
        assert all(name == "bounds" or y == [] for name, y, _ in found.page.evaluate(LINES, "curves-kv"))
        assert fits(found)
        found.check()


def test_paper_and_pages_without_scripts_show_static_figures(browser: Browser, addresses: dict[str, str]) -> None:
    with visit(browser, addresses["one"], viewport=PHONE, java_script_enabled=False) as found:
        assert found.page.locator(".static img:visible").count() == 8
        assert found.page.locator(".board:visible, .plot:visible, .about:visible, button:visible").count() == 0
        assert fits(found)
        found.page.emulate_media(media="print")
        assert found.page.locator(".static img:visible").count() == 8
        assert found.page.locator(".board:visible, button:visible").count() == 0
        found.check()
