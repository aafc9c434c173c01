"""Runs in processes of their own, to be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.experiments.engines.grids import TOYS

DRIVER = """
import signal
# A shell starts what it runs in the background with interrupts ignored, and so would this.
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys
from pathlib import Path
from sharpmax.experiments.engines import Store, run
from grids import TOYS, grid

if __name__ == "__main__":
    folder, trace, options = sys.argv[1:]
    run(grid(4, 2, trace=trace, seconds=0.1), Store(Path(folder)), plugins=[TOYS], **eval(options))
"""


def driver(tmp_path: Path, **options: Any) -> subprocess.Popen[bytes]:
    """A process that drives a grid of twelve tasks."""
    (tmp_path / "trace").mkdir(exist_ok=True)
    script = tmp_path / "drive.py"
    script.write_text(DRIVER, encoding="utf-8")
    path = os.pathsep.join([str(TOYS.parent), *filter(None, sys.path)])
    words = [sys.executable, str(script), str(tmp_path / "store"), str(tmp_path / "trace"), repr(options)]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)


def lines(folder: Path) -> int:
    file = folder / "outcomes.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
