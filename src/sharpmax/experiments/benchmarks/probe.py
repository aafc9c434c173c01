"""What capturing rows of attention costs a real model on the CPU, next to a plain pass of the same run.

Correctness comes first: where a captured entropy is not that of float64, or the output changes by a bit, there is no
speed. Every pass runs in an interpreter of its own, which tells its memory, and ratios are taken within a round; the
ratio of processor time shows how much of the other one is other work on the machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sharpmax.experiments.benchmarks.one_pass import PLAIN
from sharpmax.experiments.benchmarks.subprocess import pass_costs
from sharpmax.experiments.targets import held_to
from sharpmax.probing.capture import check_choice, places
from sharpmax.provenance import check_amounts, check_seed

FULL_LENGTH = 8192
"""The length the targets are meant for."""

ROUNDS = 3

_MODEL = "smollm2"
_TARGETS = {"ratio": 2.5, "peak_ratio": 1.3}
_TOLERANCE = 1e-3


def probe_tables(
    length: int = FULL_LENGTH,
    rows: Sequence[str] = ("last", "log"),
    repeat: int = ROUNDS,
    seed: int = 0,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The tables `bench` (a plain pass, one per choice of rows) and `setting`; `note` is told what is being done."""
    check_amounts(length, repeat)
    check_seed(seed)
    for one in rows:
        check_choice(one)
    passes: dict[str, list[dict[str, Any]]] = {choice: [] for choice in (PLAIN, *rows)}
    for done in range(repeat):
        for choice, found in passes.items():
            note(f"round {done + 1} of {repeat}: {choice}")
            found.append(pass_costs(_MODEL, length, choice, seed))
    bench = {f"capture/{choice}": _entry(passes[choice], passes[PLAIN], choice, length) for choice in rows}
    setting = {
        "model": _MODEL,
        "length": length,
        "rows": {choice: len(places(choice, length)) for choice in rows},
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rounds": repeat,
        "targets_are_for_length": FULL_LENGTH,
    }
    plain = {"what": "a forward pass as it comes", **_spent(passes[PLAIN])}
    return {"bench": {"forward/plain": plain, **bench}, "setting": setting}


def _entry(
    found: list[dict[str, Any]], plain: list[dict[str, Any]], choice: str, length: int
) -> dict[str, dict[str, Any]]:
    errors = [one["entropy_error"] for one in found]
    same = {one["output"] for one in (*found, *plain)}
    entry: dict[str, Any] = {
        "what": f"the same while capture measures its rows: {choice}",
        # Written this way round so that NaN does not pass.
        "agrees": len(same) == 1 and all(error <= _TOLERANCE for error in errors),
        "errors": {"entropy": max(errors) if all(map(math.isfinite, errors)) else None},
        "tolerance": _TOLERANCE,
        "same_output": len(same) == 1,
    }
    if entry["agrees"]:
        entry |= _spent(found)
        entry["ratio"] = _ratio("seconds", found, plain)
        entry["cpu_ratio"] = _ratio("cpu_seconds", found, plain)
        entry["peak_ratio"] = _ratio("peak_mib", found, plain)
        entry["targets"] = held_to(_TARGETS, entry, judged=length >= FULL_LENGTH)
    return entry


def _spent(found: list[dict[str, Any]]) -> dict[str, Any]:
    seconds, cpu, peaks = ([one[quantity] for one in found] for quantity in ("seconds", "cpu_seconds", "peak_mib"))
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "cpu_s": statistics.median(cpu),
        "peak_mib": None if None in peaks else statistics.median(peaks),
        "rounds": len(found),
    }


def _ratio(quantity: str, found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> float | None:
    pairs = [(one[quantity], other[quantity]) for one, other in zip(found, plain, strict=True)]
    return None if None in sum(pairs, ()) else statistics.median(one / other for one, other in pairs)
