"""How arms were trained, taken from their own results into those of their examination."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpmax.experiments.clrs.arms import Arm
from sharpmax.results import FILE_NAME, load

__all__ = ["trainings"]

_ELSEWHERE = ("policy", "sizes")
"""Settings that the examination says itself."""


def trainings(words: Sequence[str], arms: Sequence[Arm]) -> dict[str, Any]:
    """Command, provenance, settings, loss curve and speed of every arm, named by `words`, that has results."""
    found = {}
    for word, arm in zip(words, arms, strict=True):
        file = Path(word) / FILE_NAME
        if arm.run is None or not file.is_file():
            continue
        saved = load(file)
        found[arm.name] = {
            "command": saved.command,
            "provenance": saved.provenance,
            "setting": {name: value for name, value in saved.tables["setting"].items() if name not in _ELSEWHERE},
            "curve": saved.tables["curve"],
            "speed": saved.tables["speed"],
        }
    return found
