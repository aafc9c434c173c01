"""A probe as a few small tables, the same at a terminal, in a notebook and in a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from sharpmax.probe.survey.findings import Findings
from sharpmax.probe.survey.fits import known_mean
from sharpmax.probe.survey.kinds import KINDS
from sharpmax.probe.survey.measuring import Numbers
from sharpmax.probe.survey.tables import forecast_table

__all__ = ["Sheet", "as_html", "as_text", "forecast_sheet", "layers_sheet"]

_FIRST = 8
"""How many layers are shown; the rest is in the tables."""


@dataclass(frozen=True)
class Sheet:
    """One table, and what has to be said below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def layers_sheet(found: Findings) -> Sheet:
    """The layers that disperse first, and all heads together."""
    slopes, sink, top = found.layer_slopes, found.curves["sink"][-1], found.curves["top"][-1]
    rows = [
        [
            str(layer),
            f"{slopes[layer]:+.2f}",
            *(str(int((found.kinds[layer] == kind).sum())) for kind in KINDS),
            _percent(sink[layer]),
            _percent(top[layer]),
        ]
        for layer in found.order[:_FIRST]
    ]
    mean = known_mean(found.slope).item()
    rows.append(
        [
            "all",
            f"{mean:+.2f}" if found.known else "–",
            *(str(found.counted(kind)) for kind in KINDS),
            _percent(sink),
            _percent(top),
        ]
    )
    prompts = sorted({*found.prompts.values()})
    amount = f"{prompts[0]}" if len(prompts) == 1 else f"{prompts[0]} to {prompts[-1]}"
    sizes = f"{found.sizes[0]:,} to {found.sizes[-1]:,} {found.unit}"
    return Sheet(
        f"{found.task}, {sizes}: layers by who disperses first ({min(_FIRST, len(found.order))} of {len(slopes)})",
        ["layer", "slope", *KINDS, "first token, %", "top token, %"],
        rows,
        f"Slope: of entropy against ln n, 1 is pure dispersion, 0 is none. Kinds count heads; percentages are mean "
        f"weights in the largest inputs. {amount} prompts of each size.",
    )


def forecast_sheet(found: Findings) -> Sheet | None:
    """The errors of every method of forecasting, the chosen one first."""
    table = forecast_table(found)
    if table is None or not table["tested"]:
        return None
    sizes = list(table["tested"])
    rows = []
    for name in sorted(table["methods"], key=lambda one: one != table["method"]):
        about = table["methods"][name]
        errors = [about["tested"].get(size, {}).get("entropy", {}) for size in sizes]
        decided = "–" if about["decided_by"] is None else f"{about['decided_by']:.2f}"
        label = f"{name} (chosen)" if name == table["method"] else name
        rows.append([label, decided, *(_pair(one.get("median"), one.get("p90")) for one in errors)])
    last = max(table["fitted"])
    return Sheet(
        f"{found.task}: error of the forecast of entropy, in nats",
        ["method", f"at {last:,}", *(f"at {int(size):,}" for size in sizes)],
        rows,
        f"Median over heads (and 90th percentile), from {last:,} {found.unit} and less. The method is chosen by its "
        f"error at {last:,}, forecast from fewer.",
    )


def as_text(sheet: Sheet) -> str:
    """Columns under each other, the first to the left, the others to the right."""
    table = [list(sheet.columns), *map(list, sheet.rows)]
    wide = [max(len(row[place]) for row in table) for place in range(len(sheet.columns))]
    lines = [
        "  ".join(cell.rjust(wide[place]) if place else cell.ljust(wide[place]) for place, cell in enumerate(row))
        for row in table
    ]
    return "\n".join([sheet.title, *lines, *([sheet.note] if sheet.note else [])])


def as_html(sheet: Sheet) -> str:
    """A plain table that takes the looks of the notebook around it."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in sheet.rows)
    head = f"<caption>{escape(sheet.title)}</caption><thead>{row(sheet.columns, 'th')}</thead>"
    return f"<table>{head}<tbody>{body}</tbody></table><p>{escape(sheet.note)}</p>"


def _percent(weights: Numbers) -> str:
    mean = known_mean(weights).item()
    return f"{100.0 * mean:.0f}" if math.isfinite(mean) else "–"


def _pair(median: float | None, p90: float | None) -> str:
    return "–" if median is None or p90 is None else f"{median:.2f} ({p90:.2f})"
