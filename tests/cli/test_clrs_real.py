"""`sharpmax clrs` with the real CLRS-Text, processes that are really killed, and input that is really bad."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sharpmax.experiments.clrs.evaluation import AnswerStore
from sharpmax.policies.registry import load_policy
from sharpmax.tasks.clrs_text import generation as shim
from tests.cli.lines import saved
from tests.experiments.clrs import stub
from tests.experiments.evaluate import tiny
from tests.processes import exit_code

pytest.importorskip("accelerate", reason="needs the extra hf")

needs_clrs = pytest.mark.skipif(
    importlib.util.find_spec("clrs") is None, reason=f"needs dm-clrs: pip install --no-deps {shim.RELEASE}"
)
STEPS, SAVED = 20, 8
QUICK = (
    "--steps", STEPS, "--batch-tokens", 256, "--row-tokens", 128, "--tokens-at-once", 128, "--save-every", SAVED,
    "--device", "cpu", "--lr", 0.02,
)  # fmt: skip


@needs_clrs
def test_real_algorithms_from_training_to_the_page(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    asked = ("--algorithms", "minimum,bridges", "--data", tmp_path / "data", "--per-cell", 3)
    arms = [tmp_path / policy for policy in ("none", "paper")]
    for arm in arms:
        how = ("--policy", arm.name, *asked, "--cell-text", 100_000, *QUICK)
        sharpmax_command.ok("clrs", "train", home / "model", *how, "--out", arm)
    exam = tmp_path / "exam"
    sharpmax_command.ok("clrs", "evaluate", *arms, *asked, "--sizes", "4,8", "--device", "cpu", "--out", exam)
    tables = saved(exam)["tables"]
    assert tables["setting"]["sizes"]["bridges"] == {"trained": [4, 5], "examined": [4, 8]}
    assert tables["setting"]["questions"]["count"] == 12
    # Both arms learned from the same examples.
    assert len({tables["training"][arm.name]["setting"]["examples"]["fingerprint"] for arm in arms}) == 1
    page = (exam / "report.html").read_text(encoding="utf-8")
    assert "not learned by none and paper, whose numbers say little about sharpness" in page
    assert "sharpmax clrs train model --policy paper --algorithms minimum,bridges" in page


KILLED_AFTER_A_STEP = """
import os, signal
from sharpmax.cli import main
from sharpmax.experiments.clrs.training import LossCurve

def step_done(self, step, last, really=LossCurve.step_done):
    really(self, step, last)
    if step == 13:
        os.kill(os.getpid(), signal.SIGKILL)

LossCurve.step_done = step_done
main(words)
"""
KILLED_WITHIN_A_STATE = """
import os, signal
from transformers import Trainer
from sharpmax.cli import main

def save(self, folder, really=Trainer._save_optimizer_and_scheduler):
    if self.state.global_step == 16:
        os.kill(os.getpid(), signal.SIGKILL)
    really(self, folder)

Trainer._save_optimizer_and_scheduler = save
main(words)
"""
KILLED_WITHIN_AN_ANSWER = """
import os, signal
from sharpmax.cli import main
from sharpmax.experiments.clrs.evaluation import AnswerStore

added = []

def add(self, arm, said, really=AnswerStore.add):
    if len(added) == 3:
        with self._store._path.open("ab") as file:
            file.write(b'{"key": "model/')
        os.kill(os.getpid(), signal.SIGKILL)
    added.append(arm)
    really(self, arm, said)

