"""A probe as JSON tables, as small tables to print, and as three sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from sharpmax.probing.findings import HALF, KINDS, LOSES_FOCUS, Findings
from sharpmax.probing.forecast import REPLICATION, error
from sharpmax.probing.measurement import Numbers, known_mean
from sharpmax.theory.bounds import whole

_SHOWN = ("count", "entropy", "top", "sink", "spread", "local", "effective")
_FIRST = 8
"""How many layers are printed; `layers_table` has all."""


def heads_table(found: Findings) -> dict[str, Any]:
    """Every head by its name, layer.head."""
    table = {}
    predicted = {} if found.forecast is None else found.forecast.values
    for layer, head in zip(*np.nonzero(found.curves["count"][-1] > 0), strict=True):
        at = int(layer), int(head)
        table[f"{layer}.{head}"] = {
            "kind": str(found.kinds[at]),
            **{name: _number(getattr(found, name)[at]) for name in ("slope", "slope_low", "slope_high")},
            "curve": {
                str(size): {name: _number(found.curves[name][place][at]) for name in _SHOWN}
                for place, size in enumerate(found.sizes)
            },
            "forecast": {
                str(size): {name: _number(values[name][at]) for name in ("entropy", "top")}
                for size, values in predicted.items()
            },
            "horizon": {
                "tokens": _number(found.horizon[at]),
                "low": _number(found.horizon_low[at]),
                "high": _number(found.horizon_high[at]),
            },
        }
    return table


def layers_table(found: Findings) -> dict[str, Any]:
    """Every layer by its number; rank 1 disperses most."""
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
    """The errors of the forecast at the sizes it did not know, and those of every method."""
    forecast = found.forecast
    if forecast is None:
        return None
    return {
        "method": forecast.method,
        "fitted": list(forecast.fitted),
        "tested": {str(size): error(values, found.measured(size)) for size, values in forecast.values.items()},
        "methods": {
            name: {
                "decided_by": _number(forecast.decided.get(name, math.nan)),
                "tested": {str(size): error(values, found.measured(size)) for size, values in one.items()},
            }
            for name, one in forecast.others.items()
        },
    }


def chain_table(found: Findings) -> dict[str, Any]:
    """The correlation of a layer's mean slope with the next layer's, with a 95% interval."""
    here, following = found.layer_slopes[:-1], found.layer_slopes[1:]
    both = np.isfinite(here) & np.isfinite(following)
    pairs = int(both.sum())
    if pairs < 3 or min(here[both].std(), following[both].std()) == 0.0:
        return {"next": None, "low": None, "high": None, "pairs": pairs}
    related = float(np.corrcoef(here[both], following[both])[0, 1])
    low = high = None
    if pairs > 3 and abs(related) < 1.0:
        reach = 1.96 / math.sqrt(pairs - 3)  # Fisher's transformation
        low, high = (math.tanh(math.atanh(related) + way * reach) for way in (-1.0, 1.0))
    return {"next": related, "low": low, "high": high, "pairs": pairs}


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def verdict(model: str, found: Sequence[Findings]) -> list[str]:
    """Three sentences about the first task; the first also names the others."""
    return [_how_many(model, found), _where(found[0]), _forecast(found[0])]


def _how_many(model: str, found: Sequence[Findings]) -> str:
    first = found[0]
    losing = np.isin(first.kinds, LOSES_FOCUS)
    text = f"{_share(first)} of {model}'s {first.known:,} attention heads lose focus as inputs grow"
    text += f" from {_sizes(first)}"
    if losing.any():
        low, high = (float(np.median(first.curves["effective"][end][losing])) for end in (0, -1))
        text += f": the median of them spreads its weight over {_many(low)} tokens at first and {_many(high)} at last"
    others = "".join(f"; on {one.task} ({_sizes(one)}) it is {_share(one)}" for one in found[1:])
    return f"{text}{others}."


def _where(found: Findings) -> str:
    rising = [str(layer) for layer in found.order if found.layer_slopes[layer] > 0.0][:3]
    text = "No layer loses focus on average"
    if rising:
        named = " and ".join([", ".join(rising[:-1]), rising[-1]]) if len(rising) > 1 else rising[0]
        plural = len(rising) > 1
        text = f"Layer{'s' * plural} {named} of {len(found.layer_slopes)} disperse{'' if plural else 's'} most"
    focused, still = found.curves["top"][0] >= HALF, found.curves["top"][-1] >= HALF
    if not focused.any():
        return f"{text}; no head has half of its weight on one token even in the smallest inputs."
    lost = focused & ~still
    ends = found.horizon[lost & np.isfinite(found.horizon)]
    text += f"; {int(focused.sum()):,} heads have half of their weight on one token in the smallest inputs"
    if not ends.size:
        return f"{text}, and all of them still do in the largest."
    median = whole(np.median(ends))
    return f"{text}, {int(lost.sum()):,} of them no longer in the largest (median: from {median:,} tokens on)."


def _forecast(found: Findings) -> str:
    forecast = found.forecast
    if forecast is None or not forecast.values:
        return "There is no forecast: it needs two sizes to fit and a larger one to test."
    size = max(forecast.values)
    off = error(forecast.values[size], found.measured(size))["entropy"]
    if off["median"] is None:
        return "There is no forecast: the model gives no numbers."
    return (
        f"Measured up to {found.fit_up_to:,} {found.unit}, the forecast of entropy at {size:,} is off by "
        f"{off['median']:.2f} nats (median head) and {off['p90']:.2f} (90th percentile)."
    )


def _share(found: Findings) -> str:
    many = found.counted(*LOSES_FOCUS)
    return f"{many:,} ({many / max(1, found.known):.0%})"


def _sizes(found: Findings) -> str:
    keys = np.nanmax(found.curves["count"], axis=(1, 2))
    sizes = f"{found.sizes[0]:,} to {found.sizes[-1]:,} {found.unit}"
    return sizes if found.unit == "tokens" else f"{sizes} ({_many(keys[0])} to {_many(keys[-1])} tokens)"


def _many(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


@dataclass(frozen=True)
class Sheet:
    """One small table with a title and a note."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def text(self) -> str:
        """The table as text: the first column to the left, the others to the right."""
        table = [list(self.columns), *map(list, self.rows)]
        wide = [max(len(row[place]) for row in table) for place in range(len(self.columns))]
        lines = [
            "  ".join(cell.rjust(wide[place]) if place else cell.ljust(wide[place]) for place, cell in enumerate(row))
            for row in table
        ]
        return "\n".join([self.title, *lines, *([self.note] if self.note else [])])

    def html(self) -> str:
        """The table as HTML without a style of its own."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self.rows)
        head = f"<caption>{escape(self.title)}</caption><thead>{row(self.columns, 'th')}</thead>"
        return f"<table>{head}<tbody>{body}</tbody></table><p>{escape(self.note)}</p>"


def layers_sheet(found: Findings) -> Sheet:
    """The layers that disperse most, and all heads together."""
    sink, top = found.curves["sink"][-1], found.curves["top"][-1]

    def row(name: str, slope: float, kinds: Any, sink: Numbers, top: Numbers) -> list[str]:
        counts = [str(int((kinds == kind).sum())) for kind in KINDS]
        return [name, f"{slope:+.2f}" if math.isfinite(slope) else "–", *counts, _percent(sink), _percent(top)]

    layers = found.order[:_FIRST]
    rows = [row(str(n), found.layer_slopes[n], found.kinds[n], sink[n], top[n]) for n in layers]
    rows.append(row("all", known_mean(found.slope).item(), found.kinds, sink, top))
    prompts = sorted({*found.prompts.values()})
    amount = f"{prompts[0]}" if len(prompts) == 1 else f"{prompts[0]} to {prompts[-1]}"
    return Sheet(
        f"{found.task}, {found.sizes[0]:,} to {found.sizes[-1]:,} {found.unit}: layers by slope ({len(layers)} of "
        f"{len(found.layer_slopes)})",
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
    sizes, rows = list(table["tested"]), []
    for name in sorted(table["methods"], key=lambda one: one != table["method"]):
        about = table["methods"][name]
        errors = [about["tested"].get(size, {}).get("entropy", {}) for size in sizes]
        cells = ["–" if one.get("median") is None else f"{one['median']:.2f} ({one['p90']:.2f})" for one in errors]
        decided = "–" if about["decided_by"] is None else f"{about['decided_by']:.2f}"
        label = name.replace(REPLICATION, "key replication") + " (chosen)" * (name == table["method"])
        rows.append([label, decided, *cells])
    last = max(table["fitted"])
    return Sheet(
        f"{found.task}: error of the forecast of entropy, in nats",
        ["method", f"at {last:,}", *(f"at {int(size):,}" for size in sizes)],
        rows,
        f"Median over heads (and 90th percentile), from {last:,} {found.unit} and less. The method is chosen by its "
        f"error at {last:,}, forecast from fewer.",
    )


def _percent(weights: Numbers) -> str:
    mean = known_mean(weights).item()
    return f"{100.0 * mean:.0f}" if math.isfinite(mean) else "–"
