"""How much a calibration reads: enough for a GPU's minutes, or little enough for a CPU's ten."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sharpmax.calibrate.kinds import KINDS
from sharpmax.errors import reject

__all__ = ["PROFILES", "Profile", "profile_for"]


@dataclass(frozen=True)
class Profile:
    """The amounts behind one calibration; lengths of text are in tokens, `fillers` in characters."""

    kinds: tuple[str, ...]
    steps: int
    sizes: tuple[int, ...]
    prompts: int
    """Prompts per step that are read alone."""

    filled: int
    """Prompts per step that are read after plain text, so that few items stand in a long input."""

    fillers: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    """Plain text per step, in windows of one of the lengths, which take turns."""

    answers: int
    """The model's own answers per step."""

    questions: int
    """Ordinary questions to take answers to, in calibration and in validation each."""

    answer_tokens: int
    practice_tokens: int
    """Plain text of each length to learn on."""

    validation_tokens: int
    """Plain text of each length that the leash is measured on."""

    validation_prompts: int
    crowds: tuple[int, ...] = (1,)
    """How often the keys of other items may count in a prompt, so that it stands for a larger one."""


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "full": Profile(
            kinds=("constant", "entropy", "rows"),
            steps=240,
            sizes=(8, 16, 32, 64),
            prompts=12,
            crowds=(1, 2, 4, 8),
            filled=4,
            fillers=(1500, 4000, 8000, 12000),
            lengths=(2048, 6144),
            tokens=6144,
            answers=12,
            questions=56,
            answer_tokens=64,
            practice_tokens=122_880,
            validation_tokens=36_864,
            validation_prompts=64,
        ),
        "small": Profile(
            kinds=("constant",),
            steps=40,
            sizes=(8, 16, 32),
            prompts=3,
            crowds=(1, 2, 4),
            filled=0,
            fillers=(),
            lengths=(512,),
            tokens=512,
            answers=1,
            questions=12,
            answer_tokens=32,
            practice_tokens=8192,
            validation_tokens=6144,
            validation_prompts=12,
        ),
    }
)
"""The profiles by name."""


def profile_for(name: str, **changes: Any) -> Profile:
    """A profile by name, with some of its amounts changed."""
    if name not in PROFILES:
        reject("profile", repr(name), f"one of {list(PROFILES)}")
    profile = dataclasses.replace(PROFILES[name], **{key: value for key, value in changes.items() if value is not None})
    for kind in profile.kinds:
        if kind not in KINDS:
            reject("kinds", repr(kind), f"some of {list(KINDS)}")
    if profile.steps < 1:
        reject("steps", profile.steps, "1 or more")
    if not profile.sizes:
        reject("sizes", "none", "one or more numbers of items")
    return profile
