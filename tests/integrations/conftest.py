"""The model that most tests here need."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.families import LLAMA


@pytest.fixture
def model() -> Any:
    """A tiny Llama, the same for every test."""
    return LLAMA.build()
