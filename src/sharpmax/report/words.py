"""How pages and terminals write numbers, names, warnings and provenance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def count(n: float | str) -> str:
    """A number of items."""
    return f"{round(float(n)):,}"


def span(sizes: Sequence[float | str]) -> str:
    """The first and last of some sizes: "8 to 64"."""
    return " to ".join(dict.fromkeys((count(sizes[0]), count(sizes[-1]))))


def plural(n: int, noun: str) -> str:
    """A number with its noun."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def share(value: float) -> str:
    """A percentage without the % sign; small values keep a significant digit, and only 100 is written as 100.

    >>> share(98.88), share(0.4321), share(0.0123), share(99.98)
    ('98.9', '0.43', '0.012', '99.9')
    """
    if 99.9 < value < 100.0:
        return "99.9"
    if value >= 1.0 or value == 0.0:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def percent(value: float) -> str:
    """A percentage."""
    return share(value) + "%"


def points(value: float, places: int = 1) -> str:
    """A difference of percentages, signed, with a true minus sign.

    >>> points(15.32), points(-0.4), points(0.01), points(0.01, 2)
    ('+15.3', '−0.4', '0.0', '+0.01')
    """
    text = f"{value:+.{places}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def probability(p: float) -> str:
    """A p value."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def joined(parts: Sequence[str]) -> str:
    """Parts joined by commas and "and"."""
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


_SHARE = re.compile(r"(\d+(?:\.\d+)?)% ")


def merged(remarks: Sequence[str]) -> list[str]:
    """Remarks without duplicates; those that differ only in their leading percentage are merged.

    >>> merged(["3.0% of the rows are flat; said once for this policy", "1.5% of the rows are flat", "It is slow."])
    ['1.5 to 3.0% of the rows are flat', 'It is slow']
    """
    shares: dict[str, list[str]] = {}
    for remark in remarks:
        text = re.sub("; (said once for this|shown once per) policy$", "", remark).rstrip(".")
        found = _SHARE.match(text)
        shares.setdefault(text[found.end() :] if found else text, []).extend([found[1]] if found else [])
    lines = []
    for rest, known in shares.items():
        ends = dict.fromkeys((min(known, key=float), max(known, key=float))) if known else {}
        lines.append((" to ".join(ends) + "% " if ends else "") + rest)
    return lines


Pairs = list[tuple[str, str]]
"""Terms with their descriptions."""


def origin_of_run(command: str, provenance: Mapping[str, Any], tables: Mapping[str, Any]) -> Pairs:
    """Command, date, commit, seed, versions, hardware, files and duration of a run."""
    hardware = provenance.get("hardware") or {}
    cores, memory = hardware.get("cores"), hardware.get("ram_gb")
    parts = [
        hardware.get("cpu"), plural(cores, "core") if cores else "", f"{memory:g} GB memory" if memory else "",
        hardware.get("gpu") or ("no GPU" if hardware else ""), hardware.get("system"),
    ]  # fmt: skip
    files = [f"{one['name']} (SHA-256 {one['sha256']})" for one in provenance.get("files") or []]
    seconds = (tables.get("setting", {}).get("seconds") or {}).items()
    found = {
        "Command": command,
        **{name.capitalize(): provenance.get(name) for name in ("date", "commit", "seed")},
        "Versions": ", ".join(f"{name} {version}" for name, version in (provenance.get("versions") or {}).items()),
        "Hardware": ", ".join(str(part) for part in parts if part),
        "Files of the command": "; ".join(files),
        "Time taken": ", ".join(f"{name} {_duration(value)}" for name, value in seconds),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def text_name(column: str) -> str:
    """A column in words.

    >>> text_name("2048"), text_name("chat"), text_name("docs/512")
    ('2,048 tokens of text', 'own answers', 'docs, 512 tokens')
    """
    if column == "chat":
        return "own answers"
    name, slash, length = column.rpartition("/")
    return f"{name}, {int(length):,} tokens" if slash else f"{int(column):,} tokens of text"
