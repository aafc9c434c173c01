"""What tests of the command line read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import sharpmax


def is_one_error_line(text: str) -> bool:
    return text.startswith("sharpmax: error: ") and text.count("\n") == 1 and text.endswith("\n")


def saved(folder: Path) -> Any:
    """The results of a run."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def run_alone(*words: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: Ray changes the one that it is started in."""
    home = str(Path(sharpmax.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": home, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sharpmax.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=1200)
