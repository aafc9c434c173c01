"""Committed results, cut down to what a test needs."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "results"
PROVENANCE = {
    "commit": "abc", "versions": {"torch": "2.13.0"}, "hardware": {"cpu": "x86_64", "cores": 2}, "seed": 0,
    "date": "2026-01-01",
}  # fmt: skip


@functools.cache
def _read(name: str) -> Any:
    return json.loads((RESULTS / name / "results.json").read_text(encoding="utf-8"))["tables"]


def tables(name: str) -> dict[str, Any]:
    """The tables of a committed run, to be changed at will."""
    found: dict[str, Any] = copy.deepcopy(_read(name))
    return found


def evaluated() -> dict[str, Any]:
    """Two tasks, two policies, perplexity and cost."""
    found = tables("evaluate-smollm2-formats")
    tasks = list(found["setting"]["tasks"])[:2]
    for name in list(found):
        if "/" in name and name.partition("/")[2] not in tasks:
            del found[name]
    found["setting"]["tasks"] = {task: found["setting"]["tasks"][task] for task in tasks}
    other = tables("evaluate-smollm2")["perplexity"]
    return found | {"perplexity": {name: other[name] for name in found["setting"]["arms"]}}


def compared() -> dict[str, Any]:
    """Three methods."""
    found = tables("compare")
    chosen = ("sharp", "softmax", "hard")
    for name, table in found.items():
        if name != "setting":
            found[name] = {method: row for method, row in table.items() if method in chosen}
    return found


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
