"""Run folders have one writer and keep their results, even if a run is killed or the disk is full."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError
from sharpmax.experiments.run_folder import Outcome, RunStore, writing

HOLDER = """
import sys, time
from pathlib import Path
from sharpmax.experiments.run_folder import writing
with writing(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
IDENTITY = {"methods": ["softmax"], "seeds": 2}
KEYS = ["a/ä b", "b", "c"]


def held(folder: Path) -> bool:
    try:
        with writing(folder):
            return False
    except ArgumentError as refused:
        return f"another run is writing to {str(folder)!r} now" in str(refused)


def test_a_folder_has_one_writer_at_a_time(tmp_path: Path) -> None:
    assert not held(tmp_path)
    with writing(tmp_path):
        assert held(tmp_path)
        with writing(tmp_path, "1-of-2"), writing(tmp_path, "2-of-2"):
            assert held(tmp_path)
    with pytest.raises(KeyboardInterrupt), writing(tmp_path):
        raise KeyboardInterrupt
    assert not held(tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match=r"cannot write .*\.lock"), writing(tmp_path / "file"):
        pass


def test_the_lock_of_a_killed_run_is_released(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"held\n"
            assert held(tmp_path)
        finally:
            process.kill()
            process.wait()
    assert (tmp_path / ".lock").exists()
    assert not held(tmp_path)


def test_a_store_has_one_writer_and_removes_half_written_blobs(tmp_path: Path) -> None:
    store = filled(tmp_path)
    (tmp_path / "blobs" / ".d.xyz.partial").write_bytes(b"half")
    with store.writing():
        assert not list((tmp_path / "blobs").glob(".*"))
        with pytest.raises(ArgumentError, match="another run is writing"), RunStore(tmp_path).writing():
            pass


def filled(folder: Path) -> RunStore:
    store = RunStore(folder)
    store.claim(IDENTITY, resume=False)
    store.add("a/ä b", Outcome({"x": 1, "text": "zwei\nZeilen"}, b"weights"))
    store.add("b", Outcome({"x": [1.5, None]}))
    store.add("c", Outcome({}, b""))
    return store


def refused(problem: type[SharpmaxError], says: str) -> Any:
    """Expect an error of one line."""
    return pytest.raises(problem, match=rf"^[^\n]*{says}[^\n]*$")


def test_a_store_is_read_back(tmp_path: Path) -> None:
    for store in (filled(tmp_path), RunStore(tmp_path)):
        assert list(store.records) == KEYS
        assert store.records["a/ä b"] == {"x": 1, "text": "zwei\nZeilen"}
        assert store.blob("a/ä b") == b"weights"
        assert (store.records["b"], store.blob("b")) == ({"x": [1.5, None]}, None)
        assert store.blob("c") == b""
        assert ("b" in store, "d" in store) == (True, False)


def test_similar_keys_have_different_blobs(tmp_path: Path) -> None:
    keys = ["a/b", "a b", "../a/b", "x" * 300, "x" * 301, "", "."]
    RunStore(tmp_path).add_all({key: Outcome({}, key.encode()) for key in keys})
    assert [RunStore(tmp_path).blob(key) for key in keys] == [key.encode() for key in keys]
    assert {path.parent for path in tmp_path.rglob("*-*")} == {tmp_path / "blobs"}


@pytest.mark.parametrize("cut", [1, 29])
def test_an_incomplete_last_line_is_dropped(tmp_path: Path, cut: int) -> None:
    filled(tmp_path)
    lines = tmp_path / "outcomes.jsonl"
    whole = lines.read_bytes()
    os.truncate(lines, len(whole) - cut)
    store = RunStore(tmp_path)
    assert list(store.records) == KEYS[:2]
    with store.writing():
        store.add("c", Outcome({}, b""))
    assert lines.read_bytes() == whole


@pytest.mark.parametrize("harmed", [b"[]", b"\xff\xfe", b'{"key": "b"}'], ids=range(3))
def test_an_invalid_line_is_an_error(tmp_path: Path, harmed: bytes) -> None:
    filled(tmp_path)
    lines = tmp_path / "outcomes.jsonl"
    first, _, third, _ = lines.read_bytes().split(b"\n")
    lines.write_bytes(b"\n".join([first, harmed, third, b""]))
    before = lines.read_bytes()
    with refused(FileFormatError, r"line 2 of .*outcomes.jsonl.* remove that line .*--resume"):
        RunStore(tmp_path)
    assert lines.read_bytes() == before


def test_a_missing_or_changed_blob_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path)
    blob = next(path for path in (tmp_path / "blobs").iterdir() if path.read_bytes() == b"weights")
    for harm in (lambda: blob.write_bytes(b"wEights"), blob.unlink):
        harm()
        with refused(FileFormatError, "is not what sharpmax wrote; .* remove the line of 'a/ä b' from"):
            RunStore(tmp_path).blob("a/ä b")


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    RunStore(tmp_path).claim({"seeds": 3}, resume=False)
    filled(tmp_path)  # a folder without outcomes can be reused
    assert json.loads((tmp_path / "run.json").read_text(encoding="utf-8")) == IDENTITY
    with refused(ArgumentError, "--resume"):
        RunStore(tmp_path).claim(IDENTITY, resume=False)
    with refused(ArgumentError, "begun with seeds 2 and now got 3"):
        RunStore(tmp_path).claim({**IDENTITY, "seeds": 3}, resume=True)
    RunStore(tmp_path).claim(IDENTITY, resume=True)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with refused(FileFormatError, "not what sharpmax wrote"):
        RunStore(tmp_path).claim(IDENTITY, resume=True)
    (tmp_path / "run.json").unlink()
    with refused(FileFormatError, r"no run\.json"):
        RunStore(tmp_path).claim(IDENTITY, resume=True)
    assert list(RunStore(tmp_path).records) == KEYS


@pytest.mark.parametrize("room", [0, 1])
def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Either the blob or the line after it does not fit."""
    store = filled(tmp_path)
    synced, left = os.fsync, [room]

    def full(handle: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with refused(SharpmaxError, r"is full \(.*No space left.*--resume"):
            store.add("d", Outcome({"x": 4}, b"four"))
    assert "d" not in store
    assert list(RunStore(tmp_path).records) == KEYS
    store.add("d", Outcome({"x": 4}, b"four"))
    assert RunStore(tmp_path).blob("d") == b"four"
