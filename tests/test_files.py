"""A file is written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sharpmax.errors import ArgumentError, SharpmaxError
from sharpmax.files import write_text


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("text", ["", "β = 2\n", "x" * 1_000_000])
def test_writes_what_it_was_given(tmp_path, text):
    path = write_text(tmp_path / "a.txt", text)
    assert path == tmp_path / "a.txt"
    assert path.read_bytes() == text.encode()
    assert names(tmp_path) == ["a.txt"]


def test_takes_strings_makes_folders_and_replaces(tmp_path):
    path = write_text(str(tmp_path / "new" / "folder" / "a.txt"), "one")
    assert isinstance(path, Path)
    write_text(path, "two")
    assert path.read_text() == "two"


def test_the_old_content_stays_until_the_new_is_complete(tmp_path, monkeypatch):
    path = write_text(tmp_path / "a.txt", "old")
    seen = []
    real = os.fsync

    def look(descriptor: int) -> None:
        seen.append(path.read_text())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    write_text(path, "new")
    assert seen == ["old"]
    assert path.read_text() == "new"


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, problem):
    path = write_text(tmp_path / "a.txt", "old")

    def fail(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, step)), fail)
    expected = ArgumentError if isinstance(problem, OSError) else type(problem)
    with pytest.raises(expected):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_text_that_cannot_be_encoded_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.txt", "\ud800")
    assert names(tmp_path) == []


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a.txt", tmp_path / "folder"):
        with pytest.raises(ArgumentError) as caught:
            write_text(path, "x")
        assert str(caught.value).startswith(f"path: cannot write {str(path)!r} (")
        assert "allowed: a path in a folder you may write to" in str(caught.value)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, SharpmaxError)
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.skipif(os.name != "posix", reason="modes are a POSIX matter")
def test_has_the_mode_of_an_ordinary_file(tmp_path):
    before = os.umask(0o027)
    try:
        path = write_text(tmp_path / "a.txt", "x")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        now = os.umask(0o027)
        assert now == 0o027
    finally:
        os.umask(before)
