"""Two commands never write to one folder at the same time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sharpmax.experiments.run_folder import writing
from tests.cli.lines import is_one_error_line

pytest.importorskip("fcntl")

SMALL = {
    "reproduce": ("reproduce", "--recipe", "paper", "--seeds", 1, "--samples", 4, "--sizes", "16,32", "--no-draw"),
    "horizon": ("horizon", "{model}", "--certified-only"),
    "fold": ("fold", "{model}", "--policy", "constant:1.5"),
}
"""Every command locks its folder in `run.out_folder`; these call it with and without a model."""


@pytest.mark.parametrize("name", SMALL)
def test_a_folder_that_is_written_to_is_refused(name: str, home: Path, tmp_path: Path, sharpmax_command: Any) -> None:
    words = [str(word).format(model=home / "model") for word in SMALL[name]]
    out = tmp_path / "out"
    with writing(tmp_path):  # makes sure that it is the folder that counts, and not the one above
        out.mkdir()
        with writing(out):
            outcome = sharpmax_command(*words, "--out", out)
            assert [path.name for path in out.iterdir()] == [".lock"]
    # A checkpoint is never written into a folder that holds anything.
    expected = "a new or empty folder" if name == "fold" else f"another run is writing to {str(out)!r} now"
    assert outcome.code == 2
    assert is_one_error_line(outcome.err)
    assert expected in outcome.err


def test_a_training_that_runs_and_one_that_was_killed(tmp_path: Path, sharpmax_command: Any) -> None:
    words = ["reproduce", "--train", "--recipe", "sharp", "--steps", "100000000", "--seeds", "1", "--no-draw"]
    command = [sys.executable, "-m", "sharpmax.cli", *words, "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        try:
            until = time.monotonic() + 300
            while not (tmp_path / ".lock").exists() and first.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            second = sharpmax_command(*words, "--out", tmp_path)
        finally:
            first.kill()
    assert second.code == 2
    assert is_one_error_line(second.err)
    assert "another run is writing" in second.err
    assert (tmp_path / ".lock").exists()
    third = sharpmax_command("explore", "--no-open", "--out", tmp_path)
    assert third.code == 0
    assert not (tmp_path / ".lock").exists()
