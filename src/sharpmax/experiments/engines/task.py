"""A piece of work that can be done in any process, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Outcome", "Progress", "Task"]


@dataclass(frozen=True)
class Task:
    """A call of a function, by a name that stays the same from run to run."""

    key: str
    function: str
    """`"package.module:function"`, imported where the work is done; it returns an `Outcome`."""

    arguments: Mapping[str, Any]
    """Plain JSON values. A `device` that begins with "cuda" asks for a GPU."""

    after: str | None = None
    """The key of the task whose blob the function is given as keyword `blob`."""

    label: str = ""
    """What people see meanwhile; the key where there is none."""

    @property
    def shown(self) -> str:
        """What people see."""
        return self.label or self.key

    @property
    def on_gpu(self) -> bool:
        """Whether the work is done on a GPU."""
        return str(self.arguments.get("device", "")).startswith("cuda")


@dataclass(frozen=True)
class Outcome:
    """What a task's function returns."""

    record: dict[str, Any]
    """Plain JSON values, finite numbers only: a line of the store."""

    blob: bytes | None = None
    """Kept as a file of the store, and given to the tasks that come after."""

    def plain(self) -> Outcome:
        """The outcome as it is when it comes back from the store; ValueError or TypeError where JSON cannot hold it."""
        blob = None if self.blob is None else bytes(self.blob)
        return Outcome(json.loads(json.dumps(self.record, allow_nan=False)), blob)


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    done: int
    total: int
    running: tuple[str, ...] = ()
    """Labels of the tasks at work."""
