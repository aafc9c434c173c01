"""Writing files so that a reader never meets half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sharpmax.errors import ArgumentError

__all__ = ["write_bytes", "write_text"]


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` to `path` in one step: the old content stays until the new one is complete."""
    return write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write `data` to `path` in one step, as `write_text`."""
    path = Path(path)
    partial = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files for the owner alone; a result is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        Path(partial).chmod(0o666 & ~umask)
        Path(partial).replace(path)
    except OSError as problem:
        raise ArgumentError(
            f"path: cannot write {str(path)!r} ({problem.strerror}); allowed: a path in a folder you may write to"
        ) from problem
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)  # still there only if something went wrong, whatever it was
    return path
