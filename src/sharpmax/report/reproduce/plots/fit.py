"""The figure of the polynomials: the best β of wrongly ranked inputs against entropy, and the curves through them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.report.looks import SOFT
from sharpmax.report.plot import Axis, Mark, Panel, Plot, Series
from sharpmax.report.reproduce.looks import BEST, look
from sharpmax.report.reproduce.plots.axes import note
from sharpmax.report.reproduce.tables import part
from sharpmax.report.tables import Tables
from sharpmax.report.words import count, nats, plural

__all__ = ["fit"]

_SHOWN = 0.98
"""Share of the points that the axis makes room for: a few best temperatures are enormous."""


def fit(tables: Tables, recipe: str) -> Plot:
    """Scatter of (entropy, best β), the refitted curve, the paper's polynomial and its end."""
    table = part(tables, "fit", recipe)
    entropy, beta = table["points"]["entropy"], table["points"]["beta"]
    curve, end = table["curve"], table["paper_acts_on"][1]
    ordered = sorted(beta)
    top = 1.1 * max(*curve["refit"], *curve["paper"], *ordered[: round(_SHOWN * len(ordered))][-1:])
    right = max([*entropy, *curve["entropy"], end or 0.0])
    best = Series(
        BEST.label,
        BEST,
        entropy,
        beta,
        [f"H = {nats(h)} nats, best β = {b:.2f}" for h, b in zip(entropy, beta, strict=True)],
        stroke=None,
    )
    marks = [Mark("y", 1.0, "", SOFT)]
    if end is not None:
        marks.append(Mark("x", end, f"the paper's ends: {nats(end)}", look("paper").colour))
    found = f"{count(table['wrong'])} wrongly ranked inputs of {count(table['inputs'])}"
    return Plot(
        "Best β of wrongly ranked inputs"
        + (f": the paper's polynomial stops acting at {nats(end)} nats" if end is not None else ", and polynomials"),
        note(tables, recipe, found, f"R² of the refit {table['r2']:.2f}"),
        _caption(table, sum(value > top for value in beta)),
        "Scatter of the best β of wrongly ranked inputs against the entropy of their attention rows, with two curves "
        "through it: the refitted polynomial and the paper's.",
        [
            Panel(
                Axis("entropy of the attention row H (nats)", (0.0, right * 1.02)),
                Axis("inverse temperature β", (0.0, top)),
                [best, *(_curve(arm, curve["entropy"], curve[arm]) for arm in ("refit", "paper"))],
                marks,
                together=False,
            )
        ],
    )


def _curve(arm: str, entropy: Sequence[float], beta: Sequence[float]) -> Series:
    label = look(arm).label
    words = [f"{label} at {nats(h)} nats: β = {b:.2f}" for h, b in zip(entropy, beta, strict=True)]
    return Series(label, look(arm), entropy, beta, words, marker=None, arm=arm)


def _caption(table: Mapping[str, Any], above: int) -> str:
    low, high = table["fitted_on"]
    hidden = f" Above the frame: {plural(above, 'dot')} of {count(len(table['points']['beta']))}." if above else ""
    return (
        "Each dot is an input whose right item did not get the largest weight; its β is the one that gives that item "
        f"the most. The refitted polynomial follows them from {nats(low)} to {nats(high)} nats; it "
        f"{_acts(table['acts_on'])}. The paper's polynomial {_acts(table['paper_acts_on'])} and leaves all other rows "
        f"as they are (β = 1, dotted).{hidden}"
    )


def _acts(span: list[float | None] | None) -> str:
    if not span or span[0] is None:
        return "never exceeds β = 1"
    return f"acts from {nats(span[0])} nats " + ("on, without end" if span[1] is None else f"to {nats(span[1])} nats")
