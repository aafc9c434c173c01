"""`sharpmax env`: versions, devices and extras, for bug reports; needs neither Typer nor rich."""

import argparse
import importlib.util
import json
from typing import Annotated, Any

__all__ = ["EXTRAS", "add_to", "describe", "main"]

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
        "matplotlib",
        "plotly",
        "jinja2",
    ),
    "lm-eval": ("transformers", "accelerate", "safetensors", "lm_eval"),
    "monitor": ("transformers", "accelerate", "safetensors", "prometheus_client"),
    "clrs": ("attrs", "clrs"),
    "reproduce": ("typer", "rich", "scipy", "safetensors", "matplotlib", "plotly", "jinja2"),
    "report": ("matplotlib", "plotly", "jinja2"),
    "ray": ("ray",),
}
"""The modules that each extra of the package brings, or stands for."""

_HELP = "Show versions, devices, threads and which extras are installed."
_EXAMPLE = "Example: sharpmax env --json"


# Annotations are read when the function is made, unlike elsewhere, because Typer is a name inside it only.
def add_to(app: Any) -> None:
    """Add the command."""
    import typer

    @app.command(help=_HELP, epilog=_EXAMPLE)  # type: ignore[untyped-decorator]
    def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
        _print(as_json)


def main(arguments: list[str]) -> int:
    """The command without Typer."""
    parser = argparse.ArgumentParser(prog="sharpmax env", description=_HELP, epilog=_EXAMPLE)
    parser.add_argument("--json", action="store_true", help="print JSON")
    _print(parser.parse_args(arguments).json)
    return 0


def describe() -> dict[str, Any]:
    """What `sharpmax env` shows, as plain values; no optional package is imported for it."""
    import torch

    from sharpmax.experiments.provenance import hardware, versions

    return {
        "versions": versions(),
        "hardware": hardware(),
        "devices": ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        + (["mps"] if torch.backends.mps.is_available() else []),
        "threads": torch.get_num_threads(),
        "extras": {extra: _missing(modules) for extra, modules in EXTRAS.items()},
    }


def _missing(modules: tuple[str, ...]) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


def _print(as_json: bool) -> None:
    found = describe()
    if as_json:
        found["extras"] = {
            extra: {"installed": not missing, "missing": missing} for extra, missing in found["extras"].items()
        }
        print(json.dumps(found, indent=2, ensure_ascii=False))
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
    for extra, missing in found["extras"].items():
        state = "installed" if not missing else f"not installed (no {', '.join(missing)})"
        lines.append((f"extra {extra}", state))
    for name, value in lines:
        print(f"{name:<13} {value}")
