"""Where the numbers and the models come from, as pairs of words and values."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from sharpmax.report.tables import Tables
from sharpmax.report.words import count, plural

__all__ = ["Pairs", "files_of", "origin_of_run", "origin_of_weights"]

Pairs = list[tuple[str, str]]


def origin_of_run(command: str, provenance: Mapping[str, Any], tables: Tables) -> Pairs:
    """Command, date, commit, seed, versions and hardware of a run, and how long it took."""
    pairs = [("Command", command), *_pairs(provenance)]
    if named := files_of(command, provenance, tables):
        pairs.append(("Files of the command", "; ".join(f"{name}: {where}" for name, where in named.items())))
    seconds = tables.get("setting", {}).get("seconds") or {}
    if seconds:
        pairs.append(("Time taken", ", ".join(f"{name} {_duration(value)}" for name, value in seconds.items())))
    return pairs


def files_of(command: str, provenance: Mapping[str, Any], tables: Tables) -> dict[str, str]:
    """Where the policies and files that a command names can be found again, by their names in it.

    New results hold them (`provenance.files`). Earlier ones hold every policy they were made with, by its name, and
    the command that trained every model they examined.
    """
    known = {str(one["name"]): one for one in provenance.get("files") or []}
    setting = tables.get("setting")
    arms = (setting.get("arms") if isinstance(setting, Mapping) else None) or {}
    found = {}
    for word in _inputs(command):
        stem = PurePosixPath(word).stem
        if word in known:
            found[word] = "in results.json, provenance.files" if "text" in known[word] else _digest(known[word])
        elif word.endswith(".json") and isinstance(arms, Mapping) and (arms.get(stem) or {}).get("policy"):
            found[word] = f"in results.json, tables.setting.arms.{stem}.policy"
        elif isinstance(tables.get("training"), Mapping) and "command" in (tables["training"].get(word) or {}):
            found[word] = f"trained by the command in results.json, tables.training.{word}.command"
    return found


def _inputs(command: str) -> list[str]:
    """The words of a command that may name something to read: all but its own, options, and what is written to."""
    words = shlex.split(command)
    return [
        part
        for before, word in pairwise(words)
        if before != "--out" and not word.startswith("--")
        for part in word.split(",")
    ]


def _digest(about: Mapping[str, Any]) -> str:
    return f"a file of {count(about['bytes'])} bytes, SHA-256 {about['sha256']}"


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
