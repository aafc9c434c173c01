"""The tasks of growing size that small models are compared on, by name."""

from __future__ import annotations

from collections.abc import Mapping

from sharpmax.errors import reject
from sharpmax.tasks.max_retrieval import MAX, SORT
from sharpmax.tasks.sized import COPY, RECALL, SizedTask

SIZED_TASKS: Mapping[str, SizedTask] = {task.name: task for task in (MAX, RECALL, SORT, COPY)}


def sized_task(name: str) -> SizedTask:
    """The task of that name."""
    if name not in SIZED_TASKS:
        reject("--task", repr(name), ", ".join(SIZED_TASKS))
    return SIZED_TASKS[name]
