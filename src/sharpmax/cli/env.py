"""`sharpmax env`: versions, devices and extras, for bug reports; needs neither Typer nor rich."""

import argparse
import importlib.util
from typing import Any

from sharpmax.cli.json_output import answer
from sharpmax.errors import install_command

EXTRAS: dict[str, tuple[str, ...]] = {
    "cli": ("typer", "rich"),
    "entmax": ("entmax",),
    "fit": ("scipy",),
    "frame": ("pandas",),
    "jax": ("jax",),
    "triton": ("triton",),
    "hf": ("transformers", "accelerate", "safetensors"),
    "models": ("transformers", "accelerate", "safetensors", "gguf"),
    "language": (
        "typer",
        "rich",
        "scipy",
        "transformers",
        "accelerate",
        "safetensors",
        "gguf",
        "altair",
        "vl_convert",
        "jinja2",
    ),
    "lm-eval": ("transformers", "accelerate", "safetensors", "lm_eval"),
    "monitor": ("transformers", "accelerate", "safetensors", "prometheus_client"),
    "clrs": ("attrs", "clrs"),
    "reproduce": ("typer", "rich", "scipy", "safetensors", "altair", "vl_convert", "jinja2"),
    "report": ("altair", "vl_convert", "jinja2"),
    "ray": ("ray",),
}
"""The modules that each extra of the package brings, or stands for."""

_ALONE = {"clrs": ("clrs", "dm-clrs==2.0.3")}
"""A module that an extra stands for and cannot bring, because what its package declares is not wanted."""

_HELP = "Show versions, devices, threads, and which extras are installed or how to install them."
_EXAMPLE = "sharpmax env --json"


# Annotations are read when the function is made, unlike elsewhere, because Typer is a name inside it only.
def add_to(app: Any) -> None:
    """Add the command."""
    from sharpmax.cli.options import TOOLS, AsJson, add

    def env(as_json: AsJson = False) -> None:
        _print(as_json)

    env.__doc__ = _HELP
    add(app, env, example=_EXAMPLE, panel=TOOLS)


def main(arguments: list[str]) -> int:
    """The command without Typer."""
    parser = argparse.ArgumentParser(prog="sharpmax env", description=_HELP, epilog=f"Example: {_EXAMPLE}")
    parser.add_argument("--json", action="store_true", help="Print one JSON document and nothing else.")
    _print(parser.parse_args(arguments).json)
    return 0


def describe() -> dict[str, Any]:
    """What `sharpmax env` shows, as plain values; no optional package is imported for it."""
    import torch

    from sharpmax.provenance import hardware, versions

    return {
        "versions": versions(),
        "hardware": hardware(),
        "devices": ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        + (["mps"] if torch.backends.mps.is_available() else []),
        "threads": torch.get_num_threads(),
        "extras": {extra: _state(extra, modules) for extra, modules in EXTRAS.items()},
    }


def _state(extra: str, modules: tuple[str, ...]) -> dict[str, Any]:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return {"installed": not missing, "missing": missing, "install": _install(extra, missing) if missing else None}


def _install(extra: str, missing: list[str]) -> str:
    """The line that brings an extra, as it is typed at a shell."""
    module, package = _ALONE.get(extra, ("", ""))
    others = [name for name in missing if name != module]
    lines = [install_command(extra, " ".join(others))] if others else []
    return " && ".join(lines + ([f"pip install --no-deps {package}"] if module in missing else []))


def _print(as_json: bool) -> None:
    found = describe()
    if as_json:
        answer(found)
        return
    machine = found["hardware"]
    ram = "unknown" if machine["ram_gb"] is None else f"{machine['ram_gb']:g} GB"
    lines = [(name, version or "not installed") for name, version in found["versions"].items()]
    lines += [
        ("system", machine["system"]),
        ("cpu", f"{machine['cpu']}, {machine['cores']} cores"),
        ("memory", ram),
        ("gpu", machine["gpu"] or "none"),
        ("devices", ", ".join(found["devices"])),
        ("threads", str(found["threads"])),
    ]
    for extra, state in found["extras"].items():
        without = f"not installed (no {', '.join(state['missing'])}): {state['install']}"
        lines.append((f"extra {extra}", "installed" if state["installed"] else without))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}} {value}")
