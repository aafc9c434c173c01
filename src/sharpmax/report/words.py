"""Numbers, names, warnings and provenance as pages and terminals write them."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from sharpmax.theory import bounds

SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"


def count(n: float | str) -> str:
    """A number of items."""
    return f"{round(float(n)):,}"


def span(sizes: Sequence[float | str]) -> str:
    """From the first to the last of some sizes."""
    return " to ".join(dict.fromkeys((count(sizes[0]), count(sizes[-1]))))


def whole(n: float | str) -> str:
    """A horizon as a number of items, the largest that fits: never rounded up.

    >>> whole(55.598)
    '55'
    """
    return f"{bounds.whole(float(n)):,}"


def whole_from_log10(exponent: float) -> str:
    """A horizon that may be enormous, from its logarithm to base 10; never rounded up.

    >>> whole_from_log10(3.4745), whole_from_log10(23.7)
    ('2,981', '10²³')
    """
    if exponent < 7.0:
        return whole(10.0**exponent)
    return "10" + "".join(SUPERSCRIPTS[int(digit)] for digit in str(math.floor(exponent)))


def plural(n: int, noun: str) -> str:
    """A number with its noun."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def share(value: float) -> str:
    """A percentage without its sign; small ones keep a significant digit, and only 100 is written as 100.

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
    """A difference of percentages, always signed, with a real minus.

    >>> points(15.32), points(-0.4), points(0.01), points(0.01, 2)
    ('+15.3', '−0.4', '0.0', '+0.01')
    """
    text = f"{value:+.{places}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def milliseconds(value: float) -> str:
    """A time, without its unit."""
    return count(value) if value >= 100.0 else f"{value:.1f}" if value >= 10.0 else f"{value:.2f}"


def nats(value: float) -> str:
    """An entropy or a spread of logits, without its unit."""
    return (f"{value:.0f}" if abs(value) >= 100.0 else f"{value:.2f}").replace("-", "−")


def estimate(mean: str, error: float | None) -> str:
    """A mean with its standard error, where there is one, to as many places.

    >>> estimate("49.9", 0.8123), estimate("99.9", 0.002), estimate("49.9", None)
    ('49.9 ± 0.8', '99.9 ± 0.002', '49.9')
    """
    if error is None:
        return mean
    places = len(mean.partition(".")[2])
    text = f"{error:.{places}f}"
    return f"{mean} ± {text if float(text) or not error else f'{error:.1g}'}"


def probability(p: float) -> str:
    """A p value."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def joined(parts: Sequence[str]) -> str:
    """Parts of a sentence with commas and an "and"."""
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def capital(text: str) -> str:
    """The text with a capital in front, the rest as it is."""
    return text[:1].upper() + text[1:]


CHAT = "chat"
"""The column of the model's own answers among the lengths of windows."""


def texts_in_order(columns: Iterable[str]) -> list[str]:
    """Domains by name and length, and the model's own answers last; each once.

    >>> texts_in_order(["chat", "6144", "2048", "chat"]), texts_in_order(["docs/2048", "docs/512", "code/512"])
    (['2048', '6144', 'chat'], ['code/512', 'docs/512', 'docs/2048'])
    """
    known = set(columns)
    parts = sorted((name.rpartition("/") for name in known - {CHAT}), key=lambda part: (part[0], int(part[2])))
    return [*("".join(part) for part in parts), *([CHAT] if CHAT in known else [])]


def text_name(column: str) -> str:
    """A column in words.

    >>> text_name("2048"), text_name("chat"), text_name("docs/512")
    ('2,048 tokens of text', 'own answers', 'docs, 512 tokens')
    """
    if column == CHAT:
        return "own answers"
    name, slash, length = column.rpartition("/")
    return f"{name}, {int(length):,} tokens" if slash else f"{int(column):,} tokens of text"


_SHARE = re.compile(r"(\d+(?:\.\d+)?)% ")


