"""SmolLM2 for documentation and examples: loaded once in a process, as it comes each time it is asked for."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import sharpmax as sm
from sharpmax.models import language
from sharpmax.models.language import LanguageModel

_load = language.load_language_model


@functools.cache
def _smollm2() -> LanguageModel:
    return _load("smollm2")


def load_once(patch: pytest.MonkeyPatch) -> None:
    """Let code that loads SmolLM2 by its name have the model of this process."""

    def loaded(name: str, **options: Any) -> LanguageModel:
        if name != "smollm2" or options:
            return _load(name, **options)
        sm.restore(_smollm2().model)
        return _smollm2()

    patch.setattr(language, "load_language_model", loaded)
