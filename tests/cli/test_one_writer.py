"""Two commands never write to one folder at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sharpmax

pytest.importorskip("fcntl")

HOLD = """
import sys
from pathlib import Path
from sharpmax.experiments.run_folder import writing
with writing(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_refused_while_a_process_writes_to_it_and_not_after_it_was_killed(
    home: Path, tmp_path: Path, sharpmax_command: Any
) -> None:
    """Every command locks its folder in `run.out_folder`."""
    words = ("horizon", home / "model", "--certified-only", "--out", tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(Path(sharpmax.__file__).parents[1])}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        assert f"another run is writing to {str(tmp_path)!r} now" in sharpmax_command.refused(*words)
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        first.kill()
    assert (tmp_path / ".lock").exists()
    sharpmax_command.ok(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
