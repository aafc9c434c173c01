"""Tasks by name, or from a Python file of the user."""

from __future__ import annotations

import runpy
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from sharpmax.errors import FileFormatError, reject, reject_type
from sharpmax.tasks.formats import CONTROLS, FORMATS, SINGLE, TRAINING
from sharpmax.tasks.prompt import Task
from sharpmax.tasks.ruler import RULER

TASKS: Mapping[str, Task] = MappingProxyType(
    {task.name: task for task in (*SINGLE, *FORMATS, *RULER, *TRAINING, *CONTROLS)}
)
"""The tasks that come with the package, by name."""

GROUPS: Mapping[str, tuple[Task, ...]] = MappingProxyType(
    {"formats": FORMATS, "ruler": RULER, "training": TRAINING, "control": CONTROLS}
)
"""Groups of tasks by name."""


def get_tasks(names: str | Path) -> tuple[Task, ...]:
    """Return tasks by comma-separated names of tasks or groups, or paths of Python files.

    >>> [task.name for task in get_tasks("kv,control")]
    ['kv', 'control/stories', 'control/repeated', 'control/documentation']
    """
    if not isinstance(names, str):
        return (get_task(names),)
    words = [word.strip() for word in names.split(",")]
    return tuple(task for word in words for task in GROUPS.get(word) or (get_task(word),))


def get_task(name_or_path: str | Path) -> Task:
    """Return a task by name, or the `TASK` that a Python file defines. The file is executed.

    >>> get_task("kv").summary
    'the number of one name in a list of n'
    """
    alone = sorted(name for name in TASKS if "/" not in name)
    names = f"one of {alone}, a task of {', '.join(GROUPS)} such as formats/csv"
    allowed = f"{names}, or the path of a Python file that defines TASK"
    if not isinstance(name_or_path, (str, Path)):
        reject_type("task", type(name_or_path).__name__, allowed)
    if isinstance(name_or_path, str) and name_or_path in TASKS:
        return TASKS[name_or_path]
    path = Path(name_or_path)
    if not path.is_file():
        reject("task", repr(str(name_or_path)), allowed)
    try:
        task = runpy.run_path(str(path)).get("TASK")
    except (Exception, SystemExit) as problem:
        lines = [frame.lineno for frame in traceback.extract_tb(problem.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        what = " ".join(str(problem).split())
        raise FileFormatError(f"task: {str(path)!r} cannot be run ({type(problem).__name__}{where}: {what})") from None
    if not isinstance(task, Task):
        found = "does not define TASK" if task is None else f"defines TASK as a {type(task).__name__}"
        raise FileFormatError(f"task: {str(path)!r} {found}; it must define TASK = sharpmax.tasks.Task(...)")
    return task
