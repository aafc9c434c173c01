"""Small grids of toy tasks, and processes that run them and can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sharpmax.experiments.engine import Job, run
from sharpmax.experiments.run_folder import RunStore

TOYS = Path(__file__).with_name("toy_tasks.py")

_DRIVER = """
import signal
# Shells start background jobs with SIGINT ignored, which this process would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys
from pathlib import Path
from engine_runs import TOYS, grid
from sharpmax.experiments.engine import run
from sharpmax.experiments.run_folder import RunStore

home = Path(sys.argv[1])
tasks = grid(4, 2, trace=str(home / "trace"), gate=str(home / "gate"))
run(tasks, RunStore(home / "store"), plugins=[TOYS], workers=2)
"""


def toy(name: str) -> str:
    return f"sharpmax_plugin_toy_tasks:{name}"


def grid(seeds: int = 2, scales: int = 2, **more: Any) -> list[Job]:
    """Trainings, and tests that depend on them."""
    training = {name: value for name, value in more.items() if name in ("size", "trace", "beside")}
    testing = {name: value for name, value in more.items() if name in ("trace", "gate")}
    trained = [Job(f"learn/{seed}", toy("learn"), {"seed": seed, **training}) for seed in range(seeds)]
    tested = [
        Job(f"test/{seed}/{scale}", toy("examine"), {"scale": scale / 2, **testing}, after=f"learn/{seed}")
        for seed in range(seeds)
        for scale in range(scales)
    ]
    return trained + tested


def go(folder: Path, tasks: list[Job], **more: Any) -> dict[str, Any]:
    """Run the tasks, and read all results back from the folder."""
    run(tasks, RunStore(folder), plugins=[TOYS], **more)
    store = RunStore(folder)
    return {key: (store.records[key], store.blob(key)) for key in sorted(store.records)}


def traces(folder: Path) -> dict[str, int]:
    """How often each task ran."""
    counts: dict[str, int] = {}
    for path in folder.iterdir():
        name = path.name.rsplit(".", 2)[0]
        counts[name] = counts.get(name, 0) + 1
    return counts


def driver(home: Path) -> subprocess.Popen[bytes]:
    """A process that runs four trainings, each with two tests, in two workers that are stuck when it returns.

    Every second test waits for a file that never comes, and what finished before is stored.
    """
    (home / "trace").mkdir(exist_ok=True)
    path = os.pathsep.join([str(TOYS.parent), *filter(None, sys.path)])
    words = [sys.executable, "-c", _DRIVER, str(home)]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE)
    trace = home / "trace"
    wait_for(lambda: len(list(trace.glob("examine-0.5.*"))) == 2)
    wait_for(lambda: lines(home / "store") == len(list(trace.iterdir())) - 2)
    return process


def lines(folder: Path) -> int:
    file = folder / "outcomes.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def alive(pid: int) -> bool:
    """Whether a process runs and is not a zombie."""
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
