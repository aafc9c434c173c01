"""Where a number comes from: commit, versions, hardware, seed and date.

Nothing here identifies a machine or an account: no host names, user names or paths.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path, PurePath
from typing import Any

import sharpmax
from sharpmax.errors import reject, reject_type


def provenance(seed: int | None) -> dict[str, Any]:
    """What a reader needs to repeat a command and to judge how close the results should be."""
    return {
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(),
        "seed": seed,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def check_seed(seed: object) -> object:
    """Return a valid seed, or reject it."""
    allowed = "a whole number, 0 … 2^63 − 1"
    if isinstance(seed, bool) or not isinstance(seed, int):
        reject_type("seed", repr(seed), allowed)
    if not 0 <= seed < 2**63:
        reject("seed", seed, allowed)
    return seed


def check_amounts(length: int, repeat: int, least: int = 2) -> None:
    """Reject a length or a number of rounds that is too small."""
    if length < least:
        reject("length", length, f"{least} or more")
    if repeat < 1:
        reject("repeat", repeat, "1 or more")


def without_machine(path: PurePath) -> str:
    """A path as results show it: only the name, if the path is outside the current folder."""
    inside = not path.is_absolute() and ".." not in path.parts
    return path.as_posix() if inside else path.name or "DIR"


def versions() -> dict[str, str | None]:
    """Versions of sharpmax, Python and the libraries that results depend on, without importing them."""
    found: dict[str, str | None] = {"sharpmax": sharpmax.__version__, "python": platform.python_version()}
    found |= {name: installed_version(name) for name in ("torch", "numpy")}
    return found | {name: version for name in ("jax", "transformers", "triton") if (version := installed_version(name))}


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def usable_cores() -> int:
    """Cores that this process may use, which in a container may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def hardware() -> dict[str, Any]:
    """Processor, cores, memory in GB and GPU (None without one) of this machine."""
    try:
        ram_gb = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, OSError, ValueError):
        ram_gb = None
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "ram_gb": ram_gb,
        "gpu": _gpu_name(),
        "system": f"{platform.system()} {platform.machine()}".strip(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:(.+)$", text, re.MULTILINE | re.IGNORECASE):
            return " ".join(found[1].split())
    if platform.system() == "Darwin" and (name := _output_of(["sysctl", "-n", "machdep.cpu.brand_string"])):
        return name
    return platform.processor() or platform.machine() or "unknown"


def _gpu_name() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    return "Apple GPU (mps)" if torch.backends.mps.is_available() else None


def commit() -> str | None:
    """The commit of the running code, with `-dirty` if the code was changed; None outside a checkout.

    The environment variable SHARPMAX_COMMIT sets it for copies without a history.
    """
    if named := os.environ.get("SHARPMAX_COMMIT"):
        return named
    package = Path(sharpmax.__file__).resolve().parent
    root = _git(package, "rev-parse", "--show-toplevel")
    # sharpmax installed inside another checkout has nothing to do with that checkout's commit.
    if not root or package != Path(root).resolve() / "src" / package.name:
        return None
    head = _git(package, "rev-parse", "HEAD")
    # Only changes of the package count, not those of results files.
    changes = _git(package, "status", "--porcelain", "--", ".")
    if not head or changes is None:
        return None
    return head + ("-dirty" if changes else "")


def _git(folder: Path, *arguments: str) -> str | None:
    # Without optional locks `git status` does not write the index, so it never blocks the user's own git.
    return _output_of(["git", "--no-optional-locks", "-C", str(folder), *arguments])


def _output_of(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
