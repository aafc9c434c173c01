"""`sharpmax env`: versions, devices and extras, for bug reports."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from sharpmax.cli import answer, options
from sharpmax.errors import install_command, packages_of
from sharpmax.provenance import hardware, installed_version, versions

_ALONE = {"clrs": "dm-clrs==2.0.3"}
"""A package that an extra needs and cannot declare, because it must be installed with `--no-deps`."""


def env(as_json: options.AsJson = False) -> None:
    """Show versions, devices and extras, for bug reports."""
    found = describe()
    if as_json:
        answer(found)
        return
    machine = found["hardware"]
    lines = {name: version or "not installed" for name, version in found["versions"].items()} | {
        "system": machine["system"],
        "cpu": f"{machine['cpu']}, {machine['cores']} cores",
        "memory": "unknown" if machine["ram_gb"] is None else f"{machine['ram_gb']:g} GB",
        "gpu": machine["gpu"] or "none",
        "devices": ", ".join(found["devices"]),
        "threads": str(found["threads"]),
    }
    for extra, state in found["extras"].items():
        without = f"not installed (no {', '.join(state['missing'])}): {state['install']}"
        lines[f"extra {extra}"] = "installed" if state["installed"] else without
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}} {value}")


def describe() -> dict[str, Any]:
    """Return what `sharpmax env` prints as plain values, without importing optional packages."""
    import torch

    try:
        declared = metadata.metadata("sharpmax").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # a copy of the source
        declared = []
    return {
        "versions": versions(),
        "hardware": hardware(),
        "devices": ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        + (["mps"] if torch.backends.mps.is_available() else []),
        "threads": torch.get_num_threads(),
        "extras": {extra: _state(extra) for extra in declared if extra not in ("dev", "docs")},
    }


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed."""
    names = [re.split(r"[^\w.-]", requirement)[0] for requirement in packages_of(extra)]
    return [name for name in names if installed_version(name) is None]


def _state(extra: str) -> dict[str, Any]:
    missing, alone = missing_packages(extra), _ALONE.get(extra, "")
    lines = [install_command(extra, "")] if missing else []
    if alone and installed_version(name := alone.partition("==")[0]) is None:
        missing.append(name)
        lines.append(f"pip install --no-deps {alone}")
    return {"installed": not missing, "missing": missing, "install": " && ".join(lines) or None}
