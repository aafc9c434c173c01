"""`sharpmax calibrate`, on a tiny model in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.calibration import calibrate as calibration
from sharpmax.calibration import data as profiles
from sharpmax.calibration.trainer import Trainer, TrainingSetup
from sharpmax.cli.options import share_from
from sharpmax.errors import ArgumentError
from sharpmax.integrations import transformers as hf
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.calibration.small import profile
from tests.experiments.evaluate import tiny

QUICK = ("--budget", "0.05", "--lr", 0.1, "--kinds", "constant,rows", "--steps", 5, "--sizes", "4..8")


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """With texts that cannot be used."""
    (home / "empty.txt").write_text(" \n")
    (home / "short.txt").write_text("Only a few words.")
    (home / "binary.txt").write_bytes(bytes(range(256)))
    return home


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiles read as little as the tiny model can."""
    monkeypatch.setattr(profiles, "PROFILES", {"small": profile(), "full": profile(steps=9)})


def words(home: Path, out: Path, *more: Any) -> list[Any]:
    files = ("--task", home / "letters.py", "--text", f"words={home / 'text.txt'}", "--out", out)
    return ["calibrate", home / "model", *files, *QUICK, *more]


def poisoned(step: int) -> Any:
    """Steps of a model that holds a NaN from one of them on."""
    plain = Trainer._take_step

    def take(self: Trainer, setup: TrainingSetup) -> None:
        if self.step == step:
            weights: Any = setup.model
            weights.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
        plain(self, setup)

    return take


def interrupted(step: int) -> Any:
    """Steps of which one of the second kind is stopped by the user."""
    plain = Trainer._take_step

    def take(self: Trainer, setup: TrainingSetup) -> None:
        if self.step == step and self.policy.kind == "rows":
            raise KeyboardInterrupt
        plain(self, setup)

    return take


