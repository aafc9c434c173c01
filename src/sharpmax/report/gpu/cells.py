"""The rows of the tables, once for the terminal and for the page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from sharpmax.report.gpu.entries import Entry, of_kind
from sharpmax.report.gpu.verdicts import against_us, verdicts

__all__ = ["TARGET_COLUMNS", "columns", "rows", "target_rows"]

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
