"""What run a folder belongs to, and what to say when the disk is full."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharpmax.errors import ArgumentError, FileFormatError, SharpmaxError
from sharpmax.experiments.identity import check_identity, plain
from sharpmax.files import write_text

__all__ = ["RUN", "belongs", "disk_watched", "read_run"]

RUN = "run.json"
# Libraries wrap the error of the system in errors of their own.
_FULL = ("no space left", "disk quota", "file too large", "pytorchstreamwriter failed", "fail at inline_container")


def read_run(folder: Path) -> dict[str, Any] | None:
    """The settings a folder was begun with; None where there are none."""
    path = folder / RUN
    if not path.is_file():
        return None
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise FileFormatError(f"--out: {str(path)!r} is not what sharpmax wrote; remove it, or choose another folder")
    return body


def belongs(folder: Path, identity: Mapping[str, Any], *, used: bool, resume: bool) -> None:
    """Let `folder` hold the run of these settings, or say why not: `used` is whether there is something to lose."""
    before = read_run(folder)
    if before is not None and used and not resume:
        raise ArgumentError(
            f"--out: {str(folder)!r} holds a run already; add --resume to go on with it, or choose another folder"
        )
    if before is not None and (used or resume):
        check_identity(folder / RUN, before, plain(identity))
    write_text(folder / RUN, json.dumps(plain(identity), indent=2, ensure_ascii=False) + "\n")


@contextmanager
def disk_watched(folder: Path, need: int = 0, what: str = "what is written") -> Iterator[None]:
    """Say in one line that a disk is too small: before the work where `need` bytes are not free, or when it is full."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ArgumentError(
            f"--out: {str(folder)!r} has {free / 1e9:.1f} GB free; allowed: a disk with {need / 1e9:.1f} GB, for {what}"
        )
    try:
        yield
    except Exception as problem:
        # A file that cannot be written is an error of our own, with that of the system behind it.
        root = problem.__cause__ if isinstance(problem, SharpmaxError) else problem
        text = " ".join(str(root).split())
        number = root.errno if isinstance(root, OSError) else None
        full = number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(one in text.lower() for one in _FULL)
        if root is None or not full:
            raise
        raise SharpmaxError(
            f"--out: {str(folder)!r} is full ({text[:120]}); make room and run the same command with --resume: what "
            "was saved before is still there"
        ) from problem
