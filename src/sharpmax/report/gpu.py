"""Tables and the figure of `sharpmax bench --gpu`, and the tables of docs/gpu.md.

`python -m sharpmax.report.gpu benchmarks/h200.json docs/gpu.md` writes the latter.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.files import read_json, write_text
from sharpmax.report import charts
from sharpmax.report.tables import NOTHING

Entry = dict[str, Any]

KINDS = {
    "stats": "Statistics pass",
    "attention": "Sharp attention, inference",
    "train": "Training step (forward and backward)",
    "decode": "Decode, one token",
}
"""What is measured, in order."""

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
    "mean_ratio": "ratio, mean of {n} cases",
    "ratio": "ratio, largest of {n} cases",
    "extra_bytes_per_row": "extra bytes per query row, largest of {n} cases",
}


@dataclass(frozen=True)
class TargetVerdict:
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


def verdicts(entries: Sequence[Entry]) -> list[TargetVerdict]:
    """The verdicts of every kind that was measured; a case that is wrong makes its kind miss."""
    found = []
    for kind in KINDS:
        counted = [one for one in of_kind(entries, kind) if one["counts"]]
        limits: dict[str, float] = counted[0]["limits"] if counted else {}
        found += [_verdict(kind, quantity, limit, counted) for quantity, limit in limits.items()]
    return found


def _verdict(kind: str, quantity: str, limit: float, counted: Sequence[Entry]) -> TargetVerdict:
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
    return TargetVerdict(kind, _WORDS[quantity].format(n=len(counted)), value, limit, reached)


def against_us(value: float | None, places: int) -> str:
    """A cost, rounded up, so that a miss never looks like a hit.

    >>> against_us(1.6203, 2), against_us(1.62, 2), against_us(None, 2)
    ('1.63', '1.62', '–')
    """
    if value is None:
        return NOTHING
    scale = 10**places
    # What is exact in decimals is not in binary: 1.62 · 100 is a little more than 162.
    return f"{math.ceil(value * scale - 1e-9) / scale:,.{places}f}"


TARGET_COLUMNS = ("kind", "what", "measured", "target", "verdict")


def columns(kind: str) -> list[str]:
    """The headings of a kind's table."""
    pace = "TB/s" if kind == "decode" else "TFLOP/s"
    times = "ours ms", "PyTorch ms", "PyTorch kernel", "ratio", "floor"
    return ["case", *times, pace, "extra B/row", "error ÷ allowed"]


def rows(entries: Sequence[Entry], kind: str) -> list[list[str]]:
    """One row per case; an incorrect case has no number but its error."""
    return [_row(one) for one in of_kind(entries, kind)]


def _name(one: Entry) -> str:
    return str(one["case"]) + ("" if one["counts"] else " *")


def _row(one: Entry) -> list[str]:
    floor = NOTHING if one["floor"] is None else f"{one['floor']:.2f}"
    if one["ratio"] is None:
        verdict = "fails" if one["problem"] else "disagrees"
        return [_name(one), verdict, *[NOTHING] * 3, floor, *[NOTHING] * 2, _error(one)]
    times = [f"{one['ours_ms']:.3f}", f"{one['stock_ms']:.3f}", one["stock_backend"]]
    pace = f"{one['tb_per_s']:.2f}" if one["kind"] == "decode" else f"{one['tflop_per_s']:,.0f}"
    extra = against_us(one.get("extra_bytes_per_row"), 1)
    return [_name(one), *times, against_us(one["ratio"], 2), floor, pace, extra, _error(one)]


def _error(one: Entry) -> str:
    """The worst error as a part of what is allowed."""
    errors = list(one["errors"].values())
    if not errors:
        return NOTHING
    if any(error["ours"] is None or error["allowed"] is None for error in errors):
        return "not finite"
    return f"{max(error['ours'] / error['allowed'] if error['allowed'] else 0.0 for error in errors):.2f}"


