"""What is in the store stays there, whatever is killed, cut or full."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError
from sharpmax.experiments.run_folder import Outcome, RunStore

IDENTITY = {"methods": ["softmax"], "seeds": 2}


def filled(folder: Path) -> RunStore:
    store = RunStore(folder)
    store.claim(IDENTITY, resume=False)
    store.add("a/ä b", Outcome({"x": 1, "text": "zwei\nZeilen"}, b"weights"))
    store.add("b", Outcome({"x": [1.5, None]}))
    store.add("c", Outcome({}, b""))
    return store


def one_line(problem: BaseException) -> str:
    text = str(problem)
    assert "\n" not in text
    return text


def test_what_was_added_is_there_for_the_next(tmp_path: Path) -> None:
    for store in (filled(tmp_path), RunStore(tmp_path)):
        assert store.keys() == ["a/ä b", "b", "c"]
        assert store.record("a/ä b") == {"x": 1, "text": "zwei\nZeilen"}
        assert store.blob("a/ä b") == b"weights"
        assert (store.record("b"), store.blob("b")) == ({"x": [1.5, None]}, None)
        assert store.blob("c") == b""
        assert "b" in store
        assert "d" not in store


def test_records_are_the_same_before_and_after_they_are_read_back(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.add("a", Outcome({"sizes": (1, 2), 3: True}))  # type: ignore[dict-item]
    assert store.record("a") == RunStore(tmp_path).record("a") == {"sizes": [1, 2], "3": True}
    with pytest.raises(ValueError, match="JSON"):
        store.add("b", Outcome({"x": float("nan")}))
    assert RunStore(tmp_path).keys() == ["a"]


def test_keys_that_look_alike_have_blobs_of_their_own(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    keys = ["a/b", "a b", "a-b", "../a/b", "x" * 300, "x" * 301, "", "."]
    for number, key in enumerate(keys):
        store.add(key, Outcome({}, bytes([number])))
    again = RunStore(tmp_path)
    assert [again.blob(key) for key in keys] == [bytes([number]) for number in range(len(keys))]
    assert {path.parent for path in tmp_path.rglob("*-*")} == {tmp_path / "blobs"}


@pytest.mark.parametrize("cut", [1, 29])
def test_half_a_line_at_the_end_is_dropped(tmp_path: Path, cut: int) -> None:
    filled(tmp_path)
    lines = tmp_path / "outcomes.jsonl"
    whole = lines.read_bytes()
    os.truncate(lines, len(whole) - cut)
    store = RunStore(tmp_path)
    assert store.keys() == ["a/ä b", "b"]
    with store.writing():
        store.add("c", Outcome({}, b""))
    assert lines.read_bytes() == whole


def test_a_line_in_the_middle_that_is_not_json(tmp_path: Path) -> None:
    filled(tmp_path)
    lines = tmp_path / "outcomes.jsonl"
    first, _, third, _ = lines.read_bytes().split(b"\n")
    nines = b"9" * 5000
    for harmed in (
        b"{", b"[]", b"\xff\xfe", b"", b'{"key": "b"}', b"[" * 100_000,
        b'{"key": "b", "record": {"x": %s}, "blob": null}' % nines,
        b'{"key": "b", "record": {}, "blob": {"file": "../a", "bytes": 1, "sha256": ""}}',
        b'{"key": "b", "record": {}, "blob": {"file": "a", "bytes": "many", "sha256": ""}}',
    ):  # fmt: skip
        lines.write_bytes(b"\n".join([first, harmed, third, b""]))
        before = lines.read_bytes()
        with pytest.raises(FileFormatError, match=r"line 2 of .*outcomes.jsonl.* remove that line .*--resume") as said:
            RunStore(tmp_path)
        one_line(said.value)
        assert lines.read_bytes() == before
    lines.write_bytes(b"\n".join([first, third, b""]))
    assert RunStore(tmp_path).keys() == ["a/ä b", "c"]


def test_a_blob_that_is_missing_cut_or_changed(tmp_path: Path) -> None:
    filled(tmp_path)
    blob = next(path for path in (tmp_path / "blobs").iterdir() if path.read_bytes() == b"weights")
    blob.write_bytes(b"weig")
    with pytest.raises(FileFormatError, match=r"'a/ä b', is not what sharpmax wrote; .* remove line 1") as said:
        RunStore(tmp_path)
    one_line(said.value)
    blob.write_bytes(b"wEights")
    with pytest.raises(FileFormatError, match="is not what sharpmax wrote"):
        RunStore(tmp_path).blob("a/ä b")
    blob.unlink()
    with pytest.raises(FileFormatError, match="is missing; restore it, or remove line 1"):
        RunStore(tmp_path)


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(ArgumentError, match="--resume"):
        RunStore(tmp_path).claim(IDENTITY, resume=False)
    with pytest.raises(ArgumentError, match="begun with seeds 2 and now got 3"):
        RunStore(tmp_path).claim({**IDENTITY, "seeds": 3}, resume=True)
    RunStore(tmp_path).claim(IDENTITY, resume=True)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(FileFormatError, match="not what sharpmax wrote"):
        RunStore(tmp_path).claim(IDENTITY, resume=True)
    (tmp_path / "run.json").unlink()
    with pytest.raises(FileFormatError, match=r"no run\.json"):
        RunStore(tmp_path).claim(IDENTITY, resume=True)
    assert RunStore(tmp_path).keys() == ["a/ä b", "b", "c"]


def test_a_folder_without_outcomes_is_free(tmp_path: Path) -> None:
    RunStore(tmp_path).claim(IDENTITY, resume=False)
    RunStore(tmp_path).claim({"seeds": 3}, resume=False)
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8")) == {"seeds": 3}


def test_two_runs_do_not_write_at_the_same_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    first, second = RunStore(tmp_path), RunStore(tmp_path)
    with first.writing(), pytest.raises(ArgumentError, match="another run is writing"), second.writing():
        pass
    with RunStore(tmp_path).writing():
        pass


def test_leftovers_of_a_kill_are_cleared_away(tmp_path: Path) -> None:
    store = filled(tmp_path)
    (tmp_path / "blobs" / ".d.xyz.partial").write_bytes(b"half")
    with store.writing():
        assert not list((tmp_path / "blobs").glob(".*"))


@pytest.mark.parametrize("room", [0, 1])
def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """The blob does not fit, or the line after it does not."""
    store = filled(tmp_path)
    synced, left = os.fsync, [room]

    def full(handle: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SharpmaxError, match=r"is full \(.*No space left.*--resume") as said:
            store.add("d", Outcome({"x": 4}, b"four"))
    one_line(said.value)
    assert "d" not in store
    assert RunStore(tmp_path).keys() == ["a/ä b", "b", "c"]
    store.add("d", Outcome({"x": 4}, b"four"))
    assert RunStore(tmp_path).blob("d") == b"four"
