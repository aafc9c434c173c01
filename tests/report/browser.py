"""A real browser, offline, that records errors and requests of a page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE_MS = 1_200_000  # other work on the machine must not fail a test
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
DRAWN = "() => [...document.querySelectorAll('.plot')].every((plot) => Number(plot.dataset.drawn) === plot.clientWidth)"
WIDTHS = "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"


@dataclass
class Visit:
    """An open page, with its console messages, errors and requests."""

    page: Page
    address: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def drawn(self) -> None:
        self.page.wait_for_function(DRAWN)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + PATIENCE_MS / 1000
        while not condition():
            assert time.monotonic() < end
            self.page.wait_for_timeout(20)

    def check(self) -> None:
        assert self.problems == []
        assert [url for url in self.requests if not url.startswith("data:")] == [self.address]


def missing(reason: str) -> NoReturn:
    if os.environ.get("SHARPMAX_BROWSER") == "required":
        pytest.fail(f"SHARPMAX_BROWSER=required, and {reason}")
    pytest.skip(f"{reason}; the page is not tried in a browser")


@contextmanager
def visit(browser: Browser, address: str, **options: Any) -> Iterator[Visit]:
    """Open the page without a network."""
    context = browser.new_context(offline=True, reduced_motion="reduce", **options)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    found = Visit(page, address)
    page.on("console", lambda message: found.problems.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: found.problems.append(f"error: {error}"))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(address)
    yield found
    context.close()


def fits(found: Visit) -> bool:
    """Whether the page does not scroll sideways."""
    scroll, client = found.page.evaluate(WIDTHS)
    return bool(scroll <= client)
