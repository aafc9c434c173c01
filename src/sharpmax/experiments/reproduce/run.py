"""A training from its first step to its weights' file, which may be killed at any moment and taken up again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import torch

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments.provenance import provenance
from sharpmax.experiments.reproduce.recipes import Recipe
from sharpmax.experiments.reproduce.training import Training
from sharpmax.models.tensor_files import load_tensors, save_tensors
from sharpmax.models.weights import Trained
from sharpmax.tasks.max_retrieval import VERSION

__all__ = ["Progress", "state_path", "train", "train_all", "weights_path"]

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


def train_all(
    recipes: Sequence[Recipe],
    seeds: Sequence[int],
    steps: int,
    device: torch.device,
    folder: Path,
    *,
    command: str,
    resume: bool = False,
    progress: Callable[[str, int, float], None] = lambda recipe, step, loss: None,
) -> list[Trained]:
    """Train every recipe, on a CPU side by side on one thread each; nothing is begun unless all of it can be."""
    runs = [_Run(recipe, seeds, steps, device, folder, command=command, resume=resume) for recipe in recipes]
    told = [partial(progress, recipe.name) for recipe in recipes]
    if device.type != "cpu":
        return [run.go(tell) for run, tell in zip(runs, told, strict=True)]
    stopped = Event()
    with _one_thread(device), ThreadPoolExecutor(len(runs)) as pool:
        futures = [pool.submit(run.go, tell, stopped) for run, tell in zip(runs, told, strict=True)]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stopped.set()  # an interrupt reaches the main thread alone, which would wait for the others
            raise


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
    run = _Run(recipe, seeds, steps, device, folder, command=command, resume=resume, every_s=save_every_s)
    with _one_thread(device):
        return run.go(progress)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU one thread per training: more gain little, and so the outcome cannot depend on their number."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Run:
    """A training that is allowed to begin or to go on, and its files."""

    def __init__(
        self,
        recipe: Recipe,
        seeds: Sequence[int],
        steps: int,
        device: torch.device,
        folder: Path,
        *,
        command: str,
        resume: bool,
        every_s: float = _SAVE_EVERY_S,
    ) -> None:
        self._identity = {
            "recipe": recipe.name,
            "settings": repr(recipe),
            "seeds": list(seeds),
            "steps": steps,
            "device": device.type,
            "task": VERSION,
        }
        self._command, self._every_s = command, every_s
        self._file, self._result = state_path(folder, recipe.name), weights_path(folder, recipe.name)
        if self._result.exists() and not self._file.exists():
            raise ArgumentError(
                f"--out: {str(folder)!r} holds weights of recipe {recipe.name!r} already; test them with --weights, or "
                "choose another folder"
            )
        self._training = Training(recipe, seeds, steps, device)
        self._spent = 0.0
        if self._file.exists():
            self._spent = _take_up(self._training, self._file, self._identity, resume=resume)

    def go(self, progress: Progress, stopped: Event | None = None) -> Trained:
        """Train to the end, unless `stopped` is set on the way."""
        if self._training.step == self._training.steps and self._result.exists():
            return Trained.load(self._result)
        # A head that has learned leaves gradients too small for a normal float, which take a CPU many times as long.
        torch.set_flush_denormal(True)
        try:
            return self._go(progress, stopped)
        finally:
            torch.set_flush_denormal(False)

    def _go(self, progress: Progress, stopped: Event | None) -> Trained:
        training = self._training
        for unfinished in self._file.parent.glob(f".{self._file.name}.*.partial"):
            unfinished.unlink(missing_ok=True)  # a save that was killed half-way
        began = saved = shown = time.monotonic()
        progress(training.step, math.nan)
        while training.step < training.steps:
            if stopped is not None and stopped.is_set():
                raise KeyboardInterrupt
            loss = training.next_block()
            now = time.monotonic()
            # Reading the loss waits for a GPU that could go on meanwhile: it is not read more often than people look.
            if now - shown >= _SHOW_EVERY_S or training.step == training.steps:
                progress(training.step, float(loss.mean()))
                shown = now
            if now - saved >= self._every_s:
                self._save(began)
                saved = time.monotonic()
        self._save(began)
        return self._finish(began)

    def _save(self, began: float) -> None:
        about = {**self._identity, "step": self._training.step, "seconds": self._spent + time.monotonic() - began}
        save_tensors(self._file, _KIND, self._training.state(), about)

    def _finish(self, began: float) -> Trained:
        training = self._training
        seconds = round(self._spent + time.monotonic() - began, 1)
        origin = provenance(training.seeds[0]) | {"command": self._command, "seconds": seconds}
        trained = Trained(training.recipe.name, training.steps, training.seeds, training.heads(), origin)
        trained.save(self._result)
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
