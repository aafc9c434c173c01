"""Small grids of toy tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sharpmax.experiments.engines.store import Store
from sharpmax.experiments.engines.task import Task

TOYS = Path(__file__).with_name("toys.py")


def toy(name: str) -> str:
    return f"sharpmax_plugin_toys:{name}"


def grid(seeds: int = 2, scales: int = 2, **more: Any) -> list[Task]:
    """Trainings, and tests of what they learned."""
    training, testing = _only(more, "size", "trace", "beside"), _only(more, "trace", "gate")
    trained = [Task(f"learn/{seed}", toy("learn"), {"seed": seed, **training}) for seed in range(seeds)]
    tested = [
        Task(f"test/{seed}/{scale}", toy("examine"), {"scale": scale / 2, **testing}, after=f"learn/{seed}")
        for seed in range(seeds)
        for scale in range(scales)
    ]
    return trained + tested


def _only(more: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in more.items() if key in names}


def contents(folder: Path) -> dict[str, Any]:
    """All that a store holds, read anew from its folder."""
    store = Store(folder)
    return {key: (store.record(key), store.blob(key)) for key in sorted(store.keys())}


def traces(folder: Path) -> dict[str, int]:
    """How often each task was done."""
    counts: dict[str, int] = {}
    for path in folder.iterdir():
        name = path.name.rsplit(".", 2)[0]
        counts[name] = counts.get(name, 0) + 1
    return counts
