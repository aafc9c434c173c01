"""A training as files: what it writes, what it refuses, and that a kill at any moment costs time alone."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
STEPS = 10


def run(
    folder: Path,
    recipe: Recipe = RECIPE,
    seeds: tuple[int, ...] = (3, 0),
    steps: int = STEPS,
    progress: Callable[[int, float], None] = lambda step, loss: None,
    **more: Any,
) -> Trained:
    def told(recipe: str, step: int, loss: float) -> None:
        progress(step, loss)

    (trained,) = train([recipe], seeds, steps, CPU, folder, command="sharpmax test", progress=told, **more)
    return trained


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def equal(a: Trained, b: Trained) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(t, b.tensors[n]) for n, t in a.tensors.items())


def saved_step(folder: Path) -> int:
    """The step that would be gone on from; 0 before the first state is saved."""
    file = state_path(folder, "paper")
    return int(load_tensors(file, "training")[1]["step"]) if file.exists() else 0


def change_state(folder: Path, **about: Any) -> None:
    """Give a saved training another description."""
    file = state_path(folder, "paper")
    tensors, old = load_tensors(file, "training")
    save_tensors(file, "training", tensors, old | about)


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
        told: list[tuple[int, float]] = []
        trained = run(tmp_path / "new", progress=lambda step, loss: told.append((step, loss)))
        assert names(tmp_path / "new") == ["training-paper.safetensors", "weights-paper.safetensors"]
        assert [step for step, _ in told] == [0, 4, 8, 10]
        assert all(0.0 < loss < 10.0 for _, loss in told[1:])
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
    def test_saves_as_often_as_told_and_at_the_end(self, every: float, tmp_path: Path) -> None:
        saved: list[int] = []
        run(tmp_path, progress=lambda step, loss: saved.append(saved_step(tmp_path)), save_every_s=every)
        # Word of a block comes before it is saved.
        assert saved == ([0, 0, 4, 8] if every == 0.0 else [0] * 4)
        assert saved_step(tmp_path) == STEPS

    def test_refuses_to_overwrite_unless_told_to_go_on(self, tmp_path: Path) -> None:
        with pytest.raises(StoppedError):
            run(tmp_path, progress=stop_at(8), save_every_s=0.0)
        before = state_path(tmp_path, "paper").read_bytes()
        with pytest.raises(ArgumentError, match=r"'paper' at step 4 of 10; add --resume to go on") as caught:
            run(tmp_path)
        assert repr(str(tmp_path)) in str(caught.value)
        assert state_path(tmp_path, "paper").read_bytes() == before
        assert names(tmp_path) == ["training-paper.safetensors"]


@pytest.mark.usefixtures("short_blocks")
class TestTakingUpAgain:
    @pytest.mark.parametrize("at", [0, 8, 10])
    def test_gives_the_weights_of_a_run_that_never_stopped(self, at: int, tmp_path: Path) -> None:
        with pytest.raises(StoppedError):
            run(tmp_path / "stopped", progress=stop_at(at), save_every_s=0.0)
        saved = saved_step(tmp_path / "stopped")
        assert saved == max(0, {10: 8}.get(at, at - 4))
        reached: list[int] = []
        again = run(tmp_path / "stopped", resume=True, progress=lambda step, loss: reached.append(step))
        assert reached == [step for step in (0, 4, 8, 10) if step >= saved]
        assert equal(again, run(tmp_path / "whole"))
        tensors, about = load_tensors(state_path(tmp_path / "stopped", "paper"), "training")
        assert about["step"] == STEPS
        assert all(torch.equal(t, tensors[f"heads.{name}"]) for name, t in again.tensors.items())

    def test_a_kill_before_the_weights_costs_nothing(self, tmp_path: Path) -> None:
        left = tmp_path / f".{state_path(tmp_path, 'paper').name}.x1.partial"
        left.write_bytes(b"half")
        first = run(tmp_path)
        assert not left.exists(), "what a kill left of a save is removed"
        weights_path(tmp_path, "paper").unlink()
        assert equal(run(tmp_path, resume=True), first)
        assert equal(Trained.load(weights_path(tmp_path, "paper")), first)

    def test_a_finished_training_takes_no_further_step(self, tmp_path: Path) -> None:
        first = run(tmp_path)
        before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
        again = run(tmp_path, resume=True)
        assert equal(again, first)
        assert again.provenance == first.provenance
        assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before

    def test_weights_without_a_state_are_not_trained_over(self, tmp_path: Path) -> None:
        run(tmp_path)
        state_path(tmp_path, "paper").unlink()
        for resume in (False, True):
            with pytest.raises(ArgumentError, match="holds weights of recipe 'paper' already"):
                run(tmp_path, resume=resume)

    @pytest.mark.parametrize("step", ["four", 99])
    def test_refuses_a_step_that_cannot_be(self, step: Any, tmp_path: Path) -> None:
        run(tmp_path)
        change_state(tmp_path, step=step)
        with pytest.raises(FileFormatError, match="does not fit this version of the training"):
            run(tmp_path, resume=True)

    def test_refuses_a_state_of_another_training(self, tmp_path: Path) -> None:
        run(tmp_path)
        before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
        with pytest.raises(ArgumentError, match=r"begun with seeds \[3, 0\] and now got \[3, 1\]"):
            run(tmp_path, resume=True, seeds=(3, 1))
        with pytest.raises(ArgumentError, match="begun with steps 10 and now got 12"):
            run(tmp_path, resume=True, steps=12)
        assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
        change_state(tmp_path, device="cuda")
        with pytest.raises(ArgumentError, match="begun with device cuda and now got"):
            run(tmp_path, resume=True)

    def test_refuses_what_is_no_state(self, tmp_path: Path) -> None:
        trained = run(tmp_path)
        about = load_tensors(state_path(tmp_path, "paper"), "training")[1]
        trained.save(state_path(tmp_path, "paper"))
        with pytest.raises(FileFormatError, match="holds 'single-heads'"):
            run(tmp_path, resume=True)
        state_path(tmp_path, "paper").write_bytes(b"half a fi")
        with pytest.raises(FileFormatError, match="damaged"):
            run(tmp_path, resume=True)
        save_tensors(state_path(tmp_path, "paper"), "training", {}, about)
        with pytest.raises(FileFormatError, match="does not fit this version of the training"):
            run(tmp_path, resume=True)


# A training in a process of its own. Each line read says how many blocks may be done before it stops and waits to be
# killed, and in which folder; a fork trains there, so that a kill costs no further import of torch.
_TRAINER = """
import os, sys, time
print("started", flush=True)
import torch
from dataclasses import replace
from pathlib import Path
from sharpmax.experiments import stacked_training
from sharpmax.experiments.reproduce import training as run, training
from sharpmax.experiments.stacked_training import RECIPES

