"""What tests share: kernels run in Triton's interpreter, property tests are repeatable, there is one browser."""

from __future__ import annotations

import os

# Read by Triton when it is imported. On a machine with a GPU, TRITON_INTERPRET=0 runs the compiled kernels instead.
os.environ.setdefault("TRITON_INTERPRET", "1")

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from sharpmax.policies import base
from tests.report.browser import BROWSERS, OPTIONS, missing

if TYPE_CHECKING:
    from playwright.sync_api import Browser

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a GPU machine that brings torch, Triton and pytest alone still runs `make test-gpu`
    settings = None  # type: ignore[assignment, misc]

# Tests are small and run side by side: threads inside each of them would only wait for one another.
torch.set_num_threads(1)

# Other work on the machine must not fail a test, so there are no deadlines; and a red run must be red again.
if settings is not None:
    settings.register_profile(
        "sharpmax", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("sharpmax")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test starts from the same random state and with no warning given yet."""
    torch.manual_seed(0)
    base._warned.clear()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("the package playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        missing(f"there is none of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        yield browser
        browser.close()
