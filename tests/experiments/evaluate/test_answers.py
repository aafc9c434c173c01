"""What is known is on disk, belongs to one run, and is never lost or overwritten by accident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.experiments.evaluate.run import FILE_NAME, Answers

RUN = {"model": "tiny", "seed": 0, "arms": {"a": {"kind": "constant", "value": 1.5, "more": "x" * 80}}}


def begun(folder: Path) -> Answers:
    answers = Answers.open(folder, RUN, resume=False)
    answers.remark("a", "careful")
    answers.remark("a", "careful")
    answers.add("kv/8/a", [[1, 0.25]])
    return answers


def test_a_value_is_on_disk_when_add_returns(tmp_path: Path) -> None:
    begun(tmp_path)
    again = Answers.open(tmp_path, RUN, resume=True)
    assert "kv/8/a" in again
    assert again["kv/8/a"] == [[1, 0.25]]
    assert again.remarks("a") == ["careful"]
    assert "kv/16/a" not in again
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


def test_an_interrupted_run_is_not_begun_anew(tmp_path: Path) -> None:
    begun(tmp_path)
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(ArgumentError, match="--resume"):
        Answers.open(tmp_path, RUN, resume=False)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_finished_run_may_be_done_again(tmp_path: Path) -> None:
    begun(tmp_path).finish()
    assert "kv/8/a" not in Answers.open(tmp_path, RUN, resume=False)
    assert "kv/8/a" in Answers.open(tmp_path, RUN, resume=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [({"seed": 1}, "with seed 0 and now got 1"), ({"arms": {}}, "with other arms"), ({"new": 3}, "new None")],
)
def test_another_run_is_refused(change: dict[str, object], says: str, tmp_path: Path) -> None:
    begun(tmp_path)
    with pytest.raises(ArgumentError, match=says):
        Answers.open(tmp_path, {**RUN, **change}, resume=True)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', json.dumps({"schema": 2}), "\x00"])
@pytest.mark.parametrize("resume", [True, False])
def test_what_is_not_ours_is_left_alone(text: str, resume: bool, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(FileFormatError, match="not a file of answers"):
        Answers.open(tmp_path, RUN, resume=resume)
    assert (tmp_path / FILE_NAME).read_text() == text


def test_nothing_half_written(tmp_path: Path) -> None:
    answers = begun(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        answers.add("kv/16/a", [[0, float("nan")]])
    assert "kv/16/a" not in Answers.open(tmp_path, RUN, resume=True)