def merged(remarks: Sequence[str]) -> list[str]:
    """Each remark once: those that differ in the share they begin with, one per process, become one.

    >>> merged(["3.0% of the rows are flat; said once for this policy", "1.5% of the rows are flat", "It is slow."])
    ['1.5 to 3.0% of the rows are flat', 'It is slow']
    """
    shares: dict[str, list[str]] = {}
    for remark in remarks:
        text = remark.removesuffix("; said once for this policy").rstrip(".")
        found = _SHARE.match(text)
        shares.setdefault(text[found.end() :] if found else text, []).extend([found[1]] if found else [])
    lines = []
    for rest, known in shares.items():
        ends = dict.fromkeys((min(known, key=float), max(known, key=float))) if known else {}
        lines.append((" to ".join(ends) + "% " if ends else "") + rest)
    return lines


Pairs = list[tuple[str, str]]
"""Terms with their texts, as a page lists them."""


def origin_of_run(command: str, provenance: Mapping[str, Any], tables: Mapping[str, Any]) -> Pairs:
    """Command, date, commit, seed, versions and hardware of a run, and how long it took."""
    files = [f"{name}: {where}" for name, where in files_of(command, provenance, tables).items()]
    seconds = (tables.get("setting", {}).get("seconds") or {}).items()
    found = {
        "Command": command,
        **_machine(provenance),
        "Files of the command": "; ".join(files),
        "Time taken": ", ".join(f"{name} {_duration(value)}" for name, value in seconds),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def origin_of_weights(weights: Mapping[str, Any]) -> Pairs:
    """Where the models of a recipe were trained, how long, and from which seeds."""
    trained = weights.get("trained") or {}
    found = {
        "Training steps": count(weights["steps"]),
        "Seeds": ", ".join(map(str, weights["seeds"])),
        "Command": trained.get("command"),
        **_machine(trained),
        "Time taken": _duration(trained["seconds"]) if trained.get("seconds") is not None else "",
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]


def files_of(command: str, provenance: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, str]:
    """Where the policies and files that a command names can be found again, by their names in it.

    New results hold them (`provenance.files`). Earlier ones hold every policy they were made with, by its name, and
    the command that trained every model they examined.
    """
    known = {str(one["name"]): one for one in provenance.get("files") or []}
    setting = tables.get("setting")
    variants = (setting.get("arms") if isinstance(setting, Mapping) else None) or {}
    found = {}
    for word in _inputs(command):
        stem = PurePosixPath(word).stem
        if "text" in known.get(word, ()):
            found[word] = "in results.json, provenance.files"
        elif word in known:
            found[word] = f"a file of {count(known[word]['bytes'])} bytes, SHA-256 {known[word]['sha256']}"
        elif word.endswith(".json") and isinstance(variants, Mapping) and (variants.get(stem) or {}).get("policy"):
            found[word] = f"in results.json, tables.setting.arms.{stem}.policy"
        elif isinstance(tables.get("training"), Mapping) and "command" in (tables["training"].get(word) or {}):
            found[word] = f"trained by the command in results.json, tables.training.{word}.command"
    return found


def _inputs(command: str) -> list[str]:
    """The words of a command that may name something to read: all but its own, options, and what is written to."""
    try:
        words = shlex.split(str(command))
    except ValueError:  # somebody changed it
        words = str(command).split()
    read = (word for before, word in pairwise(words) if before != "--out" and not word.startswith("--"))
    return [part for word in read for part in word.split(",")]


def _machine(provenance: Mapping[str, Any]) -> dict[str, Any]:
    hardware = provenance.get("hardware") or {}
    cores, memory = hardware.get("cores"), hardware.get("ram_gb")
    parts = [
        hardware.get("cpu"), plural(cores, "core") if cores else "", f"{memory:g} GB memory" if memory else "",
        hardware.get("gpu") or ("no GPU" if hardware else ""), hardware.get("system"),
    ]  # fmt: skip
    versions = provenance.get("versions") or {}
    return {
        **{name.capitalize(): provenance.get(name) for name in ("date", "commit", "seed")},
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Hardware": ", ".join(str(part) for part in parts if part),
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def baseline(name: str) -> str:
    """The name of a variant; earlier results call the model without a policy "as it comes"."""
    return "baseline" if name == "as it comes" else name
