"""The report section of `sharpmax bench --gpu`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.files import read_json, write_text
from sharpmax.report.figures import drawing, svg_text
from sharpmax.report.static import plain, sheet
from sharpmax.report.theme import BLUE, INK, SOFT, VERMILLION

Entry = dict[str, Any]

KINDS = {
    "stats": "Statistics pass",
    "attention": "Sharp attention, inference",
    "train": "Training step (forward and backward)",
    "decode": "Decode, one token",
}
"""What is measured, in the order in which it is told."""

_KEYS = (
    *("kind", "case", "ours_ms", "stock_ms", "ratio", "stock_backend", "counts", "agrees", "problem", "full_size"),
    *("floor", "limits", "errors", "rounds", "command", "provenance"),
)


def read_entries(path: str | Path) -> list[Entry]:
    """The entries of a file, or an error that says what is wrong with it."""
    body = read_json(path, "entries")
    if not isinstance(body, list) or not body or not all(isinstance(one, dict) for one in body):
        raise FileFormatError(f"entries: {str(path)!r} is not a list of cases; sharpmax bench --gpu --out writes one")
    for place, one in enumerate(body):
        if missing := [key for key in _KEYS if key not in one]:
            raise FileFormatError(f"entries: case {place} of {str(path)!r} has no {missing}; run its command again")
        if one["kind"] not in KINDS:
            raise FileFormatError(f"entries: case {place} has kind {one['kind']!r}; allowed: {list(KINDS)}")
    return body


def holds_entries(path: str | Path) -> bool:
    """Whether a file is a JSON list, which no other command writes."""
    file = Path(path)
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(64).lstrip().startswith(b"[")


def of_kind(entries: Sequence[Entry], kind: str) -> list[Entry]:
    """The entries of one kind."""
    return [one for one in entries if one["kind"] == kind]


_MEAN = "mean_"
_WORDS = {
    "mean_ratio": "× stock, mean of {n} cases",
    "ratio": "× stock, largest of {n} cases",
    "extra_bytes_per_row": "extra bytes per query row, largest of {n} cases",
}


@dataclass(frozen=True)
class Verdict:
    """A number, the limit it is held to, and whether it keeps it; None where this run cannot tell."""

    kind: str
    what: str
    value: float | None
    at_most: float
    reached: bool | None

    @property
    def word(self) -> str:
        """The verdict in a word or two."""
        return {True: "reached", False: "missed", None: "not judged"}[self.reached]


def verdicts(entries: Sequence[Entry]) -> list[Verdict]:
    """The verdicts of every kind that was measured; a case that is wrong makes its kind miss."""
    found = []
    for kind in KINDS:
        counted = [one for one in of_kind(entries, kind) if one["counts"]]
        limits: dict[str, float] = counted[0]["limits"] if counted else {}
        found += [_verdict(kind, quantity, limit, counted) for quantity, limit in limits.items()]
    return found


def _verdict(kind: str, quantity: str, limit: float, counted: Sequence[Entry]) -> Verdict:
    values = [one.get(quantity.removeprefix(_MEAN)) for one in counted]
    known = [value for value in values if value is not None]
    value = None
    if len(known) == len(values):
        value = statistics.fmean(known) if quantity.startswith(_MEAN) else max(known)
    reached = None
    if all(one["full_size"] for one in counted):
        if not all(one["agrees"] for one in counted):
            reached = False
        elif value is not None:
            reached = value <= limit
    return Verdict(kind, _WORDS[quantity].format(n=len(counted)), value, limit, reached)


def against_us(value: float | None, places: int) -> str:
    """A number that had better be small, rounded up, so that a miss never looks like a hit.

    >>> against_us(1.6203, 2), against_us(1.62, 2), against_us(None, 2)
    ('1.63', '1.62', '–')
    """
    if value is None:
        return "–"
    scale = 10**places
    # What is exact in decimals is not in binary: 1.62 · 100 is a little more than 162.
    return f"{math.ceil(value * scale - 1e-9) / scale:,.{places}f}"


_NONE = "–"

TARGET_COLUMNS = ("kind", "what", "measured", "target", "verdict")


def columns(kind: str) -> list[str]:
    """The headings of a kind's table."""
    pace = "TB/s" if kind == "decode" else "TFLOP/s"
    return [
        *("case", "ours ms", "stock ms", "stock kernel", "× stock", "floor", pace),
        *("extra B/row", "error ÷ allowed"),
    ]


def rows(entries: Sequence[Entry], kind: str) -> list[list[str]]:
    """One row per case; a case that is wrong has no numbers but that of its error."""
    return [_row(one) for one in of_kind(entries, kind)]


def _row(one: Entry) -> list[str]:
    floor = _NONE if one["floor"] is None else f"{one['floor']:.2f}"
    name = one["case"] + ("" if one["counts"] else " *")
    if one["ratio"] is None:
        return [name, "fails" if one["problem"] else "disagrees", *[_NONE] * 3, floor, *[_NONE] * 2, _error(one)]
    pace = one["tb_per_s"] if one["kind"] == "decode" else one["tflop_per_s"]
    return [
        name,
        f"{one['ours_ms']:.3f}",
        f"{one['stock_ms']:.3f}",
        one["stock_backend"],
        against_us(one["ratio"], 2),
        floor,
        f"{pace:.2f}" if one["kind"] == "decode" else f"{pace:,.0f}",
        against_us(one.get("extra_bytes_per_row"), 1),
        _error(one),
    ]


