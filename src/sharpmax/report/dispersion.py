"""The figure of dispersion: weight of the best item and entropy against the number of items."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from sharpmax.lazy import require

__all__ = ["NEEDS", "draw_dispersion"]

NEEDS = frozenset({"weight", "entropy", "theory"})
"""The tables the figure is drawn from."""

_LABELS = {
    "softmax": "plain softmax",
    "paper": "the paper's polynomial",
    "log-length": "β ∝ ln n (log-length)",
    "entropy-target": "entropy held (entropy-target)",
}

# Okabe and Ito's colours stay apart for colour-blind readers, the markers for black and white print.
# Where the polynomial does nothing its line is that of plain softmax, which is drawn thinner and on top of it.
_STYLES: dict[str, dict[str, Any]] = {
    "softmax": {"color": "#333333", "marker": "o", "linewidth": 1.2, "markersize": 3.5, "zorder": 3.0},
    "paper": {"color": "#D55E00", "marker": "s", "linewidth": 2.4, "markersize": 6.5},
    "log-length": {"color": "#0072B2", "marker": "^"},
    "entropy-target": {"color": "#009E73", "marker": "D"},
}
_THEORY = {"color": "#777777", "linestyle": (0, (4, 3)), "linewidth": 1.2}
_SILENT = "#D55E00"


def draw_dispersion(tables: Mapping[str, Any]) -> Any:
    """A `matplotlib.figure.Figure` of two panels with one legend under both."""
    figure = require("matplotlib.figure", "report", "drawing figures").Figure(figsize=(10.0, 5.0))
    left, right = figure.subplots(1, 2)
    weight, entropy, theory = tables["weight"], tables["entropy"], tables["theory"]
    for panel, table in ((left, weight), (right, entropy)):
        for arm in sorted(table, key=_order):
            sizes = sorted(table[arm], key=int)
            style = {"linewidth": 1.8, "markersize": 5.0, **_STYLES.get(arm, {})}
            means = [table[arm][n]["mean"] for n in sizes]
            panel.plot([int(n) for n in sizes], means, label=_LABELS.get(arm, arm), **style)
    _dashed(left, theory["largest_weight"], f"bound for plain softmax, logits within {theory['spread']:g} nats")
    _dashed(right, theory["least_entropy"], "")
    left.set_ylabel("weight of the best item (%)")
    left.set_ylim(0.0, 102.0)
    left.set_title("Softmax loses the best item as inputs grow", loc="left", fontsize=11)
    right.set_ylabel("entropy of the attention row (nats)")
    right.set_ylim(0.0, None)
    right.set_title("because its entropy grows with them", loc="left", fontsize=11)
    for panel in (left, right):
        _size_axis(panel, [int(n) for n in weight["softmax"]])
    _mark_silence(left, right, entropy["softmax"], theory.get("paper_acts_below"))
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=9)
    figure.tight_layout(rect=(0.0, 0.11, 1.0, 1.0), w_pad=2.5)
    return figure


def _order(arm: str) -> tuple[int, str]:
    return (list(_LABELS).index(arm) if arm in _LABELS else len(_LABELS), arm)


def _dashed(panel: Any, bound: Mapping[str, float], label: str) -> None:
    sizes = sorted(bound, key=int)
    panel.plot([int(n) for n in sizes], [bound[n] for n in sizes], label=label, zorder=1.5, **_THEORY)


def _size_axis(panel: Any, sizes: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_xlabel("number of items n")
    shown = sorted(sizes)[::2]
    panel.set_xticks(shown, [f"{n:,}" for n in shown])
    panel.minorticks_off()


def _mark_silence(left: Any, right: Any, plain: Mapping[str, Any], acts_below: float | None) -> None:
    """Shade the sizes at which plain entropy is beyond the polynomial's range, and draw the end of that range."""
    if acts_below is None:
        return
    start = _crossing(plain, acts_below)
    if start is None:
        return
    end = max(int(n) for n in plain)
    for panel in (left, right):
        panel.axvspan(start, end * 2**0.3, color=_SILENT, alpha=0.07, linewidth=0, zorder=0)
        panel.set_xlim(None, end * 2**0.3)
    note = f"plain entropy > {acts_below:.2f} nats:\nthe paper's polynomial\nleaves these rows alone"
    left.text(start * 1.25, 34.0, note, color=_SILENT, fontsize=8.5, va="bottom")
    right.axhline(acts_below, color=_SILENT, linewidth=1.0, linestyle=":", zorder=1)
    first = min(int(n) for n in plain)
    right.text(
        first,
        acts_below + 0.1,
        f"the polynomial acts\nbelow {acts_below:.2f} nats",
        color=_SILENT,
        fontsize=8.5,
        va="bottom",
    )


def _crossing(table: Mapping[str, Any], level: float) -> float | None:
    """The size at which a rising line of means passes `level`, straight between points on the log axis."""
    sizes = sorted(table, key=int)
    for a, b in itertools.pairwise(sizes):
        low, high = table[a]["mean"], table[b]["mean"]
        if low <= level < high:
            share = (level - low) / (high - low)
            return math.exp(math.log(int(a)) + share * math.log(int(b) / int(a)))
    return None