AnswerStore.add = add
main(words)
"""


def dies(script: str, words: list[Any]) -> bool:
    """Whether a command in a process of its own is killed."""
    return exit_code(script, words=[str(word) for word in words]) == -signal.SIGKILL


@pytest.fixture(scope="module")
def data(home: Path) -> Path:
    """Examples under the name of a real algorithm."""
    made = stub.examples(stub.ALGORITHMS, (4, 6, 40), 12, "train", 0)
    return stub.write(home / "examples.jsonl", [dataclasses.replace(one, algo_name="minimum") for one in made])


def losses(out: Path) -> list[tuple[int, float]]:
    lines = (out / "curve.jsonl").read_text(encoding="utf-8").splitlines()
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a system with SIGKILL")
def test_a_training_killed_twice_ends_as_if_nothing_had_happened(
    home: Path, data: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    def words(out: Path, *more: str) -> list[Any]:
        start = ["clrs", "train", home / "model", "--policy", "paper", "--dataset", data, *QUICK]
        return [*start, "--out", out, *more]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    sharpmax_command.ok(*words(whole))
    assert dies(KILLED_AFTER_A_STEP, words(cut))
    assert [step for step, _ in losses(cut)] == list(range(1, 14))
    assert {path.name for path in (cut / "states").iterdir()} == {f"checkpoint-{SAVED}"}
    assert dies(KILLED_WITHIN_A_STATE, words(cut, "--resume"))
    assert [step for step, _ in losses(cut)] == list(range(1, 17))
    assert (cut / "states" / "checkpoint-16").is_dir()
    assert not (cut / "model").exists()
    sharpmax_command.ok(*words(cut, "--resume"))
    assert losses(cut) == losses(whole)
    assert saved(cut)["tables"]["curve"] == saved(whole)["tables"]["curve"]
    weights = [out / "model" / "model.safetensors" for out in (cut, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.fixture(scope="module")
def two(home: Path) -> list[Path]:
    """The model as it comes, and under a policy."""
    load_policy("paper").save(tiny.save(home / "sharp") / "sharpmax_policy.json")
    return [home / "model", home / "sharp"]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a system with SIGKILL")
def test_an_examination_that_was_killed_asks_nothing_twice(
    two: list[Path], data: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    def words(out: Path, *more: str) -> list[Any]:
        how = ["--dataset", data, "--batch-tokens", 1000, "--device", "cpu", "--no-draw"]
        return ["clrs", "evaluate", *two, *how, "--out", out, *more]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    sharpmax_command.ok(*words(whole))
    assert dies(KILLED_WITHIN_AN_ANSWER, words(cut))
    before, half = (cut / "answers.jsonl").read_bytes().rsplit(b"\n", 1)
    assert half
    assert not (cut / "results.json").exists()
    sharpmax_command.ok(*words(cut, "--resume"))
    after = (cut / "answers.jsonl").read_bytes()
    assert after.startswith(before + b"\n")
    keys = [entry["key"] for entry in map(json.loads, after.splitlines()) if "text" in entry["record"]]
    total = 2 * saved(cut)["tables"]["setting"]["questions"]["count"]
    assert 0 < before.count(b'"text"') < total
    assert len(keys) == len(set(keys)) == total
    for table in saved(whole)["tables"]:
        if table != "speed":
            assert saved(cut)["tables"][table] == saved(whole)["tables"][table], table


def full_disk(*arguments: Any, **options: Any) -> None:
    raise OSError(28, "No space left on device")


def full_answers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AnswerStore, "add", full_disk)


def full_states(patch: pytest.MonkeyPatch) -> None:
    import transformers

    patch.setattr(transformers.Trainer, "_save_optimizer_and_scheduler", full_disk)


@pytest.mark.parametrize(
    ("command", "fill"),
    [("train", full_states), ("evaluate", full_answers)],
)
def test_a_full_disk_is_one_line_and_nothing_is_lost(
    command: str, fill: Callable[[pytest.MonkeyPatch], None], home: Path, data: Path, tmp_path: Path,
    sharpmax_command: Any,
) -> None:  # fmt: skip
    how = QUICK if command == "train" else ("--device", "cpu", "--no-draw")
    line = ["clrs", command, home / "model", "--dataset", data, *how, "--out", tmp_path / "out"]
    with pytest.MonkeyPatch.context() as patch:
        fill(patch)
        assert "No space left on device" in sharpmax_command.refused(*line)
    sharpmax_command.ok(*line, "--resume")
    assert (tmp_path / "out" / "results.json").is_file()
