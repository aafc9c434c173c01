"""Where the numbers and the models come from, as pairs of words and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.tables import Tables
from sharpmax.report.words import count, plural

__all__ = ["Pairs", "origin_of_run", "origin_of_weights"]

Pairs = list[tuple[str, str]]


def origin_of_run(command: str, provenance: Mapping[str, Any], tables: Tables) -> Pairs:
    """Command, date, commit, seed, versions and hardware of a run, and how long it took."""
    pairs = [("Command", command), *_pairs(provenance)]
    seconds = tables.get("setting", {}).get("seconds") or {}
    if seconds:
        pairs.append(("Time taken", ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())))
    return pairs


def origin_of_weights(weights: Mapping[str, Any]) -> Pairs:
    """Where the models of a recipe were trained, how long, and from which seeds."""
    pairs = [
        ("Training steps", count(weights["steps"])),
        ("Seeds", ", ".join(str(seed) for seed in weights["seeds"])),
    ]
    trained = weights.get("trained")
    if not trained:
        return pairs
    if trained.get("command"):
        pairs.append(("Command", str(trained["command"])))
    pairs += _pairs(trained)
    if trained.get("seconds") is not None:
        pairs.append(("Time taken", _duration(trained["seconds"])))
    return pairs


def _pairs(provenance: Mapping[str, Any]) -> Pairs:
    versions, hardware = provenance.get("versions") or {}, provenance.get("hardware") or {}
    found = {
        "Date": provenance.get("date"),
        "Commit": provenance.get("commit"),
        "Seed": provenance.get("seed"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Hardware": _hardware(hardware),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def _hardware(hardware: Mapping[str, Any]) -> str:
    parts = [str(hardware["cpu"])] if hardware.get("cpu") else []
    if hardware.get("cores"):
        parts.append(plural(hardware["cores"], "core"))
    if hardware.get("ram_gb"):
        parts.append(f"{hardware['ram_gb']:g} GB memory")
    if hardware:
        parts.append(str(hardware["gpu"]) if hardware.get("gpu") else "no GPU")
    if hardware.get("system"):
        parts.append(str(hardware["system"]))
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
