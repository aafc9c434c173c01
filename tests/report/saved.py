"""Committed results, cut down to what a test needs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sharpmax.results import load

RESULTS = Path(__file__).parents[2] / "results"
PROVENANCE = {
    "commit": "abc", "versions": {"torch": "2.13.0"}, "hardware": {"cpu": "x86_64", "cores": 2}, "seed": 0,
    "date": "2026-01-01",
}  # fmt: skip


def tables(name: str) -> dict[str, Any]:
    """The tables of a committed run, to be changed at will."""
    found: dict[str, Any] = copy.deepcopy(_read(name))
    return found


@functools.cache
def _read(name: str) -> Any:
    return load(RESULTS / name).tables


def evaluated() -> dict[str, Any]:
    """Two tasks, three policies, perplexity and a cost that nobody measured."""
    found = tables("evaluate-smollm2")
    tasks = ["formats/csv", "ruler/niah_multikey_2"]
    for name in list(found):
        if "/" in name and name.partition("/")[2] not in tasks:
            del found[name]
    found["setting"]["tasks"] = {task: found["setting"]["tasks"][task] for task in tasks}
    found["setting"]["context"] = 2048
    cost = {"prefill_ms": 10.0, "decode_ms": 5.0, "peak_mib": 600.0, "prefill_ratio": 1.0, "decode_ratio": 1.0}
    costs = {name: dict(cost) for name in found["setting"]["variants"]}
    costs["smollm2-constant"] |= {"prefill_ms": 12.5, "prefill_ratio": 1.25}
    return found | {"cost": costs}


def compared() -> dict[str, Any]:
    """Three methods."""
    found, chosen = tables("compare"), ("sharp", "softmax", "hard")
    return {
        name: table if name == "setting" else {method: row for method, row in table.items() if method in chosen}
        for name, table in found.items()
    }


def exam() -> dict[str, Any]:
    """CLRS-Text with two algorithms."""
    found = tables("clrs")
    chosen = {"minimum", "bfs"}

    def cut(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {key: cut(one) for key, one in value.items() if key not in found["majority"] or key in chosen}

    return {name: cut(table) for name, table in found.items()}


def probed(*, layers: int = 3, policy: str | None = None, task: str = "kv") -> dict[str, Any]:
    """The first layers of a probed model, on one task."""
    found = tables("probe-smollm2")
    heads = {name: about for name, about in found[f"heads/{task}"].items() if int(name.partition(".")[0]) < layers}
    known = {layer: row for layer, row in found[f"layers/{task}"].items() if int(layer) < layers}
    setting = found["setting"] | {"policy": policy, "layers": layers}
    cut = {name: found[name] for name in (f"forecast/{task}", f"chain/{task}", "verdict")}
    return {"setting": setting, f"heads/{task}": heads, f"layers/{task}": known, **cut}


def reproduced() -> dict[str, Any]:
    """The paper's recipe alone."""
    return {name: table for name, table in tables("reproduce").items() if not name.endswith("/sharp")}


SAVED: dict[str, Callable[[], dict[str, Any]]] = {
    "calibrate": lambda: tables("calibrate-smollm2"),
    "clrs": exam,
    "compare": compared,
    "capacity": lambda: tables("compare-capacity"),
    "evaluate": evaluated,
    "probe": probed,
    "reproduce": reproduced,
}
"""Tables of every command that has a page."""
