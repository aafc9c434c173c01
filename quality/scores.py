"""From what a run has left to numbers: the share of mutants that were noticed, the share of lines that were run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality.log import Log
from quality.mutants import Mutant

__all__ = ["NOT_RUN", "Justified", "covered", "justified", "mutation"]

REASONS = Path(__file__).with_name("justified.json")
ENOUGH = 90.0
"""Percent of its lines under which a file is named."""

NOT_RUN = {
    "cli/__main__.py": "runs in processes of its own, which are not traced",
    "cli/completion.py": "runs in a shell's own processes",
    "cli/env.py": "runs in processes of its own, where extras are missing",
    "experiments/clrs/rate.py": "measures a GPU",
    "experiments/compare/memory.py": "asks a GPU, or a system that tells less than Linux",
    "experiments/engines/address.py": "runs where Ray cannot be started",
    "experiments/engines/cluster.py": "runs in Ray's own processes",
    "experiments/engines/local.py": "runs in processes of its own, which are not traced",
    "experiments/evaluate/memory.py": "asks a GPU, or a system that tells less than Linux",
    "experiments/fresh.py": "asks a system that tells less than Linux, or runs in processes of its own",
    "experiments/gpu_bench/clock.py": "measures a GPU",
    "experiments/peak_memory.py": "runs in processes of its own, which are not traced",
    "provenance.py": "asks for what other systems than Linux have",
    "experiments/stacked_training.py": "captures a CUDA graph",
    "hf/lowered.py": "launches kernels on a GPU",
    "models/smollm2.py": "runs once, when the weights are unpacked into the cache",
    "rows/impl/triton.py": "launches kernels: what is left chooses tiles and copies for a GPU",
    "rows/impl/triton_backward.py": "launches kernels: what is left chooses tiles for a GPU",
    "rows/impl/triton_kernel.py": "device code: the interpreter runs a translation, of which a tracer sees parts",
    "rows/impl/triton_backward_kernel.py": "device code: as triton_kernel.py",
}
"""Files whose lines are run where no tracer looks, mostly on a GPU by `make test-gpu`, and why."""


@dataclass(frozen=True)
class Justified:
    """Mutants that no test can or should notice, and why."""

    why: str
    mutants: tuple[str, ...]


def justified() -> list[Justified]:
    """The list of mutants that may live, group by group."""
    return [Justified(one["why"], tuple(one["mutants"])) for one in json.loads(REASONS.read_text(encoding="utf-8"))]


def mutation(mutants: Sequence[Mutant], log: Log, excused: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Per room: mutants made, noticed, justified and left, and the score, noticed of those that are not justified."""
    excused = set(excused)
    rooms: dict[str, dict[str, Any]] = {}
    for one in mutants:
        outcome = log.of(one)
        if outcome is None and one.key not in excused:
            continue
        row = rooms.setdefault(one.file.split("/")[0], {"mutants": 0, "noticed": 0, "justified": 0, "left": 0})
        row["mutants"] += 1
        row["noticed" if outcome and outcome.found else "justified" if one.key in excused else "left"] += 1
    rooms["all"] = {
        name: sum(row[name] for row in rooms.values()) for name in ("mutants", "noticed", "justified", "left")
    }
    for row in rooms.values():
        row["percent"] = _percent(row["noticed"], row["noticed"] + row["left"])
    return rooms


def covered(report: Path) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """From coverage's JSON: the statements of every room and how many were run, and the files that lack most."""
    rooms: dict[str, dict[str, Any]] = {}
    lacking = []
    for path, one in sorted(json.loads(report.read_text(encoding="utf-8"))["files"].items()):
        file = path.split("sharpmax/", 1)[1]
        room, found = file.split("/")[0] if "/" in file else "sharpmax", one["summary"]
        row = rooms.setdefault(room, {"statements": 0, "run": 0})
        row["statements"] += found["num_statements"]
        row["run"] += found["covered_lines"]
        if found["percent_covered"] < ENOUGH:
            missing = _stretches(one["missing_lines"])
            share = round(found["percent_covered"], 1)
            lacking.append(
                {"file": file, "percent": share, "missing": missing, "why": NOT_RUN.get(file, "no test yet")}
            )
    rooms["all"] = {name: sum(row[name] for row in rooms.values()) for name in ("statements", "run")}
    for row in rooms.values():
        row["percent"] = _percent(row["run"], row["statements"])
    return rooms, lacking


def _percent(part: int, whole: int) -> float:
    return round(100.0 * part / whole, 1) if whole else 100.0


def _stretches(lines: Sequence[int]) -> str:
    """Numbers as a reader likes them.

    >>> _stretches([3, 4, 5, 9])
    '3–5, 9'
    """
    ends: list[list[int]] = []
    for line in lines:
        if ends and line == ends[-1][1] + 1:
            ends[-1][1] = line
        else:
            ends.append([line, line])
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in ends)
