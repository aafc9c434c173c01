"""`sharpmax clrs`: train, evaluate and compare; processes that are really killed, and full disks."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from sharpmax.cli import main
from sharpmax.experiments.run_folder import RunStore
from sharpmax.tasks.clrs_text.generation import RELEASE
from tests.cli.lines import names_no_folder, saved
from tests.experiments.clrs import toy
from tests.processes import exit_code

pytest.importorskip("accelerate", reason="needs the extra hf")

needs_clrs = pytest.mark.skipif(
    importlib.util.find_spec("clrs") is None, reason=f"needs dm-clrs: pip install --no-deps {RELEASE}"
)
needs_kill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a system with SIGKILL")
STEPS, SAVED = 20, 8
QUICK = (
    "--steps", STEPS, "--batch-tokens", 256, "--tokens-at-once", 128, "--save-every", SAVED, "--device",
    "cpu", "--lr", 0.02,
)  # fmt: skip


@pytest.fixture(scope="module")
def data(home: Path) -> Path:
    return toy.write(home / "train.jsonl", toy.TRAIN, 12, "train")


@pytest.fixture(scope="module")
def questions(home: Path) -> Path:
    return toy.write(home / "test.jsonl", (4, 8, 90, 600), 6, "test")


def training(home: Path, out: Path, *more: Any) -> list[Any]:
    return ["clrs", "train", home / "model", "--dataset", home / "train.jsonl", "--out", out, *QUICK, *more]


@pytest.fixture(scope="module")
def models(home: Path, data: Path) -> list[Path]:
    """Two trained models that differ in their policy alone."""
    for policy in ("none", "paper"):
        line = training(home, home / f"model-{policy}", "--policy", policy)
        assert main([str(word) for word in line]) == 0
    return [home / "model-none", home / "model-paper"]


def test_train(models: list[Path], home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = models[1]
    assert {path.name for path in out.iterdir()} == {"run.json", "results.json", "model"}
    assert (out / "model" / "sharpmax_policy.json").is_file()
    tables = saved(out)["tables"]
    assert [step for step, _ in tables["curve"]] == list(range(1, STEPS + 1))
    assert tables["curve"][-1][1] < tables["curve"][0][1]
    assert tables["speed"]["tokens_per_second"] > 0
    assert saved(out)["command"].startswith("sharpmax clrs train model --policy paper --dataset train.jsonl --lr 0.02 ")
    assert names_no_folder(out, home)
    assert "--resume" in sharpmax_command.refused(*training(home, out, "--policy", "paper"))
    assert "policy" in sharpmax_command.refused(*training(home, out, "--policy", "none", "--resume"))
    printed = sharpmax_command.ok(*training(home, out, "--policy", "paper", "--resume")).out
    assert "is complete" in printed
    assert "tokens/s" in printed
    sharpmax_command.ok(*training(home, tmp_path / "small", "--sizes", 4, "--steps", 1))
    assert saved(tmp_path / "small")["tables"]["setting"]["sizes"] == {name: [4] for name in toy.ALGORITHMS}


def evaluation(models: list[Path], questions: Path, out: Path, *more: Any) -> list[Any]:
    return ["clrs", "evaluate", *models, "--dataset", questions, "--device", "cpu", "--out", out, *more]


def test_train_then_evaluate(models: list[Path], questions: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    outcome = sharpmax_command.ok(*evaluation(models, questions, tmp_path, "--sizes", "4,8"))
    tables = saved(tmp_path)["tables"]
    assert set(tables) == {
        "setting", "accuracy", "majority", "means", "gains", "by_algorithm", "gains_by_algorithm", "speed", "training",
    }  # fmt: skip
    assert list(tables["accuracy"]) == ["model-none", "model-paper"]
    assert tables["setting"]["sizes"][toy.FIRST] == {"trained": [4, 6], "examined": [4, 8]}
    assert tables["setting"]["variants"]["model-paper"]["policy"]["kind"] == "polynomial"
    assert tables["speed"]["model-none"]["tokens_per_second"] > 0
    for words in ("Accuracy of final answers (%): means over algorithms", "Accuracy at training sizes", "per second"):
        assert words in outcome.out
    lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if '"text"' in line]) == 2 * 2 * 2 * 6
    # How the models were trained is in the one file, and it alone draws the page.
    for model in models:
        trained, kept = saved(model), tables["training"][model.name]
        assert (kept["curve"], kept["speed"]) == (trained["tables"]["curve"], trained["tables"]["speed"])
        assert (kept["command"], kept["provenance"]) == (trained["command"], trained["provenance"])
    drawn = {"report.html", "accuracy.svg", "accuracy.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "results.json", "answers.jsonl", *drawn}
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tmp_path / "results.json", alone)
    sharpmax_command.ok("report", alone)
    for name in drawn:
        assert (alone / name).read_bytes() == (tmp_path / name).read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "report.html").read_bytes()


def test_sizes_that_are_too_long_are_left_out_as_a_whole(
    models: list[Path], questions: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    some = ("--algorithms", toy.LAST, "--sizes", "4,90,600", "--no-draw")
    outcome = sharpmax_command.ok(*evaluation(models, questions, tmp_path / "a", *some))
    assert "Questions that do not fit into the context were left out: quickselect of size 600." in outcome.out
    outcome = sharpmax_command.ok(*evaluation(models, questions, tmp_path / "b", *some, "--longest", 60))
    assert "Questions of more than 60 tokens were left out: quickselect of size 90 and 600." in outcome.out
    tables = saved(tmp_path / "b")["tables"]
    assert tables["setting"]["too_long"] == {toy.LAST: [90, 600]}
    assert list(tables["accuracy"]["model-none"][toy.LAST]) == ["4"]
    assert list(tables["means"]["model-none"]) == ["in"]


@needs_clrs
def test_variants_are_trained_side_by_side_and_a_resumed_comparison_does_only_what_is_missing(
    tmp_path: Path, sharpmax_command: Any
) -> None:
    out = tmp_path / "out"
    asked = ("--variants", "none,learn:ssmax", "--algorithms", "minimum", "--sizes", "4,5", "--test-sizes", "4,6")
    small = ("--per-cell", 20, "--test-per-cell", 5, "--steps", 3, "--seeds", 1, "--batch-tokens", 256)
    where = ("--tokens-at-once", 256, "--device", "cpu", "--data", tmp_path / "data")
    words = ["clrs", "compare", "scratch:1m", *asked, *small, *where]
    sharpmax_command.ok(*words, "--out", out)
    tables = saved(out)["tables"]
    assert list(tables["accuracy"]) == ["none", "learn:ssmax"]
    assert tables["setting"]["sizes"]["minimum"] == {"trained": [4, 5], "examined": [4, 6]}
    assert [one["setting"]["steps"] for one in tables["training"].values()] == [3, 3]
    examples = {one["setting"]["examples"]["fingerprint"] for one in tables["training"].values()}
    assert len(examples) == 1
    assert "Entropy of attention by size" in (out / "report.html").read_text(encoding="utf-8")
    assert "--resume" in sharpmax_command.refused(*words, "--out", out)
    weights = (out / "learn-ssmax-0" / "model" / "model.safetensors").stat().st_mtime_ns
    lines = (out / "outcomes.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 2 * len(("train", "test"))
    (out / "outcomes.jsonl").write_text("".join(lines[:-1]))
    sharpmax_command.ok(*words, "--no-draw", "--resume", "--out", out)
    assert saved(out)["tables"] == tables
    assert (out / "learn-ssmax-0" / "model" / "model.safetensors").stat().st_mtime_ns == weights


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
from sharpmax.experiments.run_folder import RunStore

added = []

def add_all(self, outcomes, really=RunStore.add_all):
    if len(added) == 3:
        with self._path.open("ab") as file:
            file.write(b'{"key": "model/')
        os.kill(os.getpid(), signal.SIGKILL)
    added.append(outcomes)
    really(self, outcomes)

RunStore.add_all = add_all
main(words)
"""


