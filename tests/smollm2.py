"""SmolLM2 for documentation and examples: loaded once in a process, as it comes each time it is asked for."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import sharpmax as sm
from sharpmax.models import language
from sharpmax.models.language import LanguageModel


@functools.cache
def _smollm2() -> LanguageModel:
    return language.load_language_model("smollm2")


def load_once(patch: pytest.MonkeyPatch) -> None:
    """Let code that loads SmolLM2 by its name have the model of this process."""
    load = language.load_language_model

    def loaded(name: str, **options: Any) -> LanguageModel:
        if name != "smollm2" or options:
            return load(name, **options)
        sm.restore(_smollm2().model)
        return _smollm2()

    _smollm2()
    patch.setattr(language, "load_language_model", loaded)
