"""`sharpmax reproduce` and `sharpmax report`, on small runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import sharpmax as sm
from sharpmax.models.weights import Trained
from tests.cli.lines import names_no_folder, saved

SMALL = ("--seeds", 2, "--samples", 8, "--sizes", "16,1024,4096")
TINY = ("--recipe", "paper", "--seeds", 1, "--samples", 4, "--sizes", "16,32", "--no-draw")
TRAIN = ("--train", "--recipe", "sharp", "--steps", 20, "--seeds", 2, "--samples", 4, "--sizes", 16, "--no-draw")


def test_a_run_leaves_results_policies_figures_and_page(tmp_path: Path, sharpmax_command: Any) -> None:
    run = tmp_path / "run"
    sharpmax_command.ok("reproduce", "--out", run, *SMALL)
    names = {file.name for file in run.iterdir()}
    assert {"results.json", "report.html", "policy-refit.json"} <= names
    assert {"accuracy.svg", "heat.png", "fit.svg", "accuracy-sharp.svg", "heat-sharp.png"} <= names
    assert sm.load_policy(run / "policy-refit.json").kind == "polynomial"
    assert not [name for name in names if name.startswith(".")], "something half-written was left behind"
    results = saved(run)
    assert results["tables"]["accuracy"]["softmax"]["1024"]["n"] == 2
    assert results["tables"]["setting"]["samples"] == 8
    assert results["tables"]["weights"]["sharp"]["trained"]["commit"]
    assert results["command"].startswith("sharpmax reproduce --recipe both --sizes 16,1024,4096 ")
    assert names_no_folder(run, tmp_path, Path(__file__).parents[2])


def test_the_table_is_printed_beside_the_published_numbers(sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command.ok("reproduce", "--out", tmp_path, *TINY)
    assert "published" in outcome.out
    row = next(line for line in outcome.out.splitlines() if line.strip().startswith("softmax, published"))
    assert row.split()[-2:] == ["98.6", "97.1"]
    assert "Left out of the paper's recipe: refit, because" in outcome.out
    assert not any(line.endswith(" ") for line in outcome.out.splitlines())
    assert (tmp_path / "results.json").exists()


def test_a_training_can_be_tested_again_and_resumed_but_not_overwritten(sharpmax_command: Any, tmp_path: Path) -> None:
    out, again = tmp_path / "a", tmp_path / "b"
    assert "2 × 20 steps" in sharpmax_command.ok("reproduce", "--out", out, *TRAIN).out
    weights = out / "weights-sharp.safetensors"
    trained = Trained.load(weights)
    assert (trained.steps, trained.seeds, trained.recipe) == (20, (0, 1), "sharp")
    for path in (weights, out):
        sharpmax_command.ok("reproduce", "--out", again, "--recipe", "sharp", *TRAIN[5:], "--weights", path)
        assert saved(again)["tables"]["accuracy/sharp"] == saved(out)["tables"]["accuracy/sharp"]
    assert "--resume" in sharpmax_command.refused("reproduce", "--out", out, *TRAIN)
    sharpmax_command.ok("reproduce", "--out", out, *TRAIN, "--resume")
    resumed = Trained.load(weights).tensors
    assert all(torch.equal(resumed[name], one) for name, one in trained.tensors.items())
    other = [25 if word == 20 else word for word in TRAIN]
    assert "steps 20 and now got 25" in sharpmax_command.refused("reproduce", "--out", out, *other, "--resume")
