"""Tables and the figure of `sharpmax bench --gpu`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sharpmax.errors import FileFormatError
from sharpmax.files import read_json, write_text
from sharpmax.report import charts
from sharpmax.report.tables import NOTHING, Table, readable, table_of

Entry = dict[str, Any]

KINDS = {
    "stats": "Statistics pass",
    "attention": "Sharp attention, inference",
    "train": "Training step (forward and backward)",
    "decode": "Decode, one token",
}
"""The kinds of cases, in order."""


def read_entries(path: str | Path) -> list[Entry]:
    """Return the entries of a file; raise FileFormatError if it has none."""
    body = read_json(path, "entries")
    if not isinstance(body, list) or not body or not all(isinstance(one, dict) for one in body):
        raise FileFormatError(f"entries: {str(path)!r} is not a list of cases; sharpmax bench --gpu --out writes one")
    for place, one in enumerate(body):
        if one.get("kind") not in KINDS:
            raise FileFormatError(f"entries: case {place} has kind {one.get('kind')!r}; allowed: {list(KINDS)}")
    return body


def holds_entries(path: str | Path) -> bool:
    """Whether a file is a JSON list, which only `bench --gpu` writes."""
    return Path(path).is_file() and Path(path).read_bytes()[:64].lstrip().startswith(b"[")


def of_kind(entries: Sequence[Entry], kind: str) -> list[Entry]:
    """The entries of one kind."""
    return [one for one in entries if one["kind"] == kind]


_QUANTITIES = {
    "mean_ratio": "ratio, mean of {n} cases",
    "ratio": "ratio, largest of {n} cases",
    "extra_bytes_per_row": "extra bytes per query row, largest of {n} cases",
}


class TargetVerdict(NamedTuple):
    """A number, its target, and whether it is reached; None if this run cannot tell."""

    kind: str
    what: str
    value: float | None
    at_most: float
    reached: bool | None


def verdicts(entries: Sequence[Entry]) -> list[TargetVerdict]:
    """The verdicts of every kind that was measured; one incorrect case makes its kind miss."""
    found = []
    for kind in KINDS:
        counted = [one for one in of_kind(entries, kind) if one["counts"]]
        for quantity, limit in (counted[0]["limits"] if counted else {}).items():
            known: list[Any] = [one.get(quantity.removeprefix("mean_")) for one in counted]
            value = None
            if None not in known:
                value = statistics.fmean(known) if quantity.startswith("mean_") else max(known)
            reached = None
            if all(one["full_size"] for one in counted):
                right = all(one["agrees"] for one in counted)
                reached = False if not right else None if value is None else value <= limit
            found.append(TargetVerdict(kind, _QUANTITIES[quantity].format(n=len(counted)), value, limit, reached))
    return found


def against_us(value: float | None, places: int) -> str:
    """Format a cost, rounded up so that a miss never looks like a hit.

    >>> against_us(1.6203, 2), against_us(1.62, 2), against_us(None, 2)
    ('1.63', '1.62', '–')
    """
    if value is None:
        return NOTHING
    scale = 10**places
    # In binary, 1.62 · 100 is a little more than 162.
    return f"{math.ceil(value * scale - 1e-9) / scale:,.{places}f}"


def gpu_tables(entries: Sequence[Entry]) -> list[Table]:
    """A table of targets with their verdicts, and a table for each kind with a row per case."""
    words = {True: "reached", False: "missed", None: "not judged"}
    targets = [
        [one.kind, one.what, against_us(one.value, 3), f"≤ {one.at_most:g}", words[one.reached]]
        for one in verdicts(entries)
    ]
    found = [table_of("Targets", "", ["kind", "what", "measured", "target", "verdict"], targets)]
    for kind, title in KINDS.items():
        pace, rows = "TB/s" if kind == "decode" else "TFLOP/s", [_row(one) for one in of_kind(entries, kind)]
        head = ["case", "ours ms", "PyTorch ms", "PyTorch kernel", "ratio", "floor", pace, "extra B/row"]
        found += [table_of(title, "", [*head, "error ÷ allowed"], rows)] if rows else []
    return found


def _row(one: Entry) -> list[str]:
    """The row of a case; an incorrect one has no number but its error."""
    errors, error = one["errors"].values(), NOTHING
    if any(each["ours"] is None or each["allowed"] is None for each in errors):
        error = "not finite"
    elif errors:  # the largest, relative to what is allowed
        error = f"{max(each['ours'] / each['allowed'] if each['allowed'] else 0.0 for each in errors):.2f}"
    floor = NOTHING if one["floor"] is None else f"{one['floor']:.2f}"
    if one["ratio"] is None:
        return [_name(one), "fails" if one["problem"] else "disagrees", *[NOTHING] * 3, floor, *[NOTHING] * 2, error]
    times = [f"{one['ours_ms']:.3f}", f"{one['stock_ms']:.3f}", one["stock_backend"], against_us(one["ratio"], 2)]
    pace = f"{one['tb_per_s']:.2f}" if one["kind"] == "decode" else f"{one['tflop_per_s']:,.0f}"
    return [_name(one), *times, floor, pace, against_us(one.get("extra_bytes_per_row"), 1), error]


def _name(one: Entry) -> str:
    return str(one["case"]) + ("" if one["counts"] else " *")


def machine(first: Entry) -> str:
    """The device an entry was measured on."""
    hardware = first["provenance"]["hardware"]
    return str(hardware["gpu"] or hardware["cpu"])


def draw_bars(entries: Sequence[Entry], path: str | Path) -> Path:
    """Draw the ratios of all cases as SVG, on white to be readable on a dark page."""
    with readable():
        first, most = entries[0], 1.06 * max([1.9, *(one["ratio"] for one in entries if one["ratio"] is not None)])
        panels = [_panel(kind, of_kind(entries, kind), most) for kind in KINDS if of_kind(entries, kind)]
        small = "" if all(one["full_size"] for one in entries) else ". Shapes are scaled down: targets are not judged."
        caption = (
            f"Medians of {max(one['rounds'] for one in entries)} rounds in which all kernels alternate, after a check "
            "against float64. Floor: the least that arithmetic, or reading the cache once, allows. * not part of the "
            f"mean. torch {first['provenance']['versions']['torch']}, {first['provenance']['date'][:10]}: "
            f"{first['command']}{small}"
        )
        title = f"Sharp attention and PyTorch's attention on {machine(first)}, bfloat16"
        spec = charts.titled(charts.figure(*panels, columns=1, around=290), title, caption)
    return write_text(path, charts.svg_of(spec))


def _panel(kind: str, entries: Sequence[Entry], most: float) -> Any:
    alt = charts.altair()
    rows = []
    for one in entries:
        text = f"{against_us(one['ratio'], 2)}×" if one["ratio"] is not None else "not correct: no speed"
        rows.append({"case": _name(one), "ratio": one["ratio"] or 0.0, "label": text, "counts": int(one["counts"])})
    title = "time / time of PyTorch's fastest kernel in the same run (less is better)"
    x = alt.X("ratio:Q", title=title, scale=alt.Scale(domain=[0, most], nice=False))
    names = alt.Axis(labelLimit=270, ticks=False, domain=False, minExtent=272, maxExtent=272)
    base = alt.Chart(charts.data(rows)).encode(x=x, y=alt.Y("case:N", sort=None, title=None, axis=names))
    shade = alt.when("datum.counts").then(alt.value(0.65)).otherwise(alt.value(0.3))
    layers = [base.mark_bar(color=charts.BLUE).encode(opacity=shade), charts.rule("x", 1.0, charts.INK)]
    target, floor, words = entries[0]["limits"].get("mean_ratio"), entries[0]["floor"], [KINDS[kind]]
    for name, at, colour in (("floor", floor, charts.INK), ("target of the mean", target, charts.VERMILLION)):
        if at is not None:
            words.append(f"{name} {at:g}×")
            layers.append(charts.rule("x", at, colour))
    layers.append(base.mark_text(align="left", dx=4, color=charts.INK).encode(text="label:N"))
    return charts.panel("; ".join(words), *layers, height=22 * len(rows))
