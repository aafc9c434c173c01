"""`sharpmax reproduce` and `sharpmax report`, on small runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sharpmax as sm
from sharpmax.models.weights import Trained, shipped_path
from tests.cli.lines import is_one_error_line

SMALL = ("--seeds", 2, "--samples", 8, "--sizes", "16,1024,4096")
TINY = ("--recipe", "paper", "--seeds", 1, "--samples", 4, "--sizes", "16,32", "--no-draw")
TRAIN = ("--train", "--recipe", "sharp", "--steps", 150, "--seeds", 2, "--samples", 4, "--sizes", 16, "--no-draw")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One drawn run of both recipes, shared by the tests that only look at it."""
    from sharpmax.cli import main

    folder = tmp_path_factory.mktemp("run")
    assert main(["reproduce", "--out", str(folder), *map(str, SMALL)]) == 0
    return folder


def test_a_run_leaves_results_policies_figures_and_page(run: Path) -> None:
    names = {file.name for file in run.iterdir()}
    assert {"results.json", "report.html", "policy-refit.json"} <= names
    for figure in ("accuracy", "heat", "focus", "fit", "detection"):
        assert {f"{figure}.svg", f"{figure}.png"} <= names
    assert {"accuracy-sharp.svg", "focus-sharp.png"} <= names
    assert sm.load_policy(run / "policy-refit.json").kind == "polynomial"
    assert not [name for name in names if name.startswith(".")], "something half-written was left behind"


def test_results_hold_every_arm_and_where_they_come_from(run: Path) -> None:
    saved = json.loads((run / "results.json").read_text(encoding="utf-8"))
    arms = ["softmax", "paper", "refit", "log-length", "entropy-target", "hard"]
    assert list(saved["tables"]["accuracy"]) == arms
    assert saved["tables"]["accuracy"]["softmax"]["1024"]["n"] == 2
    assert saved["tables"]["setting"]["samples"] == 8
    assert saved["tables"]["weights"]["sharp"]["trained"]["commit"]
    assert saved["command"].startswith("sharpmax reproduce --out ")
    assert "--sizes 16,1024,4096" in saved["command"]


def test_nothing_of_the_machine_is_saved(run: Path) -> None:
    for file in run.iterdir():
        content = file.read_bytes()
        assert str(run.parent).encode() not in content, file.name
        assert str(Path(__file__).parents[2]).encode() not in content, file.name


def test_report_draws_again_from_the_results_alone(run: Path, sharpmax_command: Any, tmp_path: Path) -> None:
    shutil.copy(run / "results.json", tmp_path)
    outcome = sharpmax_command("report", tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (run / file.name).read_bytes(), file.name
    assert outcome.out.rstrip().endswith("report.html")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "newer sharpmax"),
        ({"tables": {}}, "nothing to report"),
        ({"tables": {"accuracy": {}, "setting": {}}}, "results:"),
    ],
)
def test_report_of_something_else(
    change: dict[str, Any], says: str, run: Path, sharpmax_command: Any, tmp_path: Path
) -> None:
    saved = json.loads((run / "results.json").read_text(encoding="utf-8")) | change
    (tmp_path / "results.json").write_text(json.dumps(saved), encoding="utf-8")
    outcome = sharpmax_command("report", tmp_path)
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert says in outcome.err


