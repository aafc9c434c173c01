"""`sharpmax env`: versions, devices and extras, for bug reports; needs neither Typer nor rich."""

import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

from sharpmax.cli import answer
from sharpmax.errors import install_command
from sharpmax.provenance import hardware, installed_version, versions

try:
    from sharpmax.cli.options import AsJson
except ImportError:  # the command works without Typer
    if not TYPE_CHECKING:
        AsJson = bool

_ALONE = {"clrs": "dm-clrs==2.0.3"}
"""A package that an extra needs and cannot declare, because its own dependencies are not wanted."""


# Annotations are read when the function is made, unlike elsewhere: AsJson may be plain bool.
def env(as_json: AsJson = False) -> None:
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
    """What `sharpmax env` shows, as plain values; no optional package is imported for it."""
    import torch

    return {
        "versions": versions(),
        "hardware": hardware(),
        "devices": ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        + (["mps"] if torch.backends.mps.is_available() else []),
        "threads": torch.get_num_threads(),
        "extras": {extra: _state(extra) for extra in extras()},
    }


def extras() -> list[str]:
    """The extras of the installed package, without those for its development."""
    try:
        declared = metadata.metadata("sharpmax").get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:  # a copy of the source
        return []
    return [extra for extra in declared if extra not in ("dev", "docs")]


def missing_packages(extra: str) -> list[str]:
    """Packages that an extra declares and that are not installed."""
    found: list[str] = []
    try:
        declared = metadata.requires("sharpmax") or []
    except metadata.PackageNotFoundError:
        return []
    for requirement in declared:
        package, _, marker = requirement.partition(";")
        if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
            continue
        if inner := re.match(r"sharpmax\[(.*)\]", package):
            found += [one for name in inner[1].split(",") for one in missing_packages(name)]
        elif (name := re.split(r"[^\w.-]", package)[0]) and installed_version(name) is None:
            found.append(name)
    return list(dict.fromkeys(found))


def _state(extra: str) -> dict[str, Any]:
    declared, alone = missing_packages(extra), _ALONE.get(extra)
    lines = [install_command(extra, " ".join(declared))] if declared else []
    if alone is not None and installed_version(name := alone.partition("==")[0]) is None:
        declared = [*declared, name]
        lines.append(f"pip install --no-deps {alone}")
    return {"installed": not declared, "missing": declared, "install": " && ".join(lines) or None}