def target_rows(entries: Sequence[Entry]) -> list[list[str]]:
    """Each target, what was measured, and the verdict."""
    return [[one.kind, one.what, against_us(one.value, 3), f"≤ {one.at_most:g}", one.word] for one in verdicts(entries)]


def draw_bars(entries: Sequence[Entry], path: str | Path) -> Path:
    """Draw the ratios of all cases as SVG, on white, so that it can be read on a dark page too."""
    kinds = [kind for kind in KINDS if of_kind(entries, kind)]
    most = 1.06 * max([1.9, *(one["ratio"] for one in entries if one["ratio"] is not None)])
    panels = [_panel(kind, of_kind(entries, kind), most) for kind in kinds]
    title = f"Sharp attention and PyTorch's attention on {_machine(entries[0])}, bfloat16"
    spec = charts.titled(charts.figure(*panels, columns=1, around=290), title, _caption(entries))
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
    layers = [base.mark_bar(color=charts.BLUE).encode(opacity=shade), *charts.rule("x", 1.0, colour=charts.INK)]
    target, floor, words = entries[0]["limits"].get("mean_ratio"), entries[0]["floor"], [KINDS[kind]]
    for name, at, colour in (("floor", floor, charts.INK), ("target of the mean", target, charts.VERMILLION)):
        if at is not None:
            words.append(f"{name} {at:g}×")
            layers += charts.rule("x", at, colour=colour)
    layers.append(base.mark_text(align="left", dx=4, color=charts.INK).encode(text="label:N"))
    return charts.panel("; ".join(words), *layers, height=22 * len(rows))


def _machine(first: Entry) -> str:
    hardware = first["provenance"]["hardware"]
    return str(hardware["gpu"] or hardware["cpu"])


def _caption(entries: Sequence[Entry]) -> str:
    first, rounds = entries[0], max(one["rounds"] for one in entries)
    torch, date = first["provenance"]["versions"]["torch"], first["provenance"]["date"][:10]
    small = "" if all(one["full_size"] for one in entries) else ". Shapes are scaled down: targets are not judged."
    return (
        f"Medians of {rounds} rounds in which all kernels alternate, after a check against float64. Floor: the "
        "least that arithmetic, or reading the cache once, allows. * not part of the mean. torch "
        f"{torch}, {date}: {first['command']}{small}"
    )


BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def page_tables(entries: Sequence[Entry], figure: str) -> str:
    """All tables in Markdown, with the figure at that address and where they come from."""
    parts = [
        f"![Time of each case relative to PyTorch's fastest kernel]({figure})",
        "### Targets",
        _table(TARGET_COLUMNS, target_rows(entries)),
    ]
    for kind, title in KINDS.items():
        if of_kind(entries, kind):
            parts += [f"### {title}", _table(columns(kind), rows(entries, kind))]
    first = entries[0]
    versions = first["provenance"]["versions"]
    origin = [_machine(first), f"torch {versions['torch']}"]
    origin += [f"Triton {versions['triton']}"] if "triton" in versions else []
    origin += [f"commit {first['provenance']['commit']}", first["provenance"]["date"], f"`{first['command']}`"]
    return "\n\n".join([*parts, "\\* not part of a mean. " + ", ".join(origin) + "."])


def with_tables(page: str, tables: str) -> str:
    """The page with these tables in their place."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise FileFormatError(f"page: no place for tables; allowed: a page with {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def _table(headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *body]
    return "\n".join("| " + " | ".join(cell.replace("*", "\\*") for cell in line) + " |" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Put the tables of the first file into the second."""
    saved, page = (Path(argument).resolve() for argument in arguments)
    figure = Path(os.path.relpath(saved.with_suffix(".svg"), page.parent)).as_posix()
    write_text(page, with_tables(page.read_text(encoding="utf-8"), page_tables(read_entries(saved), figure)))


if __name__ == "__main__":
    main(sys.argv[1:])