def test_the_table_is_printed_beside_the_published_numbers(sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command("reproduce", "--out", tmp_path, *TINY)
    assert (outcome.code, outcome.err) == (0, "")
    assert "softmax, published" in outcome.out
    row = next(line for line in outcome.out.splitlines() if line.split()[:1] == ["32"])
    assert " 97.1" in row
    assert "left out: refit" in outcome.out
    assert not any(line.endswith(" ") for line in outcome.out.splitlines())
    assert (tmp_path / "results.json").exists()


def test_training_writes_weights_that_can_be_tested_again(sharpmax_command: Any, tmp_path: Path) -> None:
    first = sharpmax_command("reproduce", "--out", tmp_path / "a", *TRAIN)
    assert (first.code, first.err) == (0, "")
    assert "150 steps" in first.out
    weights = tmp_path / "a" / "weights-sharp.safetensors"
    trained = Trained.load(weights)
    assert (trained.steps, trained.seeds, trained.recipe) == (150, (0, 1), "sharp")

    def accuracy(folder: str) -> Any:
        saved = json.loads((tmp_path / folder / "results.json").read_text(encoding="utf-8"))
        return saved["tables"]["accuracy/sharp"]

    for path in (weights, weights.parent):
        words = ("--recipe", "sharp", *TRAIN[5:], "--weights", path)
        outcome = sharpmax_command("reproduce", "--out", tmp_path / "b", *[w for w in words if w != 150])
        assert (outcome.code, outcome.err) == (0, "")
        assert accuracy("b") == accuracy("a")


def test_a_training_is_never_overwritten_and_goes_on_with_resume(sharpmax_command: Any, tmp_path: Path) -> None:
    assert sharpmax_command("reproduce", "--out", tmp_path, *TRAIN).code == 0
    before = (tmp_path / "weights-sharp.safetensors").read_bytes()
    again = sharpmax_command("reproduce", "--out", tmp_path, *TRAIN)
    assert again.code == 2
    assert is_one_error_line(again.err)
    assert "--resume" in again.err
    assert sharpmax_command("reproduce", "--out", tmp_path, *TRAIN, "--resume").code == 0
    loaded = Trained.load(tmp_path / "weights-sharp.safetensors").tensors
    (tmp_path / "old.safetensors").write_bytes(before)
    old = Trained.load(tmp_path / "old.safetensors").tensors
    assert all(torch.equal(loaded[name], old[name]) for name in old)
    other = [200 if word == 150 else word for word in TRAIN]
    refused = sharpmax_command("reproduce", "--out", tmp_path, *other, "--resume")
    assert refused.code == 2
    assert "steps 150 and now got 200" in refused.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recipe", "bread"], "--recipe: got 'bread'; allowed: paper, sharp, both"),
        (["--seeds", "0"], "--seeds: got 0"),
        (["--seeds", "11"], "seeds: got 11; allowed: 1 … 10"),
        (["--samples", "-3"], "--samples: got -3"),
        (["--steps", "0", "--train"], "--steps: got 0"),
        (["--steps", "500"], "add --train"),
        (["--sizes", "0"], "--sizes: got '0'"),
        (["--sizes", "16,-4"], "--sizes: got '16,-4'"),
        (["--sizes", "16,,32"], "--sizes"),
        (["--sizes", "sixteen"], "--sizes"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--weights", "nowhere"], "weights: no file"),
        (["--weights", "x", "--train"], "--weights"),
        (["--seed", "-1"], "seed: got -1"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_written(
    words: list[str], says: str, sharpmax_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = sharpmax_command("reproduce", *words)
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert says in outcome.err
    assert outcome.out == ""
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.parametrize("damage", ["cut", "noise", "foreign", "empty"])
def test_damaged_or_foreign_weights(damage: str, sharpmax_command: Any, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    good = shipped_path("paper").read_bytes()
    if damage == "foreign":
        save_file({"layer": torch.zeros(3)}, file)
    else:
        file.write_bytes({"cut": good[: len(good) // 2], "noise": b"\x07" * 4096, "empty": b""}[damage])
    outcome = sharpmax_command("reproduce", "--weights", file, "--out", tmp_path / "out", *TINY)
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert "weights.safetensors" in outcome.err
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_damaged_state_is_not_trained_over(sharpmax_command: Any, tmp_path: Path) -> None:
    (tmp_path / "training-sharp.safetensors").write_bytes(b"\x07" * 100)
    for more in ((), ("--resume",)):
        outcome = sharpmax_command("reproduce", "--out", tmp_path, *TRAIN, *more)
        assert outcome.code == 2
        assert is_one_error_line(outcome.err)
    assert (tmp_path / "training-sharp.safetensors").read_bytes() == b"\x07" * 100


def test_a_folder_that_cannot_be_written_to(sharpmax_command: Any, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    outcome = sharpmax_command("reproduce", "--out", file / "below", *TINY)
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert "--out" in outcome.err