torch.set_num_threads(1)
stacked_training.BLOCK, run._SHOW_EVERY_S = 10, 0.0
cpu, recipe = torch.device("cpu"), replace(RECIPES["paper"], batch=2)

def go(folder, limit):
    done, parent, real = -1, os.getppid(), os.fsync

    def saving(descriptor):
        print("saving", flush=True)
        real(descriptor)

    def told(recipe, step, loss):
        nonlocal done
        done += 1
        print("at", step, flush=True)
        wait_if(done >= limit)

    def origin(seed):
        print("steps done", flush=True)
        wait_if(limit < 300)
        return {"seed": seed}

    def wait_if(told_to):
        while told_to and os.getppid() == parent:
            time.sleep(0.05)

    os.fsync, run.provenance = saving, origin
    run.train([recipe], [3], 300, cpu, Path(folder), command="x", resume=True, progress=told, save_every_s=0.0)
    print("finished", flush=True)
    os._exit(0)

if len(sys.argv) > 1:
    go(sys.argv[1], 10**9)
training.Training(recipe, [0], 1, cpu)  # loads what the optimiser loads late
print("ready", flush=True)
while line := sys.stdin.readline().strip().split(maxsplit=1):
    child = os.fork()
    if not child:
        print("child", os.getpid(), flush=True)
        go(line[1], int(line[0]))
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Trainer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def until(self, word: str) -> tuple[str, list[str]]:
        """The first line that begins with the word, and all lines up to it."""
        assert self._process.stdout is not None
        lines: list[str] = []
        for line in self._process.stdout:
            lines.append(line.strip())
            if lines[-1].startswith(word):
                return lines[-1], lines
            assert not lines[-1].startswith("ended"), lines
        raise AssertionError(f"the trainer ended with {self._process.wait()} after {lines}")

    def begin(self, folder: Path, blocks: int) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{blocks} {folder}\n")
        self._process.stdin.flush()
        return int(self.until("child")[0].split()[1])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", _TRAINER, *arguments]


