"""A small calibration on the tiny language model."""

from __future__ import annotations

import random
from typing import Any

import torch

from sharpmax.calibration.budget import CHAT, Budget, Losses, item_losses
from sharpmax.calibration.calibrate import CalibrationResult, calibrate
from sharpmax.calibration.data import Profile, RegularisationData, TrainingPrompts, regularisation_data
from sharpmax.calibration.trainer import TrainingSetup
from sharpmax.integrations.transformers.interface import installed
from tests.experiments.evaluate import tiny

_AMOUNTS: dict[str, Any] = {
    "kinds": ("constant",), "steps": 4, "sizes": (4, 8), "prompts": 3, "filled": 0, "fillers": (), "lengths": (40, 64),
    "tokens": 80, "answers": 2, "questions": 3, "answer_tokens": 5, "practice_tokens": 320, "validation_tokens": 320,
    "validation_prompts": 8,
}  # fmt: skip


def _words() -> str:
    rng = random.Random(5)
    return " ".join(rng.choice(("a", "b", "tree", "House", "of", "42", "cab.")) for _ in range(500))


TEXT = _words()


def profile(**changes: Any) -> Profile:
    """A profile with small amounts, some of them changed."""
    return Profile(**(_AMOUNTS | changes))


def training_setup(model: Any, budget: float = 0.05, seed: int = 0, **changes: Any) -> TrainingSetup:
    """What a trainer trains on."""
    amounts, words = profile(**changes), tiny.tokenizer()
    data = regularisation_data(model, words, amounts, "calibration", TEXT)
    prompts = TrainingPrompts(words, tiny.LETTERS, amounts, seed, TEXT)
    return TrainingSetup(model, prompts, data, item_losses(model, data), Budget(data, budget, {}).nats)


def shifted(baseline: Losses, data: RegularisationData, nats: float) -> dict[str, list[float]]:
    """Losses that are higher by so many nats per token."""
    chat = [loss + nats * one.tokens for loss, one in zip(baseline[CHAT], data.answers, strict=True)]
    return {name: [loss + nats for loss in losses] for name, losses in baseline.items()} | {CHAT: chat}


def calibrated(model: Any, **options: Any) -> CalibrationResult:
    """A whole calibration; amounts of the profile and arguments of `calibrate` alike."""
    amounts = {key: options.pop(key) for key in list(options) if key in _AMOUNTS}
    settings: dict[str, Any] = {"task": tiny.LETTERS, "budget": 0.05, "rate": 0.1, "text": TEXT} | options
    return calibrate(model, tiny.tokenizer(), profile=profile(**amounts), **settings)


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
