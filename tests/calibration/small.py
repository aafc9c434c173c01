"""A small calibration on the tiny language model."""

from __future__ import annotations

import random
from typing import Any

import torch

from sharpmax.calibration.budget import TrainingSetup
from sharpmax.calibration.calibrate import CalibrationResult, calibrate
from sharpmax.calibration.data import Domain, Profile, TrainingPrompts, domains_of
from sharpmax.integrations.transformers.interface import installed
from tests.experiments.evaluate import tiny

_AMOUNTS: dict[str, Any] = {
    "kinds": ("constant",), "steps": 4, "sizes": (4, 8), "longest": 200, "scanned": 1, "formats": 1, "prompts": 3,
    "controls": 0, "lengths": (40, 64), "sampled": (24,), "turns": 2, "tokens": 80, "rows": 30, "answers": 2,
    "questions": 3, "answer_tokens": 5, "training_windows": 5, "validation_windows": 4, "validation_prompts": 8,
}  # fmt: skip


def _words() -> str:
    rng = random.Random(5)
    return " ".join(rng.choice(("a", "b", "tree", "House", "of", "42", "cab.")) for _ in range(500))


TEXT = _words()


def profile(**changes: Any) -> Profile:
    """A profile with small amounts, some of them changed."""
    return Profile(**(_AMOUNTS | changes))


def domains(model: Any, **changes: Any) -> list[Domain]:
    """The domains of a small calibration."""
    return domains_of(model, tiny.tokenizer(), profile(**changes), {"words": TEXT}, "code", 0)


def training_setup(model: Any, budget: float = 0.05, seed: int = 0, **changes: Any) -> TrainingSetup:
    """What a trainer trains on."""
    prompts = TrainingPrompts(tiny.tokenizer(), (tiny.LETTERS,), (), profile(**changes), seed)
    return TrainingSetup(model, prompts, domains(model, **changes), budget, 500)


def calibrated(model: Any, **options: Any) -> CalibrationResult:
    """A whole calibration; amounts of the profile and arguments of `calibrate` alike."""
    amounts = {key: options.pop(key) for key in list(options) if key in {*_AMOUNTS, "replications"}}
    given: dict[str, Any] = {"task": tiny.LETTERS, "budget": 0.05, "keep": 0.5, "rate": 0.1, "texts": {"words": TEXT}}
    return calibrate(model, tiny.tokenizer(), profile=profile(**amounts), **given | options)


def snapshot(model: Any) -> dict[str, Any]:
    """Everything about a model that calibration must leave unchanged."""
    return {
        "weights": [weight.detach().clone() for weight in model.parameters()],
        "versions": [weight._version for weight in model.parameters()],
        "trainable": [weight.requires_grad for weight in model.parameters()],
        "gradients": [weight.grad for weight in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "attention": model.config._attn_implementation,
        "installed": installed(model),
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
    }


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two snapshots are equal."""
    equal = all(torch.equal(a, b) for a, b in zip(before["weights"], after["weights"], strict=True))
    return equal and all(before[key] == after[key] for key in before if key != "weights")
