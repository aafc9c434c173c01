"""The arms of an examination: folders that `sharpmax clrs train` wrote, or models as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.errors import reject
from sharpmax.experiments.clrs.training import MODEL
from sharpmax.experiments.evaluate.arms import shape_of, touched
from sharpmax.experiments.folder import RUN, read_run
from sharpmax.files import display_name
from sharpmax.hf.beside import FILE
from sharpmax.models.language import LanguageModel, load_language_model, weights_fingerprint
from sharpmax.policies import Policy, load_policy

__all__ = ["Arm", "arms_named"]


@dataclass(frozen=True, eq=False)
class Arm:
    """A model and the policy it answers under."""

    name: str
    language: LanguageModel
    policy: Policy | None
    run: dict[str, Any] | None
    """The settings it was trained with, where `sharpmax clrs train` did."""

    def to_dict(self) -> dict[str, Any]:
        """What results say of it."""
        layers, heads = shape_of(self.language.model)
        run = self.run or {}
        return {
            "model": run.get("model", self.name),
            "trained": self.run is not None,
            "steps": run.get("steps"),
            "weights": weights_fingerprint(self.language.model),
            "policy": None if self.policy is None else self.policy.to_dict(),
            "describe": "no policy" if self.policy is None else self.policy.describe(),
            "touched": touched(self.policy, layers, heads),
        }


def arms_named(words: Sequence[str], *, device: str, dtype: str) -> list[Arm]:
    """The arms a user asked for, each with a name of its own."""
    arms: list[Arm] = []
    for word in words:
        folder = Path(word)
        trained = (folder / RUN).is_file()
        place = folder / MODEL if trained else folder
        if trained and not place.is_dir():
            reject("model", repr(word), "a finished training", "go on with it: sharpmax clrs train … --resume")
        language = load_language_model(str(place) if place.is_dir() else word, device=device, dtype=dtype)
        policy = load_policy(place / FILE) if (place / FILE).is_file() else None
        name = display_name(word)
        known = [one.name for one in arms]
        numbered = (f"{name} ({number})" for number in range(2, len(known) + 3))
        name = name if name not in known else next(one for one in numbered if one not in known)
        arms.append(Arm(name, language, policy, read_run(folder) if trained else None))
    return arms
