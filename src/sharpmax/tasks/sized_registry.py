"""The problems of growing size that small models are compared on, by name."""

from __future__ import annotations

from collections.abc import Mapping

from sharpmax.errors import reject
from sharpmax.tasks.copying import COPY
from sharpmax.tasks.recall import RECALL
from sharpmax.tasks.sets import MAX, SORT
from sharpmax.tasks.sized import SizedTask

__all__ = ["SIZED_TASKS", "sized_task"]

SIZED_TASKS: Mapping[str, SizedTask] = {task.name: task for task in (MAX, RECALL, SORT, COPY)}


def sized_task(name: str) -> SizedTask:
    """The problem of that name."""
    if name not in SIZED_TASKS:
        reject("--task", repr(name), ", ".join(SIZED_TASKS))
    return SIZED_TASKS[name]
