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
from sharpmax.calibration.trainer import Course, Descent
from sharpmax.cli.options import share_from
from sharpmax.cli.terminal import out_folder_if_used, steps_shown
from sharpmax.errors import ArgumentError
from sharpmax.integrations import transformers as hf
from sharpmax.policies.constant import Constant
from sharpmax.policies.per_head import PerHead
from tests.calibration.small import profile
from tests.cli.lines import is_one_error_line
from tests.experiments.evaluate import tiny

QUICK = ("--leash", "5%", "--lr", 0.1, "--kinds", "constant,rows", "--steps", 5, "--sizes", "4..8")


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
    files = ("--task", home / "letters.py", "--text", home / "text.txt", "--out", out)
    return ["calibrate", home / "model", *files, *QUICK, *more]


def poisoned(step: int) -> Any:
    """Steps of a model that holds a NaN from one of them on."""
    plain = Descent._take

    def take(self: Descent, course: Course) -> None:
        if self.step == step:
            weights: Any = course.model
            weights.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
        plain(self, course)

    return take


def interrupted(step: int) -> Any:
    """Steps of which one of the second kind is stopped by the user."""
    plain = Descent._take

    def take(self: Descent, course: Course) -> None:
        if self.step == step and self.live.kind == "rows":
            raise KeyboardInterrupt
        plain(self, course)

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
    assert saved["command"].startswith("sharpmax calibrate model --task letters.py --leash 5% ")
    assert tables["setting"]["model"] == "model"
    for said in ("model: letters, unseen prompts of size 8, leash 5%", "as it comes", "(chosen)", "rise chat, %"):
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
    line = ["calibrate", home / "model", "--task", home / "letters.py", "--text", home / "text.txt", "--out", tmp_path]
    more = ("--leash", "0.05", "--steps", 2, "--sizes", "4", "--foldable", "--keep", "50%", "--no-draw")
    outcome = sharpmax_command(*line, *more)
    assert (outcome.code, outcome.err) == (0, "")
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
    assert sharpmax_command(*words(home, whole, "--no-draw")).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Descent, "_take", interrupted(3))
        stopped = sharpmax_command(*words(home, parts, "--no-draw"))
    assert stopped.code == 130
    assert "--resume" in stopped.out
    states = {"state-constant.safetensors", "state-rows.safetensors"}
    assert {file.name for file in parts.iterdir()} == states
    other = sharpmax_command(*words(home, parts, "--no-draw", "--resume", "--seed", 1))
    assert other.code == 2
    assert is_one_error_line(other.err)
    assert "other settings" in other.err
    assert {file.name for file in parts.iterdir()} == states
    assert sharpmax_command(*words(home, parts, "--no-draw", "--resume")).code == 0
    for name in ("policy.json", "policy-constant.json", "policy-rows.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert {file.name for file in parts.iterdir()} == {file.name for file in whole.iterdir()}


def test_a_damaged_state_is_one_line(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    (tmp_path / "state-constant.safetensors").write_bytes(b"\x00" * 99)
    outcome = sharpmax_command(*words(home, tmp_path, "--resume"))
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert [file.name for file in tmp_path.iterdir()] == ["state-constant.safetensors"]


@pytest.mark.parametrize("there", [False, True])
def test_a_leash_that_cannot_be_met_leaves_nothing(
    there: bool, home: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    if there:
        (tmp_path / "out").mkdir()
    outcome = sharpmax_command(*words(home, tmp_path / "out", "--leash", "0.0000001%", "--steps", 3))
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert "leash: got 1e-07%, which no policy of kind constant, rows keeps to" in outcome.err
    assert outcome.out == ""
    assert (tmp_path / "out").exists() == there
    assert not there or list((tmp_path / "out").iterdir()) == []


def test_a_loss_that_is_not_a_number_leaves_nothing(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_SAVE_EVERY", -1.0)
    monkeypatch.setattr(Descent, "_take", poisoned(2))
    outcome = sharpmax_command(*words(home, tmp_path / "out"))
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert "the loss of kind 'constant' is not a number at step 3" in outcome.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--task", "nonsense"], "task: got 'nonsense'"),
        (["--kinds", "constant,best"], "kinds: got 'best'"),
        (["--kinds", ""], "kinds: got ''"),
        (["--foldable"], "--kinds: got 'constant,rows'; allowed: nothing together with --foldable"),
        (["--profile", "huge"], "profile: got 'huge'"),
        (["--leash", "0"], "--leash: got '0'"),
        (["--leash", "-1%"], "--leash: got '-1%'"),
        (["--leash", "abc"], "--leash: got 'abc'"),
        (["--leash", "101%"], "--leash: got '101%'"),
        (["--leash", "1"], "--leash: got 1; write 1% or 0.01"),
        (["--leash", "3.5"], "--leash: got 3.5; write 3.5% or 0.035"),
        (["--leash", "0.7"], "--leash: got 0.7; write 0.7% or 0.007"),
        (["--keep", "1"], "--keep: got 1; write 1% or 0.01"),
        (["--keep", "0"], "--keep: got '0'"),
        (["--keep-layers", "0"], "--keep-layers: got '0'"),
        (["--steps", "0"], "steps: got 0"),
        (["--lr", "0"], "rate: got 0.0"),
        (["--sizes", "4,5000"], "size: got 5000; allowed: 1 … 512"),
        (["--sizes", "8..4"], "--sizes: got '8..4'"),
        (["--text", "nowhere.txt"], "text: got 'nowhere.txt'"),
        (["--text", "{home}/empty.txt"], "is empty"),
        (["--text", "{home}/binary.txt"], "is not text in UTF-8"),
        (["--text", "{home}/short.txt"], "text: got 8 tokens; allowed: at least one window of 40 tokens"),
        (["--seed", "-1"], "seed: got -1"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--dtype", "int3"], "dtype: got 'int3'"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    more: list[str], says: str, home: Path, sharpmax_command: Any, tmp_path: Path
) -> None:
    more = [word.replace("{home}", str(home)) for word in more]
    outcome = sharpmax_command(*words(home, tmp_path / "out", *more))
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert says in outcome.err
    assert outcome.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["nowhere/at/all", "{home}"])
def test_an_unknown_model(name: str, home: Path, sharpmax_command: Any, tmp_path: Path) -> None:
    outcome = sharpmax_command("calibrate", name.format(home=home), "--out", tmp_path / "out")
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert "model: got" in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_shares() -> None:
    assert share_from("--keep", " 100% ") == 1.0
    assert share_from("--keep", "0.75") == 0.75
    assert share_from("--leash", "1e-3") == 0.001
    for bare, means in (("1", "1% or 0.01"), ("1.0", "1.0% or 0.01"), ("5", "5% or 0.05"), ("100", "100% or 1")):
        with pytest.raises(ArgumentError, match=f"^--keep: got {bare}; write {means}$"):
            share_from("--keep", bare)
    for bad in ("", "%", "0%", "-0.1", "nan", "inf", "1%%", "1%x", "1,5%", "٪"):
        with pytest.raises(ArgumentError, match=r"--keep: got .*; allowed: a share above 0 and up to 100%"):
            share_from("--keep", bad)


def test_steps_are_lines_without_a_terminal_and_a_bar_on_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def show() -> Any:
        with steps_shown() as tell:
            tell("learning rows", 3, 9, "loss 1.234")
            tell("measuring rows", 0, 0, "")
        return capsys.readouterr()

    assert show() == ("", "learning rows: 3 of 9 (33%) loss 1.234\nmeasuring rows\n")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    shown = show()
    assert shown.out == ""
    assert "measuring rows" in shown.err


def test_a_new_folder_stays_if_something_was_written(tmp_path: Path) -> None:
    with out_folder_if_used(tmp_path / "unused"):
        pass
    with out_folder_if_used(tmp_path / "used") as folder:
        (folder / "x").write_text("x")
    with pytest.raises(KeyboardInterrupt), out_folder_if_used(tmp_path / "stopped"):
        raise KeyboardInterrupt
    (tmp_path / "there").mkdir()
    with out_folder_if_used(tmp_path / "there"):
        pass
    assert sorted(file.name for file in tmp_path.iterdir()) == ["there", "used"]
