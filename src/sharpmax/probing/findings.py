"""What one task shows of every head (curves, slope, kind, horizon, forecast), as tables and as sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sharpmax.models.language import context_of
from sharpmax.probing.capture import LOCAL
from sharpmax.probing.forecast import REPLICATION, Forecast, error, predict
from sharpmax.probing.inputs import Passage, ProbeInputs
from sharpmax.probing.measurement import (
    Fits,
    Numbers,
    Readings,
    curves_of,
    finite_or_none,
    fit,
    known_mean,
    measure_replicated,
)
from sharpmax.probing.replication import replication_of
from sharpmax.theory.bounds import whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNIFORM_SHARE = 0.5
"""A head whose effective number of keys is half of all keys or more singles out none of them."""

SINK_SHARE = 0.5
"""Weight on the first key: with half of it there, all other keys together have no more."""

LOCAL_SHARE = 0.5
"""Weight on the last 16 keys, likewise."""

DISPERSES = 0.25
"""Slope of entropy against ln n: a quarter of that of a uniform head. Over inputs that grow eightfold, as from the
sizes that forecasts know to those they are tested at, the effective number of keys then grows by 1.7 and more."""

HALF = 0.5
"""The top weight under which a head has lost its focus: no key holds half of the weight."""

KINDS = ("sharp", "dispersing", "uniform", "sink", "local")
UNKNOWN = "unknown"
LOSES_FOCUS = ("dispersing", "uniform")
"""The kinds whose rows spread as inputs grow."""

RULE: Mapping[str, str] = MappingProxyType(
    {
        "uniform": f"at the largest size the weight is spread over {UNIFORM_SHARE:.0%} or more of all keys, in effect",
        "sink": f"otherwise, at the largest size the first key has {SINK_SHARE:.0%} or more of the weight",
        "local": f"otherwise, at the largest size the last {LOCAL} keys have {LOCAL_SHARE:.0%} or more of the weight "
        f"(causal models, rows of more than {2 * LOCAL} keys)",
        "dispersing": f"otherwise, entropy rises with ln n by a slope of {DISPERSES} or more",
        "sharp": "otherwise: the head attends to about as many keys at every size",
    }
)
"""How a head gets its kind, in this order."""

_REPLICATED = 6
"""Passages that are read with replicated keys, for each size that is forecast."""


def kinds_of(slope: Numbers, last: Mapping[str, Numbers], causal: bool) -> NDArray[Any]:
    """The kind of every head from its slope and its statistics at the largest size, all `[layers, heads]`.

    `UNKNOWN` where a head has no numbers. In rows that see keys on both sides the last keys are not the nearest:
    "local" is a kind of `causal` models alone, and "sink" then is about whatever comes first, such as a class token.
    """
    asked = {
        "uniform": np.exp(last["entropy"]) >= UNIFORM_SHARE * last["count"],
        "sink": last["sink"] >= SINK_SHARE,
        "local": (last["local"] >= LOCAL_SHARE) & (last["count"] > 2 * LOCAL) & causal,
        "dispersing": slope >= DISPERSES,
    }
    found = np.select(list(asked.values()), list(asked), default="sharp")
    return np.where(np.isnan(last["entropy"]) | np.isnan(slope), UNKNOWN, found)


@dataclass(frozen=True, eq=False)
class Findings(Fits):
    """The fits of one task, with the kinds `[layers, heads]` of the heads and a forecast."""

    task: str
    unit: str
    sizes: tuple[int, ...]
    prompts: Mapping[int, int]  # by size
    fit_up_to: int
    kinds: NDArray[Any]
    forecast: Forecast | None

    @property
    def layer_slopes(self) -> Numbers:
        """The mean slope of every layer, `[layers]`."""
        return known_mean(self.slope, 1)[:, 0]

    @property
    def order(self) -> list[int]:
        """The layers that have a slope, the steepest first."""
        slopes = self.layer_slopes
        return sorted((int(layer) for layer in np.flatnonzero(np.isfinite(slopes))), key=lambda layer: -slopes[layer])

    def counted(self, *kinds: str) -> int:
        """How many heads are of these kinds."""
        return int(np.isin(self.kinds, kinds).sum())

    @property
    def known(self) -> int:
        """How many heads have numbers."""
        return int(np.isfinite(self.slope).sum())

    def measured(self, size: int) -> dict[str, Numbers]:
        """Entropy and top weight at one size."""
        place = self.sizes.index(size)
        return {name: self.curves[name][place] for name in ("entropy", "top")}


def findings_of(
    inputs: ProbeInputs, readings: Readings, causal: bool, forecast: Forecast | None, seed: int
) -> Findings:
    """Everything that follows from the readings of one task."""
    fits = fit(readings, inputs.nested, HALF, seed)
    prompts = {size: len(one["count"]) for size, one in readings.items()}
    kinds = kinds_of(fits.slope, {name: values[-1] for name, values in fits.curves.items()}, causal)
    about: dict[str, Any] = {
        "task": inputs.task,
        "unit": inputs.unit,
        "sizes": inputs.sizes,
        "fit_up_to": inputs.fit_up_to,
    }
    return Findings(**vars(fits), **about, prompts=prompts, kinds=kinds, forecast=forecast)


def forecast_work(inputs: ProbeInputs) -> int:
    """The work of the passages that `forecast_of` reads with replicated keys."""
    return sum(one.work for base, _ in _pairs(inputs) for one in inputs.passages[base][:_REPLICATED])


def forecast_of(
    model: PreTrainedModel, inputs: ProbeInputs, readings: Readings, done: Callable[[Passage, int], None] | None
) -> Forecast | None:
    """Forecast the larger sizes from the smaller ones; None where there are none.

    `done` is called with each passage that has been read with replicated keys; None leaves that method out.
    """
    pairs, changes = _pairs(inputs), {}
    if not pairs:
        return None
    for base, target in pairs if done is not None else ():
        more = (target - base) / inputs.per_item
        passages = inputs.passages[base][:_REPLICATED]
        replications = [(one, replication_of(one, more, context_of(model))) for one in passages]
        ready = [(one, replication) for one, replication in replications if replication is not None]
        if ready and len(ready) == len(passages):
            changes[base, target] = {
                name: (values - readings[base][name][: len(ready)]).mean(0)
                for name, values in measure_replicated(model, ready).items()
            }
        for one in passages:
            if done is not None:
                done(one, target)
    return predict(curves_of(readings, inputs.nested), inputs.sizes, inputs.fit_up_to, changes)


def _pairs(inputs: ProbeInputs) -> list[tuple[int, int]]:
    """Which sizes stand for which: the largest known one for every larger, and the one before it for that one."""
    known = [size for size in inputs.sizes if size <= inputs.fit_up_to]
    later = [size for size in inputs.sizes if size > inputs.fit_up_to]
    if len(known) < 2 or not later:
        return []
    return [(known[-2], known[-1]), *((known[-1], size) for size in later)]


_SHOWN = ("count", "entropy", "top", "sink", "spread", "local", "effective")
_FIRST = 8
"""How many layers are printed; `layers_table` has all."""


def heads_table(found: Findings) -> dict[str, Any]:
    """Every head by its name, layer.head."""
    table = {}
    predicted = {} if found.forecast is None else found.forecast.values
    for layer, head in zip(*np.nonzero(found.curves["count"][-1] > 0), strict=True):
        at = int(layer), int(head)
        curves = {
            str(size): {name: finite_or_none(found.curves[name][place][at]) for name in _SHOWN}
            for place, size in enumerate(found.sizes)
        }
        forecast = {
            str(size): {name: finite_or_none(values[name][at]) for name in ("entropy", "top")}
            for size, values in predicted.items()
        }
        ends = {"tokens": found.horizon, "low": found.horizon_low, "high": found.horizon_high}
        table[f"{layer}.{head}"] = {
            "kind": str(found.kinds[at]),
            **{name: finite_or_none(getattr(found, name)[at]) for name in ("slope", "slope_low", "slope_high")},
            "curve": curves,
            "forecast": forecast,
            "horizon": {name: finite_or_none(values[at]) for name, values in ends.items()},
        }
    return table


def layers_table(found: Findings) -> dict[str, Any]:
    """Every layer by its number; rank 1 disperses most."""
    order, slopes = found.order, found.layer_slopes
    return {
        str(layer): {
            "slope": finite_or_none(slopes[layer]),
            "rank": order.index(layer) + 1 if layer in order else None,
            "kinds": {kind: many for kind in KINDS if (many := Counter(found.kinds[layer].tolist())[kind])},
            "sink": finite_or_none(known_mean(found.curves["sink"][-1][layer]).item()),
            "top": finite_or_none(known_mean(found.curves["top"][-1][layer]).item()),
        }
        for layer in range(len(slopes))
    }


def forecast_table(found: Findings) -> dict[str, Any] | None:
    """The errors of the forecast at the sizes it did not know, and those of every method."""
    forecast = found.forecast
    if forecast is None:
        return None

    def errors(values: Mapping[int, Mapping[str, Numbers]]) -> dict[str, Any]:
        return {str(size): error(one, found.measured(size)) for size, one in values.items()}

    methods = {
        name: {"decided_by": finite_or_none(forecast.decided.get(name, math.nan)), "tested": errors(values)}
        for name, values in forecast.others.items()
    }
    tested = errors(forecast.values)
    return {"method": forecast.method, "fitted": list(forecast.fitted), "tested": tested, "methods": methods}


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
