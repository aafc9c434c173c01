"""A training from its first step to its weights' file, which may be killed at any moment and taken up again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments.provenance import provenance
from sharpmax.experiments.reproduce.recipes import Recipe
from sharpmax.experiments.reproduce.training import Training
from sharpmax.models.tensor_files import load_tensors, save_tensors
from sharpmax.models.weights import Trained
from sharpmax.tasks.max_retrieval import VERSION

__all__ = ["Progress", "state_path", "train", "weights_path"]

Progress = Callable[[int, float], None]
"""Told the step a training has reached and its mean loss."""

_KIND = "training"
_SAVE_EVERY_S = 5.0
_SHOW_EVERY_S = 0.25


def weights_path(folder: Path, recipe: str) -> Path:
    """The file of the weights that a training in `folder` ends with."""
    return folder / f"weights-{recipe}.safetensors"


def state_path(folder: Path, recipe: str) -> Path:
    """The file of a training's state, from which it can be taken up again."""
    return folder / f"training-{recipe}.safetensors"


def train(
    recipe: Recipe,
    seeds: Sequence[int],
    steps: int,
    device: torch.device,
    folder: Path,
    *,
    command: str,
    resume: bool = False,
    progress: Progress = lambda step, loss: None,
    save_every_s: float = _SAVE_EVERY_S,
) -> Trained:
    """Train, or go on training, and write the weights; a state is saved every few seconds on the way."""
    identity = {
        "recipe": recipe.name,
        "settings": repr(recipe),
        "seeds": list(seeds),
        "steps": steps,
        "device": device.type,
        "task": VERSION,
    }
    file, result = state_path(folder, recipe.name), weights_path(folder, recipe.name)
    if result.exists() and not file.exists():
        raise ArgumentError(
            f"--out: {str(folder)!r} holds weights of recipe {recipe.name!r} already; test them with --weights, or "
            "choose another folder"
        )
    for unfinished in folder.glob(f".{file.name}.*.partial"):
        unfinished.unlink(missing_ok=True)  # a save that was killed half-way
    training = Training(recipe, seeds, steps, device)
    spent = 0.0
    if file.exists():
        spent = _take_up(training, file, identity, resume=resume)
        if training.step == steps and result.exists():
            return Trained.load(result)
    began = saved = shown = time.monotonic()

    def save() -> None:
        about = {**identity, "step": training.step, "seconds": spent + time.monotonic() - began}
        save_tensors(file, _KIND, training.state(), about)

    progress(training.step, math.nan)
    while training.step < steps:
        loss = training.next_block()
        now = time.monotonic()
        # Reading the loss waits for a GPU that could go on meanwhile, so it is not read more often than people look.
        if now - shown >= _SHOW_EVERY_S or training.step == steps:
            progress(training.step, float(loss.mean()))
            shown = now
        if now - saved >= save_every_s:
            save()
            saved = time.monotonic()
    save()
    origin = provenance(seeds[0]) | {"command": command, "seconds": round(spent + time.monotonic() - began, 1)}
    trained = Trained(recipe.name, steps, tuple(seeds), training.heads(), origin)
    trained.save(result)
    return trained


def _take_up(training: Training, file: Path, identity: dict[str, Any], *, resume: bool) -> float:
    """Restore the saved state if it is of this very training; the seconds spent on it so far."""
    tensors, about = load_tensors(file, _KIND)
    if not resume:
        raise ArgumentError(
            f"--out: {str(file.parent)!r} holds a training of recipe {about.get('recipe')!r} at step "
            f"{about.get('step')} of {about.get('steps')}; add --resume to go on with it, or choose another folder"
        )
    if different := [key for key in identity if about.get(key) != identity[key]]:
        key = different[0]
        raise ArgumentError(
            f"--resume: {str(file)!r} was begun with {key} {about.get(key)} and now got {identity[key]}; use the same "
            f"{key}, or choose another folder"
        )
    try:
        step, spent = int(about["step"]), float(about["seconds"])
        if not 0 <= step <= training.steps:
            raise ValueError(f"step {step} of {training.steps}")
        training.restore(tensors, step)
    except (LookupError, TypeError, ValueError, RuntimeError) as problem:
        reason = " ".join(str(problem).split())
        raise FileFormatError(
            f"weights: {str(file)!r} does not fit this version of the training ({reason}); remove it to train from the "
            "start"
        ) from None
    return spent
