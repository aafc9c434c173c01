"""`sharpmax clrs train` and `evaluate`, on a tiny model and two artificial algorithms."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.lines import saved
from tests.experiments.clrs import stub

pytest.importorskip("accelerate", reason="needs the extra hf")

QUICK = (
    "--per-cell", 12, "--steps", 20, "--batch-tokens", 256, "--row-tokens", 128, "--tokens-at-once", 128,
    "--save-every", 8, "--device", "cpu", "--lr", 0.02,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    stub.install(monkeypatch.setitem)


def words(home: Path, out: Path, *more: Any) -> list[Any]:
    return ["clrs", "train", home / "model", "--data", home / "data", "--out", out, *QUICK, *more]


def test_train(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    out = tmp_path / "paper"
    outcome = sharpmax_command.ok(*words(home, out, "--policy", "paper"))
    assert {path.name for path in out.iterdir()} == {"run.json", "results.json", "curve.jsonl", "model"}
    assert (out / "model" / "sharpmax_policy.json").is_file()
    tables = saved(out)["tables"]
    assert [step for step, _ in tables["curve"]] == list(range(1, 21))
    assert tables["curve"][-1][1] < tables["curve"][0][1]
    assert tables["speed"]["tokens_per_second"] > 0
    assert saved(out)["command"].startswith("sharpmax clrs train model --policy paper --lr 0.02 ")
    assert "tokens/s" in outcome.out
    for file in out.glob("*.json"):
        assert str(home).encode() not in file.read_bytes(), file.name
    assert "--resume" in sharpmax_command.refused(*words(home, out, "--policy", "paper"))
    assert "policy" in sharpmax_command.refused(*words(home, out, "--policy", "none", "--resume"))
    again = sharpmax_command(*words(home, out, "--policy", "paper", "--resume"))
    assert again.code == 0
    assert "is complete" in again.out


@pytest.fixture(scope="module")
def arms(home: Path) -> list[Path]:
    """Two trained arms that differ in their policy alone."""
    from sharpmax.cli import main

    with pytest.MonkeyPatch.context() as patch:
        stub.install(patch.setitem)
        for policy in ("none", "paper"):
            line = words(home, home / f"arm-{policy}", "--policy", policy)
            assert main([str(word) for word in line]) == 0
    return [home / "arm-none", home / "arm-paper"]


def exam(arms: list[Path], out: Path, *more: Any) -> list[Any]:
    data = arms[0].parent / "data"
    return ["clrs", "evaluate", *arms, "--data", data, "--per-cell", 6, "--device", "cpu", "--out", out, *more]


def test_train_then_evaluate(arms: list[Path], tmp_path: Path, sharpmax_command: Any) -> None:
    outcome = sharpmax_command.ok(*exam(arms, tmp_path))
    tables = saved(tmp_path)["tables"]
    assert set(tables) == {
        "setting", "accuracy", "majority", "means", "means_exact", "gains", "by_algorithm", "gains_by_algorithm",
        "speed", "training",
    }  # fmt: skip
    assert list(tables["accuracy"]) == ["arm-none", "arm-paper"]
    assert tables["setting"]["sizes"]["first"] == {"trained": [4, 6], "examined": [4, 8]}
    assert tables["setting"]["arms"]["arm-paper"]["policy"]["kind"] == "polynomial"
    assert tables["speed"]["arm-none"]["tokens_per_second"] > 0
    for said in (
        "Accuracy of final answers (%): means over algorithms",
        "larger sizes",
        "Accuracy at sizes trained",
        "per second",
    ):
        assert said in outcome.out
    assert saved(tmp_path)["command"].startswith("sharpmax clrs evaluate arm-none arm-paper --per-cell 6")
    lines = (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if '"text"' in line]) == 2 * 2 * 2 * 6
    # How the arms were trained is in the one file, and it alone draws the page.
    for arm in arms:
        trained = saved(arm)
        kept = tables["training"][arm.name]
        assert kept["curve"] == trained["tables"]["curve"]
        assert kept["speed"] == trained["tables"]["speed"]
        assert (kept["command"], kept["provenance"]) == (trained["command"], trained["provenance"])
        assert kept["setting"]["steps"] == 20
    drawn = {"report.html", "accuracy.svg", "accuracy.png", "curve.svg", "curve.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "results.json", "answers.jsonl", *drawn}
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(tmp_path / "results.json", alone)
    sharpmax_command.ok("report", alone)
    assert f"wrote {tmp_path / 'report.html'}\n" in outcome.out
    for name in drawn:
        assert (alone / name).read_bytes() == (tmp_path / name).read_bytes()
    assert str(tmp_path).encode() not in (tmp_path / "report.html").read_bytes()


@pytest.mark.parametrize("made", [True, False])
def test_larger_sizes_can_be_left_for_the_test_examples(
    made: bool, home: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    arm = tmp_path / "arm"
    path = stub.write(tmp_path / "own.jsonl", stub.examples(stub.ALGORITHMS, stub.TRAIN, 6, "train", 0))
    more = () if made else ("--dataset", path)
    sharpmax_command.ok(*words(home, arm, "--largest", 4, "--steps", 1, *more))
    assert saved(arm)["tables"]["setting"]["sizes"] == {name: [4] for name in stub.ALGORITHMS}
    assert saved(arm)["tables"]["setting"]["data"]["largest"] == 4
    assert "--largest 4" in saved(arm)["command"]


def test_a_training_that_is_not_finished_cannot_be_examined(home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text("{}")
    assert "a finished training" in sharpmax_command.refused(*exam([tmp_path / "half"], tmp_path / "out"))


def test_a_missing_extra_is_named(
    home: Path, tmp_path: Path, sharpmax_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sharpmax.errors import MissingExtraError

    def missing(*arguments: Any, **options: Any) -> None:
        raise MissingExtraError("clrs", "clrs", "CLRS-Text")

    made = stub.module()
    vars(made)["training_set"] = missing
    monkeypatch.setitem(sys.modules, "sharpmax.tasks.clrs_text", made)
    assert "pip install 'attrs>=24.2'" in sharpmax_command.refused(*words(home, tmp_path / "out"))


def test_longer_questions_can_be_left_out(arms: list[Path], tmp_path: Path, sharpmax_command: Any) -> None:
    outcome = sharpmax_command.ok(*exam(arms, tmp_path, "--sizes", "4,90", "--algorithms", "last", "--longest", 60))
    assert "Questions of more than 60 tokens were left out: last of size 90." in outcome.out
    assert saved(tmp_path)["tables"]["setting"]["too_long"] == {"last": [90]}
    assert "--longest 60" in saved(tmp_path)["command"]


def test_sizes_without_room_are_left_out_as_a_whole(arms: list[Path], tmp_path: Path, sharpmax_command: Any) -> None:
    outcome = sharpmax_command.ok(*exam(arms, tmp_path, "--sizes", "4,600", "--algorithms", "last"))
    assert "Left out, as they do not fit into the context: last of size 600." in outcome.out
    tables = saved(tmp_path)["tables"]
    assert tables["setting"]["too_long"] == {"last": [600]}
    assert list(tables["accuracy"]["arm-none"]["last"]) == ["4"]
    assert list(tables["means"]["arm-none"]) == ["in"]
