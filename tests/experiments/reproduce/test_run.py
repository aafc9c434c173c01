"""A training as files: what it writes, what it refuses, and that a kill at any moment costs time alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments.reproduce.training import Training, state_path, train, weights_path
from sharpmax.experiments.stacked_training import RECIPES, Recipe
from sharpmax.models.weights import Trained, load_tensors, save_tensors

CPU = torch.device("cpu")
RECIPE = replace(RECIPES["paper"], batch=2)
OTHER = replace(RECIPE, name="sharp", l2=0.0)
STEPS = 10


def run(
    folder: Path,
    recipe: Recipe = RECIPE,
    seeds: tuple[int, ...] = (3, 0),
    steps: int = STEPS,
    progress: Callable[[int, float], None] = lambda step, loss: None,
    **more: Any,
) -> Trained:
    def reported(recipe: str, step: int, loss: float) -> None:
        progress(step, loss)

    (trained,) = train([recipe], seeds, steps, CPU, folder, command="sharpmax test", progress=reported, **more)
    return trained


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def equal(a: Trained, b: Trained) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(t, b.tensors[n]) for n, t in a.tensors.items())


def saved_step(folder: Path) -> int:
    """The step that would be gone on from; 0 before the first state is saved."""
    file = state_path(folder, "paper")
    return int(load_tensors(file, "training")[1]["step"]) if file.exists() else 0


class StoppedError(Exception):
    pass


def stop_at(step: int) -> Any:
    def progress(reached: int, loss: float) -> None:
        if reached == step:
            raise StoppedError

    return progress


@pytest.mark.usefixtures("short_blocks")
class TestFiles:
    def test_writes_weights_and_state(self, tmp_path: Path) -> None:
        seen: list[tuple[int, float]] = []
        trained = run(tmp_path / "new", progress=lambda step, loss: seen.append((step, loss)))
        assert sorted(contents(tmp_path / "new")) == ["training-paper.safetensors", "weights-paper.safetensors"]
        assert [step for step, _ in seen] == [0, 4, 8, 10]
        assert all(0.0 < loss < 10.0 for _, loss in seen[1:])
        assert (trained.recipe, trained.steps, trained.seeds) == ("paper", STEPS, (3, 0))
        assert {"commit", "versions", "hardware", "date", "seed"} <= trained.provenance.keys()
        assert trained.provenance["command"] == "sharpmax test"
        assert trained.provenance["seconds"] >= 0
        loaded = Trained.load(weights_path(tmp_path / "new", "paper"))
        assert equal(loaded, trained)
        assert loaded.provenance == trained.provenance
        direct = Training(RECIPE, (3, 0), STEPS, CPU)
        while direct.step < STEPS:
            direct.next_block()
        assert all(torch.equal(tensor, trained.tensors[name]) for name, tensor in direct.heads().items())

    @pytest.mark.parametrize("every", [0.0, 1e9])
    def test_saves_as_often_as_asked_and_at_the_end(self, every: float, tmp_path: Path) -> None:
        saved: list[int] = []
        run(tmp_path, progress=lambda step, loss: saved.append(saved_step(tmp_path)), save_every_s=every)
        # Progress of a block is reported before it is saved.
        assert saved == ([0, 0, 4, 8] if every == 0.0 else [0] * 4)
        assert saved_step(tmp_path) == STEPS

    def test_recipes_side_by_side_are_trained_as_if_alone(self, tmp_path: Path) -> None:
        both = train([RECIPE, OTHER], (3, 0), STEPS, CPU, tmp_path / "both", command="sharpmax test")
        assert [trained.recipe for trained in both] == ["paper", "sharp"]
        assert equal(both[0], run(tmp_path / "paper"))
        assert equal(both[1], run(tmp_path / "sharp", recipe=OTHER))

    def test_an_interrupt_stops_all_recipes(self, tmp_path: Path) -> None:
        def interrupted(recipe: str, step: int, loss: float) -> None:
            if recipe == "paper":
                raise KeyboardInterrupt

        threads = torch.get_num_threads()
        with pytest.raises(KeyboardInterrupt):
            train([RECIPE, OTHER], (3, 0), 10**9, CPU, tmp_path, command="sharpmax test", progress=interrupted)
        assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("short_blocks")
class TestResuming:
    @pytest.mark.parametrize(("at", "saved"), [(0, 0), (8, 4), (10, 8)])
    def test_gives_the_weights_of_a_run_that_never_stopped(self, at: int, saved: int, tmp_path: Path) -> None:
        with pytest.raises(StoppedError):
            run(tmp_path / "stopped", progress=stop_at(at), save_every_s=0.0)
        assert saved_step(tmp_path / "stopped") == saved
        before = contents(tmp_path / "stopped") if saved else {}
        if saved:
            with pytest.raises(ArgumentError, match=rf"'paper' at step {saved} of 10; add --resume to go on"):
                run(tmp_path / "stopped")
            assert contents(tmp_path / "stopped") == before
        reached: list[int] = []
        again = run(tmp_path / "stopped", resume=True, progress=lambda step, loss: reached.append(step))
        assert reached == [step for step in (0, 4, 8, 10) if step >= saved]
        assert equal(again, run(tmp_path / "whole"))

    def test_a_finished_training_takes_no_further_step(self, tmp_path: Path) -> None:
        left = tmp_path / f".{state_path(tmp_path, 'paper').name}.x1.partial"
        left.write_bytes(b"half")
        first = run(tmp_path)
        assert not left.exists(), "what a kill left of a save is removed"
        before = contents(tmp_path)
        again = run(tmp_path, resume=True)
        assert equal(again, first)
        assert again.provenance == first.provenance
        assert contents(tmp_path) == before
        weights_path(tmp_path, "paper").unlink()  # as after a kill between the last state and the weights
        assert equal(run(tmp_path, resume=True), first)
        state_path(tmp_path, "paper").unlink()
        with pytest.raises(ArgumentError, match="holds weights of recipe 'paper' already"):
            run(tmp_path, resume=True)

    def test_refuses_a_state_of_another_training(self, tmp_path: Path) -> None:
        run(tmp_path)
        before = contents(tmp_path)
        with pytest.raises(ArgumentError, match=r"begun with seeds \[3, 0\] and now got \[3, 1\]"):
            run(tmp_path, resume=True, seeds=(3, 1))
        with pytest.raises(ArgumentError, match="begun with steps 10 and now got 12"):
            run(tmp_path, resume=True, steps=12)
        assert contents(tmp_path) == before

    def test_refuses_what_is_no_state(self, tmp_path: Path) -> None:
        trained, file = run(tmp_path), state_path(tmp_path, "paper")
        tensors, about = load_tensors(file, "training")
        for harmed in (({}, about), (tensors, about | {"step": "four"}), (tensors, about | {"step": 99})):
            save_tensors(file, "training", *harmed)
            with pytest.raises(FileFormatError, match="does not fit this version of the training"):
                run(tmp_path, resume=True)
        trained.save(file)
        with pytest.raises(FileFormatError, match="holds 'single-heads'"):
            run(tmp_path, resume=True)
        file.write_bytes(b"half a fi")
        with pytest.raises(FileFormatError, match="damaged"):
            run(tmp_path, resume=True)


# Forks train, so that a kill costs no further import of torch. Each line read is a folder and the number of saves after
# which the fork kills itself, in the middle of writing a state or the weights.
_TRAINER = """
import os, signal, sys, torch
from dataclasses import replace
from pathlib import Path
from sharpmax.experiments import stacked_training
from sharpmax.experiments.reproduce import training
torch.set_num_threads(1)
stacked_training.BLOCK, training._SHOW_EVERY_S = 10, 0.0
recipe, cpu, real = replace(stacked_training.RECIPES["paper"], batch=2), torch.device("cpu"), os.fsync
training.Training(recipe, [0], 1, cpu)  # loads what the optimiser loads late