@contextmanager
def trainer() -> Iterator[Trainer]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Trainer(process)
        except BaseException:
            process.kill()  # what it has forked sees that and ends
            raise
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=1200) == 0


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork are POSIX")
def test_killed_at_random_moments_it_ends_with_the_very_same_weights(tmp_path: Path) -> None:
    chance = random.Random(0)
    folder = tmp_path / "killed"

    with trainer() as warm:  # its imports run beside the first kills
        for _ in range(1):  # in the middle of imports, or in the first steps
            with subprocess.Popen(command(str(folder)), stdout=subprocess.PIPE, text=True) as cold:
                time.sleep(chance.uniform(0.1, 0.6))
                cold.kill()
                assert cold.wait() == -signal.SIGKILL
        warm.until("ready")

        warm.begin(tmp_path / "whole", 10**9)
        began = time.monotonic()
        ended, lines = warm.until("ended")
        assert ended == "ended 0"
        assert lines[-2] == "finished"
        block_s = (time.monotonic() - began) / 30

        reached = [saved_step(folder)]
        for kill in range(4):
            child = warm.begin(folder, 4)
            # Half of the kills come in a block, the others as a state is being written.
            for _ in range(chance.randint(1, 3)):
                warm.until("saving" if kill % 2 else "at")
            time.sleep(chance.uniform(0.0, 0.1 if kill % 2 else 1.0) * block_s)
            os.kill(child, signal.SIGKILL)
            assert warm.until("ended")[0] == f"ended {-signal.SIGKILL}"
            reached.append(saved_step(folder))  # what is there can be read, whenever the kill came
        assert reached == sorted(reached)
        assert 0 < reached[-1] < 300

        # Between the last step and the weights' file.
        child = warm.begin(folder, 299)
        warm.until("steps done")
        os.kill(child, signal.SIGKILL)
        assert warm.until("ended")[0] == f"ended {-signal.SIGKILL}"
        assert saved_step(folder) == 300
        assert not weights_path(folder, "paper").exists()

        warm.begin(folder, 10**9)
        ended, lines = warm.until("ended")
        assert ended == "ended 0"
        assert [line for line in lines if line.startswith("at")] == ["at 300"]

    whole, killed = (Trained.load(weights_path(tmp_path / name, "paper")) for name in ("whole", "killed"))
    assert equal(whole, killed)
    # A kill in the middle of writing leaves a part under a name that no reader takes for a file.
    for name in names(folder):
        assert re.fullmatch(r"(training|weights)-paper\.safetensors|\..*\.partial", name)


@pytest.mark.usefixtures("short_blocks")
class TestSeveralRecipes:
    OTHER = replace(RECIPE, name="sharp", l2=0.0)

    def test_side_by_side_are_trained_as_if_alone(self, tmp_path: Path) -> None:
        told: list[tuple[str, int]] = []
        both = train(
            [RECIPE, self.OTHER],
            (3, 0),
            STEPS,
            CPU,
            tmp_path / "both",
            command="sharpmax test",
            progress=lambda recipe, step, loss: told.append((recipe, step)),
        )
        assert [trained.recipe for trained in both] == ["paper", "sharp"]
        assert equal(both[0], run(tmp_path / "paper"))
        assert equal(both[1], run(tmp_path / "sharp", recipe=self.OTHER))
        assert {("paper", STEPS), ("sharp", STEPS)} <= set(told)

    def test_an_interrupt_stops_all_of_them(self, tmp_path: Path) -> None:
        def interrupted(recipe: str, step: int, loss: float) -> None:
            if recipe == "paper":
                raise KeyboardInterrupt

        threads = torch.get_num_threads()
        with pytest.raises(KeyboardInterrupt):
            train([RECIPE, self.OTHER], (3, 0), 10**9, CPU, tmp_path, command="sharpmax test", progress=interrupted)
        assert torch.get_num_threads() == threads
