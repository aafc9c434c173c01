"""Training: its step, the files it writes, and that a killed training resumes with the same result."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments.stacked_training import RECIPES, Recipe, Training, state_path, train, weights_path
from sharpmax.models.stacked import SingleHeads
from sharpmax.models.weights import Trained, load_tensors, save_tensors
from sharpmax.tasks.sized import draw, seeded
from tests.models.plain_head import PlainHead
from tests.numerics import worst

CPU = torch.device("cpu")


@pytest.fixture(params=list(RECIPES))
def small_recipe(request: pytest.FixtureRequest) -> Recipe:
    """Each recipe with a small batch."""
    return replace(RECIPES[request.param], batch=4)


def test_resumed_from_any_block_is_bit_identical(small_recipe: Recipe, short_blocks: int) -> None:
    whole = Training(small_recipe, (3, 0), 10, CPU)
    saved = []
    while whole.step < 10:
        saved.append((whole.step, whole.state()))
        whole.next_block()
    # The last block is shorter.
    assert [step for step, _ in saved] == [0, 4, 8]
    wanted = whole.state()
    for step, state in saved:
        again = Training(small_recipe, (3, 0), 10, CPU)
        again.restore(state, step)
        while again.step < 10:
            again.next_block()
        got = again.state()
        assert got.keys() == wanted.keys()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in got.items()), step


def test_a_seed_trains_alike_alone_and_in_a_stack(small_recipe: Recipe, short_blocks: int) -> None:
    # Without the warm-up of 1,000 steps, in which weights hardly change.
    recipe = replace(small_recipe, warmup=0)
    stack, alone = Training(recipe, (5, 3, 8), 8, CPU), Training(recipe, (3,), 8, CPU)
    while alone.step < 8:
        assert worst(stack.next_block()[1:2], alone.next_block()) < 1e-5
    initial = SingleHeads.initial((3,)).state_dict()
    for name, tensor in alone.heads().items():
        moved = worst(tensor, initial[name])
        assert moved > 1e-3, name
        # Adam divides by the gradient's own size, so the rounding of a tiny gradient changes a weight visibly.
        error = (stack.heads()[name][1:2] - tensor).abs()
        assert float(error.mean()) < 1e-3 * moved, name


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_a_step_is_that_of_adam_with_an_l2_penalty(l2: float, short_blocks: int) -> None:
    recipe = replace(RECIPES["paper"], l2=l2, batch=8)
    training = Training(recipe, (3,), 3, CPU)
    training.next_block()
    tensors = {name: t.clone().requires_grad_() for name, t in SingleHeads.initial((3,)).state_dict().items()}
    adam = torch.optim.Adam(tensors.values(), lr=1e-3)
    sets = draw((short_blocks, recipe.batch), recipe.sizes, seeded(CPU, 3, 0))
    for step in range(3):
        inputs = sets.items[step], sets.query[step], sets.visible[step]
        scores = PlainHead(tensors, 0, torch.float32).scores(*inputs)
        penalty = 0.5 * l2 * sum((tensor**2).sum() for tensor in tensors.values())
        adam.zero_grad()
        (F.cross_entropy(scores, sets.answer[step]) + penalty).backward()
        adam.step()
    state = training.state()
    for name, tensor in tensors.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            want = adam.state[tensor][kind]
            assert worst(state[f"{kind}.{name}"], want) <= 1e-4 * float(want.abs().max()), (kind, name)
        # Where a gradient is nothing but rounding, Adam makes a full step in either direction.
        clear = adam.state[tensor]["exp_avg_sq"].sqrt() > 1e-6
        assert clear.float().mean() > 0.5, name
        assert worst(state[f"heads.{name}"][clear], tensor[clear]) < 1e-5, name
        assert int(state[f"step.{name}"]) == 3


RECIPE = replace(RECIPES["paper"], batch=2)
OTHER = replace(RECIPE, name="sharp", l2=0.0)
STEPS = 10


def run(folder: Path, seeds: tuple[int, ...] = (3, 0), progress: Any = lambda step, loss: None, **more: Any) -> Trained:
    def reported(recipe: str, step: int, loss: float) -> None:
        progress(step, loss)

    (trained,) = train([RECIPE], seeds, STEPS, CPU, folder, command="sharpmax test", progress=reported, **more)
    return trained


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def equal(a: Trained, b: Trained) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(t, b.tensors[n]) for n, t in a.tensors.items())


@pytest.mark.usefixtures("short_blocks")
def test_writes_weights_and_state(tmp_path: Path) -> None:
    # A second recipe changes nothing.
    both = train([RECIPE, OTHER], (3, 0), STEPS, CPU, tmp_path / "both", command="sharpmax test")
    seen: list[tuple[int, float]] = []
    trained = run(tmp_path / "new", progress=lambda step, loss: seen.append((step, loss)))
    assert sorted(contents(tmp_path / "new")) == ["training-paper.safetensors", "weights-paper.safetensors"]
    assert [step for step, _ in seen] == [0, 4, 8, 10]
    assert all(0.0 < loss < 10.0 for _, loss in seen[1:])
    assert (trained.recipe, trained.steps, trained.seeds) == ("paper", STEPS, (3, 0))
    assert {"commit", "seed", "command", "seconds"} <= trained.provenance.keys()
    loaded = Trained.load(weights_path(tmp_path / "new", "paper"))
    assert loaded.provenance == trained.provenance
    assert equal(loaded, trained)
    assert equal(both[0], trained)
    assert not equal(both[1], trained)


@pytest.mark.usefixtures("short_blocks")
def test_a_stopped_training_resumes_from_its_last_state(tmp_path: Path) -> None:
    def stop(step: int, loss: float) -> None:
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, progress=stop, save_every_s=0.0)
    before = contents(tmp_path)
    with pytest.raises(ArgumentError, match="'paper' at step 4 of 10; add --resume to go on"):
        run(tmp_path)
    assert contents(tmp_path) == before
    reached: list[int] = []
    run(tmp_path, resume=True, progress=lambda step, loss: reached.append(step))
    assert reached == [4, 8, 10]


@pytest.mark.usefixtures("short_blocks")
def test_a_finished_training_is_not_continued(tmp_path: Path) -> None:
    left = tmp_path / f".{state_path(tmp_path, 'paper').name}.x1.partial"
    left.write_bytes(b"half")
    first = run(tmp_path)
    assert not left.exists(), "half-written files of a killed run are removed"
    before = contents(tmp_path)
    again = run(tmp_path, resume=True)
    assert equal(again, first)
    assert again.provenance == first.provenance
    assert contents(tmp_path) == before
    weights_path(tmp_path, "paper").unlink()  # as after a kill between the last state and the weights
    assert equal(run(tmp_path, resume=True), first)
    with pytest.raises(ArgumentError, match=r"begun with seeds \[3, 0\] and now got \[3, 1\]"):
        run(tmp_path, resume=True, seeds=(3, 1))
    state_path(tmp_path, "paper").unlink()
    with pytest.raises(ArgumentError, match="holds weights of recipe 'paper' already"):
        run(tmp_path, resume=True)


@pytest.mark.usefixtures("short_blocks")
def test_invalid_states_are_rejected(tmp_path: Path) -> None:
    trained, file = run(tmp_path), state_path(tmp_path, "paper")
    tensors, about = load_tensors(file, "training")
    for harmed in (({}, about), (tensors, about | {"step": "four"}), (tensors, about | {"step": 99})):
        save_tensors(file, "training", *harmed)
        with pytest.raises(FileFormatError, match="does not fit this version of the training"):
            run(tmp_path, resume=True)
    trained.save(file)
    with pytest.raises(FileFormatError, match="holds single-heads"):
        run(tmp_path, resume=True)
    file.write_bytes(b"half a fi")
    with pytest.raises(FileFormatError, match="damaged"):
        run(tmp_path, resume=True)


# Training runs in forks, so that torch is imported once. Each input line has a folder and the number of saves after
# which the fork kills itself, in the middle of writing a state or the weights.
_TRAINER = """
import os, signal, sys, torch
from dataclasses import replace
from pathlib import Path
from sharpmax.experiments import stacked_training as training
torch.set_num_threads(1)
training.BLOCK, training._SHOW_EVERY_S = 10, 0.0
recipe, cpu, real = replace(training.RECIPES["paper"], batch=2), torch.device("cpu"), os.fsync
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
def test_a_training_killed_several_times_ends_with_the_same_weights(tmp_path: Path) -> None:
    lines = [f"{tmp_path}/whole 99\n", *(f"{tmp_path}/killed {limit}\n" for limit in (0, 1, 0, 2, 3, 99))]
    done = subprocess.run(
        [sys.executable, "-c", _TRAINER], input="".join(lines), capture_output=True, text=True, check=True
    )
    assert [int(line) for line in done.stdout.split()] == [0, *[-signal.SIGKILL] * 5, 0]
    whole, killed = (Trained.load(weights_path(tmp_path / name, "paper")) for name in ("whole", "killed"))
    assert equal(whole, killed)
    # Half-written files have names that no reader opens.
    for name in contents(tmp_path / "killed"):
        assert re.fullmatch(r"(training|weights)-paper\.safetensors|\..*\.partial", name)