def test_a_run_leaves_policies_results_figures_and_page(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    """What is written, printed and said, and nothing of the machine in it."""
    out = tmp_path / "out"
    outcome = sharpmax_command(*words(home, out))
    # In a pipe there is no progress.
    assert (outcome.code, outcome.err) == (0, "")
    names = {file.name for file in out.iterdir()}
    assert {"policy.json", "policy-constant.json", "policy-rows.json", "results.json", "report.html"} <= names
    assert not any(name.startswith("state") or name.endswith(".partial") for name in names)
    saved = json.loads((out / "results.json").read_text(encoding="utf-8"))
    tables = saved["tables"]
    assert saved["command"].startswith("sharpmax calibrate model --task letters.py --kinds constant,rows ")
    assert tables["setting"]["model"] == "model"
    for said in ("Policies", "accuracy (%)", "n = 8"):
        assert said in outcome.out
    for name in names:
        assert str(home).encode() not in (out / name).read_bytes(), name
        assert str(tmp_path).encode() not in (out / name).read_bytes(), name
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "letters" in page
    assert "vegaEmbed" in page
    # What is saved is what was chosen, and can be applied.
    assert sm.load_policy(out / "policy.json") == sm.load_policy(out / f"policy-{tables['chosen']}.json")
    constants = sm.load_policy(out / "policy-constant.json")
    assert isinstance(constants, PerHead)
    assert {type(one) for layer in constants.policies for one in layer} == {Constant}
    model = tiny.model()
    plain = model(input_ids=torch.arange(50)[None]).logits
    with hf.applied(model, out / "policy.json"):
        assert (model(input_ids=torch.arange(50)[None]).logits - plain).abs().max() > 1e-4


def test_foldable_learns_constants_alone(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    line = [
        "calibrate",
        home / "model",
        "--task",
        home / "letters.py",
        "--text",
        f"words={home / 'text.txt'}",
        "--out",
        tmp_path,
    ]
    more = ("--budget", "0.05", "--steps", 2, "--sizes", "4", "--foldable", "--keep", "50%", "--no-draw")
    sharpmax_command.ok(*line, *more)
    assert {file.name for file in tmp_path.iterdir()} == {"policy.json", "policy-constant.json", "results.json"}
    policy: Any = sm.load_policy(tmp_path / "policy.json")
    assert sum(one != Constant(1.0) for layer in policy.policies for one in layer) == 4
    tables = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["tables"]
    assert (tables["setting"]["steps"], tables["setting"]["sizes"]) == (2, [4])


def test_an_interrupted_run_is_taken_up(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", -1.0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    sharpmax_command.ok(*words(home, whole, "--no-draw"))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_take_step", interrupted(3))
        stopped = sharpmax_command(*words(home, parts, "--no-draw"))
    assert stopped.code == 130
    assert "--resume" in stopped.out
    states = {"state-constant.safetensors", "state-rows.safetensors"}
    assert {file.name for file in parts.iterdir()} == states
    assert "other settings" in sharpmax_command.refused(*words(home, parts, "--no-draw", "--resume", "--seed", 1))
    assert {file.name for file in parts.iterdir()} == states
    sharpmax_command.ok(*words(home, parts, "--no-draw", "--resume"))
    for name in ("policy.json", "policy-constant.json", "policy-rows.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert {file.name for file in parts.iterdir()} == {file.name for file in whole.iterdir()}


def test_a_damaged_state_is_one_line(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    (tmp_path / "state-constant.safetensors").write_bytes(b"\x00" * 99)
    sharpmax_command.refused(*words(home, tmp_path, "--resume"))
    assert [file.name for file in tmp_path.iterdir()] == ["state-constant.safetensors"]


@pytest.mark.parametrize("there", [False, True])
def test_a_budget_that_cannot_be_met_leaves_nothing(
    there: bool, home: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    if there:
        (tmp_path / "out").mkdir()
    assert "budget: no policy of kind constant, rows stays within 1e-09 nats" in sharpmax_command.refused(
        *words(home, tmp_path / "out", "--budget", "0.000000001", "--steps", 3)
    )
    assert (tmp_path / "out").exists() == there
    assert not there or list((tmp_path / "out").iterdir()) == []


def test_a_loss_that_is_not_a_number_leaves_nothing(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", -1.0)
    monkeypatch.setattr(Trainer, "_take_step", poisoned(2))
    assert "the loss of kind 'constant' is not a number at step 3" in sharpmax_command.refused(
        *words(home, tmp_path / "out")
    )
    assert not (tmp_path / "out").exists()


def test_shares() -> None:
    assert share_from("--keep", " 100% ") == 1.0
    assert share_from("--keep", "0.75") == 0.75
    assert share_from("--budget", "1e-3") == 0.001
    for bare, means in (("1", "1% or 0.01"), ("1.0", "1.0% or 0.01"), ("5", "5% or 0.05"), ("100", "100% or 1")):
        with pytest.raises(ArgumentError, match=f"^--keep: got {bare}; write {means}$"):
            share_from("--keep", bare)
    for bad in ("", "%", "0%", "-0.1", "nan", "inf", "1%%", "1%x", "1,5%", "٪"):
        with pytest.raises(ArgumentError, match=r"--keep: got .*; allowed: a share above 0 and up to 100%"):
            share_from("--keep", bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fold", "sharper.gguf"), "--fold: got 'sharper.gguf'; allowed: a GGUF file as MODEL; fold a folder with"),
        (("--text", "book.txt"), "--text: got 'book.txt'; allowed: NAME=FILE, as prose=book.txt"),
        (("--text", "book=nowhere.txt"), "text: got 'nowhere.txt'"),
        (("--memory", "16"), "--memory: got '16'; allowed: a number and G or M, as 16G"),
        (("--memory", "1M"), "memory: got 0.0G; allowed: at least"),
        (("--task", "training,nonsense"), "task: got 'nonsense'"),
    ],
)
def test_mistakes(options: tuple[str, ...], message: str, home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    assert message in sharpmax_command.refused("calibrate", home / "model", "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_folded_only_into_a_new_one_and_from_constants(tmp_path: Path, sharpmax_command: Any) -> None:
    model, there = tmp_path / "model.gguf", tmp_path / "there.gguf"
    for file in (model, there):
        file.write_bytes(b"GGUF")
    refused = sharpmax_command.refused("calibrate", model, "--fold", there, "--out", tmp_path / "out")
    assert "--fold: got" in refused
    assert "a new file that ends in .gguf" in refused
    kinds = ("--kinds", "rows", "--fold", tmp_path / "new.gguf")
    assert "allowed: frequency or constant among --kinds" in sharpmax_command.refused("calibrate", model, *kinds)
    assert there.read_bytes() == model.read_bytes() == b"GGUF"
