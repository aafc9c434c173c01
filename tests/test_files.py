"""A file is written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sharpmax.errors import ArgumentError, FileFormatError
from sharpmax.files import append_bytes, read_json, write_text, written_by_others


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def failing(problem: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise problem

    return fail


def test_writes_what_it_was_given(tmp_path):
    for text in ("", "β = 2\n", "x" * 1_000_000):
        path = write_text(str(tmp_path / "new" / "folder" / "a.txt"), text)
        assert path == tmp_path / "new" / "folder" / "a.txt"
        assert path.read_bytes() == text.encode()
        assert names(path.parent) == ["a.txt"]


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


@pytest.mark.parametrize(("module", "step"), [(os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), MemoryError()])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, module, step, problem):
    path = write_text(tmp_path / "a.txt", "old")
    monkeypatch.setattr(module, step, failing(problem))
    with pytest.raises(type(problem)):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.txt", tmp_path):
        with pytest.raises(ArgumentError, match=rf"^path: cannot write '{path}' \(.*allowed: a path in a folder"):
            write_text(path, "x")
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.name != "posix", reason="modes are a POSIX matter")
def test_has_the_mode_of_an_ordinary_file(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:  # other threads share the umask: it must not change for a moment
            patch.setattr(os, "umask", lambda mask: pytest.fail(f"umask {mask}"))
            path = write_text(tmp_path / "a.txt", "x")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(before)


@pytest.mark.parametrize("write", [lambda path: write_text(path, "new"), lambda path: append_bytes(path, b"new")])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_an_error_names_the_file_the_reason_and_what_to_do(tmp_path, monkeypatch, write, number):
    path = write_text(tmp_path / "a.txt", "old\n")
    todo = "the disk is full: free some space" if number == errno.ENOSPC else "a folder you may write to"
    monkeypatch.setattr(os, "fsync", failing(OSError(number, os.strerror(number))))
    with pytest.raises(ArgumentError) as caught:
        write(path)
    assert all(part in str(caught.value) for part in (repr(str(path)), os.strerror(number), todo))
    assert path.read_text() == "old\n"
    assert names(tmp_path) == ["a.txt"]


def test_lines_are_added(tmp_path):
    for line in (b"one\n", b"two\n"):
        append_bytes(tmp_path / "a.jsonl", line)
    assert (tmp_path / "a.jsonl").read_bytes() == b"one\ntwo\n"
    with pytest.raises(ArgumentError, match="cannot write"):
        append_bytes(tmp_path / "no" / "a.jsonl", b"x")


def test_an_interrupt_keeps_the_line_that_was_being_written(tmp_path, monkeypatch):
    append_bytes(tmp_path / "a.jsonl", b"one\n")
    monkeypatch.setattr(os, "fsync", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        append_bytes(tmp_path / "a.jsonl", b"two\n")
    assert (tmp_path / "a.jsonl").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("text", [b'{"a": [-' + b"1" * 100_000 + b"]}", b"[" * 200_000, b'{"a": ', b"\xff\xfe", b""])
def test_what_is_no_json_is_one_line(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(FileFormatError) as caught:
        read_json(path, "thing")
    message = str(caught.value)
    assert message.startswith(f"thing: {str(path)!r} cannot be read as JSON (")
    assert "\n" not in message
    assert len(message) < 300 + len(str(path))


class SafetensorError(Exception):
    """Has the name of the error that safetensors raises."""


def test_libraries_that_cannot_write_give_the_same_error(tmp_path):
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    for problem in (SafetensorError(said), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        full = r"cannot write .*out.*\(No space left on device\); the disk is full"
        with pytest.raises(ArgumentError, match=full), written_by_others(tmp_path / "out"):
            raise problem
    for other in (SafetensorError("another"), RuntimeError(said), KeyError("x")):
        with pytest.raises(type(other)), written_by_others(tmp_path):
            raise other