def _error(one: Entry) -> str:
    """The worst error as a part of what is allowed."""
    errors = list(one["errors"].values())
    if not errors:
        return _NONE
    if any(error["ours"] is None or error["allowed"] is None for error in errors):
        return "not finite"
    return f"{max(error['ours'] / error['allowed'] if error['allowed'] else 0.0 for error in errors):.2f}"


def target_rows(entries: Sequence[Entry]) -> list[list[str]]:
    """What was to be reached, what was, and whether that is enough."""
    return [[one.kind, one.what, against_us(one.value, 3), f"≤ {one.at_most:g}", one.word] for one in verdicts(entries)]


_LINE, _GAP = 0.29, 0.5
"""Inches that a bar takes, and that are left above the bars of a kind for its title."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 3.05, 0.55, 0.35, 1.15
"""Inches around all bars, for names, numbers, title and caption."""


def draw_bars(entries: Sequence[Entry], path: str | Path) -> Path:
    """Draw the figure as SVG; its ground is white, so that it can be read on a dark page too."""
    with drawing():
        return write_text(path, svg_text(_figure(entries)))


def _figure(entries: Sequence[Entry]) -> Any:
    kinds = [kind for kind in KINDS if of_kind(entries, kind)]
    height = _TOP + _BOTTOM + sum(_GAP + _LINE * len(of_kind(entries, kind)) for kind in kinds)
    figure = sheet(height)
    # Places are counted out: those that matplotlib would find differ by a hair from one drawing to the next.
    figure.set_layout_engine("none")
    width = figure.get_size_inches()[0]
    known = [one["ratio"] for one in entries if one["ratio"] is not None]
    above = _TOP
    for kind in kinds:
        shown = of_kind(entries, kind)
        tall = _LINE * len(shown)
        above += _GAP + tall
        place = (_LEFT / width, 1.0 - above / height, 1.0 - (_LEFT + _RIGHT) / width, tall / height)
        axes = figure.add_axes(place, xlim=(0.0, 1.04 * max([1.9, *known])))
        _draw(axes, kind, shown)
        axes.tick_params(labelbottom=kind == kinds[-1])
    axes.set_xlabel("time in times of the fastest stock kernel of the same run (less is better)")
    across, down = 0.12 / width, 1.0 - 0.12 / height
    figure.text(across, down, plain(_title(entries[0])), va="top", fontsize=13, fontweight="bold")
    figure.text(across, 0.12 / height, plain(_caption(entries)), va="bottom", fontsize=8.5, color=SOFT.light)
    return figure


def _draw(axes: Any, kind: str, entries: Sequence[Entry]) -> None:
    places = range(len(entries))
    for place, one in zip(places, entries, strict=True):
        if one["ratio"] is None:
            _write(axes, "not correct: no speed", (0.0, place), ("data", "data"), VERMILLION.light)
            continue
        axes.barh(place, one["ratio"], height=0.7, color=BLUE.light, alpha=0.6 if one["counts"] else 0.3)
        # In a column of their own, where no line crosses them.
        _write(axes, f"{against_us(one['ratio'], 2)}×", (1.0, place), ("axes fraction", "data"), INK.light)
    axes.axvline(1.0, color=INK.light, linewidth=0.8)
    target = entries[0]["limits"].get("mean_ratio")
    marks = [("floor", entries[0]["floor"], INK.light, ":"), ("target of the mean", target, VERMILLION.light, "--")]
    for name, at, colour, stroke in marks:
        if at is not None:
            axes.axvline(at, color=colour, linewidth=1.8, linestyle=stroke, label=f"{name} {at:g}×")
    axes.set_yticks(
        list(places), [plain(one["case"] + ("" if one["counts"] else " *")) for one in entries], fontsize=8.5
    )
    axes.set_ylim(len(entries) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.set_title(plain(KINDS[kind]), loc="left", fontsize=10.5)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8.5, borderaxespad=0.1)


def _write(axes: Any, text: str, place: tuple[float, float], within: tuple[str, str], colour: str) -> None:
    look = {"textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": colour}
    axes.annotate(text, place, xycoords=within, xytext=(4, 0), annotation_clip=False, **look)


def _title(first: Entry) -> str:
    hardware = first["provenance"]["hardware"]
    return f"Sharp attention next to stock attention on {hardware['gpu'] or hardware['cpu']}, bfloat16"


def _caption(entries: Sequence[Entry]) -> str:
    first = entries[0]
    versions, rounds = first["provenance"]["versions"], max(one["rounds"] for one in entries)
    lines = [
        f"Medians of {rounds} rounds in which all kernels take turns, after a check against float64. Floor: what "
        "arithmetic, or reading the cache once, leaves room for.",
        f"* not part of the mean. torch {versions['torch']}, {first['provenance']['date'][:10]}: {first['command']}",
    ]
    if not all(one["full_size"] for one in entries):
        lines.append("Shapes are scaled down: targets are not judged.")
    return "\n".join(lines)
