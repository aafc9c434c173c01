"""`sharpmax calibrate`, on a tiny model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.calibration import calibrate as calibration
from sharpmax.calibration import data as profiles
from sharpmax.calibration.budget import TrainingSetup
from sharpmax.calibration.trainer import Trainer
from sharpmax.integrations import transformers as hf
from tests.calibration.small import profile
from tests.cli.lines import names_no_folder, saved
from tests.experiments.evaluate import tiny

QUICK = ("--budget", "0.05", "--lr", 0.1, "--kinds", "constant,rows", "--steps", 5, "--sizes", "4..8")


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles small enough for the tiny model."""
    monkeypatch.setattr(profiles, "PROFILES", {"small": profile(), "full": profile()})


def words(home: Path, out: Path, *more: Any) -> list[Any]:
    files = ("--task", home / "letters.py", "--text", f"words={home / 'text.txt'}", "--out", out)
    return ["calibrate", home / "model", *files, *QUICK, *more]


def interrupted(step: int) -> Any:
    """A training step that the user stops at this step of the second kind."""
    plain = Trainer._take_step

    def take(self: Trainer, setup: TrainingSetup) -> None:
        if self.step == step and self.policy.kind == "rows":
            raise KeyboardInterrupt
        plain(self, setup)

    return take


def test_a_run_leaves_policies_results_figures_and_page(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "out"
    outcome = sharpmax_command.ok(*words(home, out))
    names = {file.name for file in out.iterdir()}
    assert {"policy.json", "policy-constant.json", "policy-rows.json", "results.json", "report.html"} <= names
    assert not any(name.startswith("state") or name.endswith(".partial") for name in names)
    tables = saved(out)["tables"]
    assert saved(out)["command"].startswith("sharpmax calibrate model --task letters.py --kinds constant,rows ")
    assert tables["setting"]["model"] == "model"
    for words_printed in ("Policies", "accuracy %", "Heads modified: "):
        assert words_printed in outcome.out
    assert names_no_folder(out, home, tmp_path)
    assert "letters" in (out / "report.html").read_text(encoding="utf-8")
    # What is saved is what was chosen, and can be applied.
    assert sm.load_policy(out / "policy.json") == sm.load_policy(out / f"policy-{tables['chosen']}.json")
    model = tiny.model()
    plain = model(input_ids=torch.arange(50)[None]).logits
    with hf.applied(model, out / "policy.json"):
        assert (model(input_ids=torch.arange(50)[None]).logits - plain).abs().max() > 1e-4


def test_foldable_learns_constants_alone(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    line = words(home, tmp_path, "--steps", 2, "--sizes", "4", "--foldable", "--keep", "50%", "--no-draw")
    at = line.index("--kinds")
    sharpmax_command.ok(*line[:at], *line[at + 2 :])
    assert {file.name for file in tmp_path.iterdir()} == {"policy.json", "policy-constant.json", "results.json"}
    heads = [one for layer in sm.load_policy(tmp_path / "policy.json").to_dict()["policies"] for one in layer]
    assert {one["kind"] for one in heads} == {"constant"}
    assert sum(one["value"] != 1.0 for one in heads) == 4


def test_an_interrupted_run_is_resumed(
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
