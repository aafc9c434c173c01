"""A unit of work that any process can run, and its outcome."""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax import errors
from sharpmax.errors import SharpmaxError, UnsupportedError, reject
from sharpmax.experiments.engines import plugins
from sharpmax.experiments.threads import one_thread_each, without_denormals


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


Call = tuple[str, Mapping[str, Any], bool]
"""A task as it travels: its function, its arguments, and whether it is given a blob."""

Answer = tuple[dict[str, Any], "bytes | None"]
"""What comes back, in plain values: `{"record": …}` and the blob, or `{"error": …, "kind": …}` and None."""


def function_named(name: str) -> Callable[..., Outcome]:
    """The function that `"package.module:function"` names."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as problem:
        reject("function", f"{name!r} ({problem})", "package.module:function")
    function: Callable[..., Outcome] = found
    return function


def answer(call: Call, files: Sequence[tuple[str, str]], blob: bytes | None) -> Answer:
    """Do a task: one thread an operation, no denormals, the user's `files` (path and text) imported before."""
    name, arguments, given = call
    try:
        with one_thread_each(), without_denormals():
            for path, text in files:
                plugins.load(plugins.Plugin(path, text))
            function = function_named(name)
            outcome = function(blob=blob, **arguments) if given else function(**arguments)
        return _checked(name, outcome)
    except (Exception, SystemExit) as problem:
        return _failed(problem), None


def _checked(name: str, outcome: object) -> Answer:
    if not isinstance(outcome, Outcome):
        raise UnsupportedError(f"{name} gave a {type(outcome).__name__}; allowed: an Outcome")
    try:
        plain = outcome.plain()
    except (TypeError, ValueError) as problem:
        raise UnsupportedError(
            f"{name} gave a record that JSON cannot hold ({problem}); allowed: texts, finite numbers, lists, None"
        ) from None
    return {"record": plain.record}, plain.blob


def _failed(problem: BaseException) -> dict[str, Any]:
    text = " ".join(str(problem).split())
    if isinstance(problem, SharpmaxError):
        return {"error": text, "kind": type(problem).__name__}
    frames = traceback.extract_tb(problem.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return {"error": f"{type(problem).__name__}: {text[:500]}{where}", "kind": None}


def error_of(kind: str, text: str) -> SharpmaxError:
    """The error that was raised elsewhere; its kind is one of `sharpmax.errors`, or the nearest there is."""
    found = getattr(errors, kind, SharpmaxError)
    if not (isinstance(found, type) and issubclass(found, SharpmaxError)):
        found = SharpmaxError
    return found.__new__(found, text)  # the constructors of some take other things than the text
