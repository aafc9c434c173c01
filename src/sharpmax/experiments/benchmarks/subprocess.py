"""Measurements that need a fresh interpreter: import time and peak memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import sharpmax
from sharpmax.errors import SharpmaxError

HEAVY = ("transformers", "jax", "triton", "altair", "ray")
"""Packages that using the core must not import."""

_STATEMENTS = {
    "torch": "import torch",
    "import/sharpmax": "import sharpmax",
    "import/row-stats": "import sharpmax; sharpmax.row_stats",
}

_TIMED = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps([seconds, [name for name in {heavy!r} if name in sys.modules]]))
"""


def import_costs(rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of `import sharpmax`, and of that with `sharpmax.row_stats`, against `import torch` in the same round."""
    seconds: dict[str, list[float]] = {name: [] for name in _STATEMENTS}
    heavy: dict[str, list[str]] = {}
    if rounds > 1:
        _timed_import(
            _STATEMENTS["torch"]
        )  # brings its files into the disk cache, or the first round would pay for that
    for _ in range(rounds):
        for name, statement in _STATEMENTS.items():
            spent, heavy[name] = _timed_import(statement)
            seconds[name].append(spent)
    torch_seconds = seconds.pop("torch")
    return {
        name: {
            "what": _STATEMENTS[name],
            "median_s": statistics.median(spent),
            "min_s": min(spent),
            "torch_median_s": statistics.median(torch_seconds),
            "ratio": statistics.median(s / t for s, t in zip(spent, torch_seconds, strict=True)),
            "rounds": rounds,
            "heavy_modules": heavy[name],
        }
        for name, spent in seconds.items()
    }


def _timed_import(statement: str) -> tuple[float, list[str]]:
    spent, heavy = _python(["-c", _TIMED.format(statement=statement, heavy=HEAVY)])
    return spent, heavy


def peak_extra_bytes(length: int, heads: int, width: int) -> int | None:
    """How far memory rises above its level before `row_stats(impl="streaming")`; None where it cannot be seen."""
    extra: int | None = _python(
        ["-m", "sharpmax.experiments.benchmarks.peak_memory", str(length), str(heads), str(width)]
    )
    return extra


def pass_costs(model: str, length: int, rows: str, seed: int) -> dict[str, Any]:
    """Time, memory and output of one pass of a language model: see `sharpmax.experiments.benchmarks.one_pass`."""
    words = ["-m", "sharpmax.experiments.benchmarks.one_pass", model, str(length), rows, str(seed)]
    found: dict[str, Any] = _python(words)
    return found


def _python(arguments: list[str]) -> Any:
    """Run a fresh interpreter that can import this very package, and read the JSON on its last line."""
    home = str(Path(sharpmax.__file__).resolve().parent.parent)
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([home, *others])}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SharpmaxError(f"bench: a measurement in a fresh interpreter failed ({reason})")
    return json.loads(done.stdout.splitlines()[-1])


def resident_bytes() -> tuple[int, int] | None:
    """Memory this process holds now, and the most it ever held; None where the system does not tell."""
    # Not ru_maxrss: Linux hands the peak of the parent down to the child, and a large parent would hide the rise.
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    if "VmRSS" not in found or "VmHWM" not in found:
        return None
    now, peak = (int(found[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
    return now, peak
