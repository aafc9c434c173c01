"""Train the paper's single heads; interruptible and resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.errors import ArgumentError
from sharpmax.experiments.engine import one_thread_each, without_denormals
from sharpmax.experiments.run_folder import check_identity, plain
from sharpmax.experiments.stacked_training import Recipe, StackedTraining
from sharpmax.models.single_head import SingleHeads
from sharpmax.models.weights import Trained, load_tensors, must_fit, save_tensors
from sharpmax.provenance import provenance
from sharpmax.tasks.max_retrieval import VERSION, draw, seeded


class Training(StackedTraining[SingleHeads]):
    """Single heads of several seeds in training, at some step of `steps`."""

    def __init__(self, recipe: Recipe, seeds: Sequence[int], steps: int, device: torch.device) -> None:
        def data(seed: int, block: int, steps: int) -> list[Tensor]:
            sets = draw((steps, recipe.batch), recipe.sizes, seeded(device, seed, block))
            return [sets.items, sets.query, sets.visible, sets.answer]

        super().__init__(lambda: SingleHeads.initial(seeds), _losses, data, recipe, seeds, steps, device)


def _losses(heads: SingleHeads, data: Sequence[Tensor]) -> Tensor:
    items, query, visible, answer = data
    scores = heads(items, query, visible)
    losses = F.cross_entropy(scores.flatten(0, 1), answer.flatten(), reduction="none")
    return losses.view(answer.shape).mean(-1)


Progress = Callable[[str, int, float], None]
"""Called with a recipe, the step that its training has reached, and its mean loss."""

_KIND = "training"
_SAVE_EVERY_S = 5.0
_SHOW_EVERY_S = 0.25


def weights_path(folder: Path, recipe: str) -> Path:
    """The file of the trained weights in `folder`."""
    return folder / f"weights-{recipe}.safetensors"


def state_path(folder: Path, recipe: str) -> Path:
    """The file of a training's state, from which it resumes."""
    return folder / f"training-{recipe}.safetensors"


def train(
    recipes: Sequence[Recipe],
    seeds: Sequence[int],
    steps: int,
    device: torch.device,
    folder: Path,
    *,
    command: str,
    resume: bool = False,
    progress: Progress = lambda recipe, step, loss: None,
    save_every_s: float = _SAVE_EVERY_S,
) -> list[Trained]:
    """Train every recipe, or resume training, and write the weights; a state is saved every few seconds.

    Nothing starts unless every recipe can. On a CPU the recipes are trained side by side on one thread each, so that
    the result does not depend on the number of threads.
    """
    trainings = (Training(recipe, seeds, steps, device) for recipe in recipes)
    runs = [_Run(training, folder, command, progress, save_every_s, resume=resume) for training in trainings]
    stopped = Event()
    if device.type != "cpu":
        return [run.go(stopped) for run in runs]
    with one_thread_each(), ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(run.go, stopped) for run in runs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stopped.set()  # an interrupt reaches the main thread alone, which waits for the others
            raise


class _Run:
    """A training and its files."""

    def __init__(
        self, training: Training, folder: Path, command: str, progress: Progress, every_s: float, *, resume: bool
    ) -> None:
        recipe = training.recipe
        self._training, self._command, self._every_s = training, command, every_s
        self._progress = partial(progress, recipe.name)
        self._identity = {
            "recipe": recipe.name,
            "settings": repr(recipe),
            "seeds": list(training.seeds),
            "steps": training.steps,
            "device": training.device.type,
            "task": VERSION,
        }
        self._file, self._result = state_path(folder, recipe.name), weights_path(folder, recipe.name)
        if self._result.exists() and not self._file.exists():
            raise ArgumentError(
                f"--out: {str(folder)!r} holds weights of recipe {recipe.name!r} already; test them with --weights, or "
                "choose another folder"
            )
        self._spent = 0.0
        if self._file.exists():
            self._spent = _resume(training, self._file, self._identity, resume=resume)

    def go(self, stopped: Event) -> Trained:
        """Train to the end, unless `stopped` is set on the way."""
        training = self._training
        if training.step == training.steps and self._result.exists():
            return Trained.load(self._result)
        for unfinished in self._file.parent.glob(f".{self._file.name}.*.partial"):  # of a save that was killed
            unfinished.unlink(missing_ok=True)
        saved = shown = time.monotonic()
        began = saved - self._spent
        self._progress(training.step, math.nan)
        with without_denormals():  # a head that has learned leaves such gradients
            while training.step < training.steps:
                if stopped.is_set():
                    raise KeyboardInterrupt
                loss = training.next_block()
                now = time.monotonic()
                # Reading the loss waits for the GPU.
                if now - shown >= _SHOW_EVERY_S or training.step == training.steps:
                    self._progress(training.step, float(loss.mean()))
                    shown = now
                if now - saved >= self._every_s:
                    self._save(now - began)
                    saved = time.monotonic()
        seconds = time.monotonic() - began
        self._save(seconds)
        origin = provenance(training.seeds[0]) | {"command": self._command, "seconds": round(seconds, 1)}
        trained = Trained(training.recipe.name, training.steps, training.seeds, training.heads(), origin)
        trained.save(self._result)
        return trained

    def _save(self, seconds: float) -> None:
        about = {**self._identity, "step": self._training.step, "seconds": seconds}
        save_tensors(self._file, _KIND, self._training.state(), about)


def _resume(training: Training, file: Path, identity: dict[str, Any], *, resume: bool) -> float:
    """Restore the saved state if it is of this training; returns the seconds spent on it so far."""
    tensors, about = load_tensors(file, _KIND)
    if not resume:
        raise ArgumentError(
            f"--out: {str(file.parent)!r} holds a training of recipe {about.get('recipe')!r} at step "
            f"{about.get('step')} of {about.get('steps')}; add --resume to go on with it, or choose another folder"
        )
    check_identity(file, about, plain(identity))
    with must_fit(file, "the training", "remove it to train from the start"):
        step, spent = int(about["step"]), float(about["seconds"])
        if not 0 <= step <= training.steps:
            raise ValueError(f"step {step} of {training.steps}")
        training.restore(tensors, step)
    return spent