def dies(script: str, words: list[Any]) -> bool:
    """Whether a command in a process of its own is killed."""
    return exit_code(script, words=[str(word) for word in words]) == -signal.SIGKILL


@needs_kill
def test_a_training_that_was_killed_ends_as_if_nothing_had_happened(
    home: Path, data: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    def words(out: Path, *more: str) -> list[Any]:
        start = ["clrs", "train", home / "model", "--policy", "learn:length", "--dataset", data, *QUICK]
        return [*start, "--out", out, *more]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    sharpmax_command.ok(*words(whole))
    assert dies(KILLED_WITHIN_A_STATE, words(cut))
    assert {path.name for path in (cut / "states").iterdir()} == {"checkpoint-8", "checkpoint-16"}
    assert not (cut / "model").exists()
    sharpmax_command.ok(*words(cut, "--resume"))
    assert saved(cut)["tables"]["curve"] == saved(whole)["tables"]["curve"]
    for name in ("model.safetensors", "sharpmax_policy.json"):
        assert (cut / "model" / name).read_bytes() == (whole / "model" / name).read_bytes()


@needs_kill
def test_an_evaluation_that_was_killed_asks_nothing_twice(
    models: list[Path], data: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    def words(out: Path, *more: str) -> list[Any]:
        how = ["--dataset", data, "--tokens-at-once", 1000, "--device", "cpu", "--no-draw"]
        return ["clrs", "evaluate", *models, *how, "--out", out, *more]

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


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_full_disk_is_one_line_and_nothing_is_lost(
    command: str, home: Path, data: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    import transformers

    def full_disk(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    how = QUICK if command == "train" else ("--device", "cpu", "--no-draw")
    line = ["clrs", command, home / "model", "--dataset", data, *how, "--out", tmp_path / "out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunStore, "add_all", full_disk)
        patch.setattr(transformers.Trainer, "_save_optimizer_and_scheduler", full_disk)
        assert "No space left on device" in sharpmax_command.refused(*line)
    sharpmax_command.ok(*line, "--resume")
    assert (tmp_path / "out" / "results.json").is_file()