def go(folder, limit):
    saves = 0
    def saving(descriptor):
        nonlocal saves
        saves += 1
        if saves > limit:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)
    os.fsync = saving
    training.provenance = lambda seed: {"seed": seed}
    training.train([recipe], [3], 60, cpu, Path(folder), command="x", resume=True, save_every_s=0.0)
    os._exit(0)

for line in sys.stdin:
    folder, limit = line.split()
    if not (child := os.fork()):
        go(folder, int(limit))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork are POSIX")
def test_killed_again_and_again_it_ends_with_the_very_same_weights(tmp_path: Path) -> None:
    lines = [f"{tmp_path}/whole 99\n", *(f"{tmp_path}/killed {limit}\n" for limit in (0, 1, 0, 2, 3, 99))]
    done = subprocess.run(
        [sys.executable, "-c", _TRAINER], input="".join(lines), capture_output=True, text=True, check=True
    )
    assert [int(line) for line in done.stdout.split()] == [0, *[-signal.SIGKILL] * 5, 0]
    whole, killed = (Trained.load(weights_path(tmp_path / name, "paper")) for name in ("whole", "killed"))
    assert equal(whole, killed)
    # A kill in the middle of writing leaves a part under a name that no reader takes for a file.
    for name in contents(tmp_path / "killed"):
        assert re.fullmatch(r"(training|weights)-paper\.safetensors|\..*\.partial", name)
