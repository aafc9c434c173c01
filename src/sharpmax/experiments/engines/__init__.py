"""Many small tasks on this machine or a Ray cluster; what comes out is kept as it comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from sharpmax.errors import reject
from sharpmax.experiments.engines import plugins as plugin_files
from sharpmax.experiments.engines.driver import drive
from sharpmax.experiments.engines.local import Here, Processes
from sharpmax.experiments.engines.store import Store
from sharpmax.experiments.engines.task import Outcome, Progress, Task

__all__ = ["ENGINES", "Outcome", "Progress", "Store", "Task", "run"]

ENGINES = ("local", "ray")


def _silent(progress: Progress) -> None:
    """For those who do not watch."""


def run(
    tasks: Sequence[Task],
    store: Store,
    *,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    plugins: Sequence[Path] = (),
    retries: int = 2,
    progress: Callable[[Progress], None] = _silent,
) -> None:
    """Do what is not in the store yet, on this machine or a Ray cluster; every outcome is stored as soon as it comes.

    `workers` is the number of processes of this machine: its cores unless told, and none but this one for tasks on a
    GPU. `address` is that of a Ray cluster; without one Ray is started on this machine. `plugins` are Python files
    that are imported where tasks are done, as `sharpmax_plugin_<name>`. A task whose process dies or that fails is
    tried again `retries` times; a mistake of the user's (`SharpmaxError`) is not.
    """
    if engine not in ENGINES:
        reject("--engine", repr(engine), f"one of {list(ENGINES)}")
    if workers is not None and workers < 1:
        reject("--workers", workers, "1 or more")
    if address is not None and engine != "ray":
        reject("--address", repr(address), "no address with the engine 'local'", "add --engine ray")
    if address is not None and workers is not None:
        reject("--workers", workers, "no number of processes with --address: a cluster knows its own")
    files = plugin_files.read(plugins)
    with store.writing():
        missing = sum(task.key not in store for task in tasks)
        if not missing:
            progress(Progress(len(tasks), len(tasks)))
            return
        if engine == "ray":
            from sharpmax.experiments.engines.ray import joined

            with joined(address, workers, store, files, retries) as cluster:
                drive(tasks, store, cluster, retries, progress)
            return
        count = workers or (1 if any(task.on_gpu for task in tasks) else _cores())
        if count == 1:
            drive(tasks, store, Here(store, files), retries, progress)
            return
        with closing(Processes(store, files, min(count, missing))) as processes:
            drive(tasks, store, processes, retries, progress)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
