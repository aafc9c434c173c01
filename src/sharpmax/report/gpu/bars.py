"""The figure: how many times the fastest stock kernel each case takes, next to the floor and the target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpmax.files import write_text
from sharpmax.report.figures import drawing, svg_text
from sharpmax.report.gpu.entries import KINDS, Entry, of_kind
from sharpmax.report.gpu.verdicts import against_us
from sharpmax.report.looks import BLUE, INK, SOFT, VERMILLION
from sharpmax.report.static_parts import plain, sheet

__all__ = ["draw_bars"]

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
