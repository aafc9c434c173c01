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
import os, sys, time
from pathlib import Path
home = Path(sys.argv[1])
if __name__ == "__mp_main__":  # a process that starts: it imports this file before anything else of ours
    (home / f"starts.{os.getpid()}").touch()
    while (home / "hold").exists():
        time.sleep(0.02)
from sharpmax.experiments.engines import Store, run
from grids import TOYS, grid

if __name__ == "__main__":
    tasks = grid(4, 2, trace=str(home / "trace"), gate=str(home / "gate"))
    run(tasks, Store(home / "store"), plugins=[TOYS], **eval(sys.argv[2]))
"""


def driver(tmp_path: Path, **options: Any) -> subprocess.Popen[bytes]:
    """A process that drives a grid of twelve tasks: four trainings, and two tests of each.

    Every second test waits for the file `gate`, so that the driver cannot end before a test wants it to. While there is
    a file `hold`, processes that the driver starts stay in their imports.
    """
    (tmp_path / "trace").mkdir(exist_ok=True)
    script = tmp_path / "drive.py"
    script.write_text(DRIVER, encoding="utf-8")
    path = os.pathsep.join([str(TOYS.parent), *filter(None, sys.path)])
    words = [sys.executable, str(script), str(tmp_path), repr(options)]
    return subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)


def lines(folder: Path) -> int:
    file = folder / "outcomes.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def stuck(tmp_path: Path, tasks: int) -> None:
    """Wait until so many tasks wait for the gate, and all that was done before them is stored."""
    held = tmp_path / "trace"
    wait_for(lambda: len(list(held.glob("examine-0.5.*"))) == tasks)
    wait_for(lambda: lines(tmp_path / "store") == len(list(held.iterdir())) - tasks)


def alive(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_for(condition: Any, seconds: float = 1200.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
