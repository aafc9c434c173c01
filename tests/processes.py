"""Processes that are killed: forked by a server that has loaded the libraries once."""

from __future__ import annotations

import multiprocessing
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "transformers", "transformers.trainer", "sharpmax.cli"])


def exit_code(script: str, **names: Any) -> int | None:
    """The exit code of a script, to which these names are known, in a process of its own; negative for a signal."""
    process = _CONTEXT.Process(target=exec, args=(script, names))
    process.start()
    process.join(1200)
    return process.exitcode
