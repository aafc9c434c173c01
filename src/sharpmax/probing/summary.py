"""A probe as tables and as three sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from sharpmax.probing.findings import HALF, KINDS, LOSES_FOCUS, Findings
from sharpmax.probing.forecast import error
from sharpmax.probing.measurement import Numbers, known_mean
from sharpmax.theory.bounds import whole

_SHOWN = ("count", "entropy", "top", "sink", "spread", "local", "effective")


def heads_table(found: Findings) -> dict[str, Any]:
    """Every head by its name, layer.head."""
    table = {}
    for layer, head in zip(*np.nonzero(found.curves["count"][-1] > 0), strict=True):
        at = int(layer), int(head)
        foretold = {} if found.forecast is None else found.forecast.values
        table[f"{layer}.{head}"] = {
            "kind": str(found.kinds[at]),
            "slope": _number(found.slope[at]),
            "slope_low": _number(found.slope_low[at]),
            "slope_high": _number(found.slope_high[at]),
            "curve": {
                str(size): {name: _number(found.curves[name][place][at]) for name in _SHOWN}
                for place, size in enumerate(found.sizes)
            },
            "forecast": {
                str(size): {name: _number(values[name][at]) for name in ("entropy", "top")}
                for size, values in foretold.items()
            },
            "horizon": {
                "tokens": _number(found.horizon[at]),
                "low": _number(found.horizon_low[at]),
                "high": _number(found.horizon_high[at]),
            },
        }
    return table


def layers_table(found: Findings) -> dict[str, Any]:
    """Every layer by its number; rank 1 disperses first."""
    order, slopes = found.order, found.layer_slopes
    return {
        str(layer): {
            "slope": _number(slopes[layer]),
            "rank": order.index(layer) + 1 if layer in order else None,
            "kinds": {kind: many for kind in KINDS if (many := Counter(found.kinds[layer].tolist())[kind])},
            "sink": _number(known_mean(found.curves["sink"][-1][layer]).item()),
            "top": _number(known_mean(found.curves["top"][-1][layer]).item()),
        }
        for layer in range(len(slopes))
    }


def forecast_table(found: Findings) -> dict[str, Any] | None:
    """The errors of the forecast at the sizes it did not know, and those of the methods that were not chosen."""
    forecast = found.forecast
    if forecast is None:
        return None
    measured = {
        size: {name: found.curves[name][place] for name in ("entropy", "top")} for place, size in enumerate(found.sizes)
    }
    return {
        "method": forecast.method,
        "fitted": list(forecast.fitted),
        "tested": {str(size): error(values, measured[size]) for size, values in forecast.values.items()},
        "methods": {
            name: {
                "decided_by": _number(forecast.decided.get(name, math.nan)),
                "tested": {str(size): error(values, measured[size]) for size, values in one.items()},
            }
            for name, one in forecast.others.items()
        },
    }


def chain_table(found: Findings) -> dict[str, Any]:
    """How a layer's mean slope goes with the next layer's: their correlation, with a 95% interval."""
    slopes = found.layer_slopes
    here, following = slopes[:-1], slopes[1:]
    both = np.isfinite(here) & np.isfinite(following)
    pairs = int(both.sum())
    known = pairs > 2 and min(here[both].std(), following[both].std()) > 0.0
    if not known:
        return {"next": None, "low": None, "high": None, "pairs": pairs}
    related = float(np.corrcoef(here[both], following[both])[0, 1])
    low = high = None
    if pairs > 3 and abs(related) < 1.0:
        reach = 1.96 / math.sqrt(pairs - 3)  # Fisher's transformation
        low, high = (math.tanh(math.atanh(related) + way * reach) for way in (-1.0, 1.0))
    return {"next": related, "low": low, "high": high, "pairs": pairs}


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


_GOOD, _FAIR = 0.25, 0.5
"""Errors of a forecast in nats: e^0.25 is an effective number of keys that is off by 28%, e^0.5 by 65%."""


def verdict(model: str, found: Sequence[Findings]) -> list[str]:
    """Three sentences about the first task, with what the others say where it is short."""
    return [_how_many(model, found), _where(found[0]), _foreseen(found[0])]


def _how_many(model: str, found: Sequence[Findings]) -> str:
    first = found[0]
    losing = np.isin(first.kinds, LOSES_FOCUS)
    said = f"{_share(first)} of {model}'s {first.known:,} attention heads lose focus as inputs grow"
    said += f" from {_sizes(first)}"
    if losing.any():
        effective = first.curves["effective"]
        low, high = (float(np.median(effective[end][losing])) for end in (0, -1))
        said += f": in the middle one of them the weight is shared by {_many(low)} tokens at first and {_many(high)}"
        said += " in the end"
    others = "".join(f"; on {one.task} ({_sizes(one)}) it is {_share(one)}" for one in found[1:])
    return f"{said}{others}."


def _where(found: Findings) -> str:
    slopes = found.layer_slopes
    rising = [layer for layer in found.order if slopes[layer] > 0.0][:3]
    said = "No layer loses focus on average"
    if rising:
        named = _joined([str(layer) for layer in rising])
        said = (
            f"Layer{'s' if len(rising) > 1 else ''} {named} of {len(slopes)} go{'' if len(rising) > 1 else 'es'} first"
        )
    top = found.curves["top"]
    focused, still = top[0] >= HALF, top[-1] >= HALF
    began = int(focused.sum())
    if not began:
        return f"{said}; no head has half of its weight on one token even in the smallest inputs."
    lost = focused & ~still
    ends = found.horizon[lost & np.isfinite(found.horizon)]
    many = int(lost.sum())
    said += f"; {began:,} heads have half of their weight on one token in the smallest inputs"
    if not many or not ends.size:
        return f"{said}, and none of them has lost that in the largest."
    by = whole(np.median(ends))
    return f"{said}, and {many:,} of them have lost that in the largest, half of these by {by:,} tokens."


def _foreseen(found: Findings) -> str:
    forecast = found.forecast
    if forecast is None or not forecast.values:
        return "There is no forecast: that takes two sizes to learn from and a larger one to test it at."
    size = max(forecast.values)
    measured = {name: found.curves[name][found.sizes.index(size)] for name in ("entropy", "top")}
    off = error(forecast.values[size], measured)["entropy"]
    if off["median"] is None:
        return "There is no forecast: the model gives no numbers."
    known = f"Inputs of up to {found.fit_up_to:,} {found.unit}"
    how = "foretell" if off["median"] <= _GOOD else "roughly foretell" if off["median"] <= _FAIR else "do not foretell"
    return (
        f"{known} {how} what happens at {size:,}: the forecast of a head's entropy is off by {off['median']:.2f} nats "
        f"in the middle head and by up to {off['p90']:.2f} in nine of ten."
    )


def _share(found: Findings) -> str:
    many = sum(found.counted(kind) for kind in LOSES_FOCUS)
    return f"{many:,} ({many / max(1, found.known):.0%})"


def _sizes(found: Findings) -> str:
    keys = np.nanmax(found.curves["count"], axis=(1, 2))
    sizes = f"{found.sizes[0]:,} to {found.sizes[-1]:,} {found.unit}"
    return sizes if found.unit == "tokens" else f"{sizes} ({_many(keys[0])} to {_many(keys[-1])} tokens)"


def _many(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _joined(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


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
