"""A folder has one writer, whatever becomes of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sharpmax.errors import ArgumentError
from sharpmax.experiments.run_folder import writing

pytest.importorskip("fcntl")

HOLDER = """
import os, sys, time
from pathlib import Path
from sharpmax.experiments.run_folder import writing
with writing(Path(sys.argv[1])):
    if sys.argv[2] == "0":
        print(0, flush=True)
    elif os.fork() == 0:
        print(os.getpid(), flush=True)  # from the worker: by now it has let go of the lock
    time.sleep(600)
"""


def held(folder: Path) -> bool:
    try:
        with writing(folder):
            return False
    except ArgumentError as refused:
        return f"another run is writing to {str(folder)!r} now" in str(refused)


def test_one_at_a_time(tmp_path: Path) -> None:
    assert not held(tmp_path)
    with writing(tmp_path):
        assert held(tmp_path)
        with writing(tmp_path, "1-of-2"), writing(tmp_path, "2-of-2"):
            assert held(tmp_path)
        (tmp_path / "other").mkdir()
        assert not held(tmp_path / "other")
    assert not held(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


def test_an_error_lets_go(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writing(tmp_path):
        raise KeyboardInterrupt
    assert not held(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_another_process_and_its_death(tmp_path: Path, workers: int) -> None:
    """A killed run leaves its file, which stops nobody; neither does a worker that it forked and that outlives it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), str(workers)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        worker = 0
        try:
            worker = int(process.stdout.readline())
            assert held(tmp_path)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert (tmp_path / ".lock").exists()
            assert not held(tmp_path)
        finally:
            process.kill()
            if worker:
                os.kill(worker, signal.SIGKILL)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cannot write .*\.lock"), writing(tmp_path / "nowhere"):
        pass
