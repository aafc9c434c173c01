"""The figures of capacity: how far models of several shapes carry, and which of their layers disperses first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.report.compare.models import (
    BEYOND,
    MEASURES,
    by_law,
    deep,
    end_of,
    end_words,
    exponent_text,
    exponents,
    factor_words,
    formula,
    models_of,
    varying,
)
from sharpmax.report.compare.plots import note
from sharpmax.report.looks import BLACK, CIRCLE, SOFT, SQUARE, VERMILLION, Look, in_turn
from sharpmax.report.plot import Axis, Panel, Plot, Series
from sharpmax.report.tables import Tables
from sharpmax.report.words import capital, count, nats, plural

__all__ = ["capacity_map", "layers"]

_LAW, _OUTSIDE = "fitted law", "ends outside the sizes tested"
_HOLLOW = "Hollow points end outside the sizes tested, and are left out of the law."
_EDGE = 2.0**0.5
"""Where models are drawn that end outside the sizes: so much beyond the last."""


def capacity_map(tables: Tables, method: str, measure: str) -> Plot:
    """The size at which each model ends by one of the measures, a panel for each depth, with the fitted law."""
    across, by_line, by_panel = varying(tables, method)
    models, law = models_of(tables, method), tables["laws"][method][measure]
    groups = sorted({model[by_panel] for model in models})
    x, y = _factor_axis(across, sorted({model[across] for model in models})), _ends_axis(tables, method, measure)
    panels = [
        Panel(
            x, y, _lines(tables, method, measure, y, [model for model in models if model[by_panel] == group]),
            title=factor_words(by_panel, group) if len(groups) > 1 else "", together=False,
        )
        for group in groups
    ]  # fmt: skip
    law_words = f"{capital(MEASURES[measure][1])} at about {formula(law)}" if law["exponents"] is not None else ""
    brackets = (
        " (in brackets 95%, of seeds drawn again)"
        if any(one["low"] is not None for one in exponents(law).values())
        else ""
    )
    return Plot(
        _title(tables, method, measure),
        _note(tables, models),
        "Each point is a model. "
        + (f"Dotted: the fitted law. {law_words}{brackets}. " if law_words else "No law could be fitted. ")
        + (_HOLLOW if any(isinstance(end_of(model, measure), str) for model in models) else ""),
        f"The size at which {MEASURES[measure][1]} in models of {method} against {across}, a line for each "
        f"{_one(by_line)} and a panel for each {_one(by_panel)}. {law_words or 'No law could be fitted'}.",
        panels,
        small=len(panels) > 2,
    )


def layers(tables: Tables, method: str) -> Plot:
    """How fast the entropy of every layer grows, measured and forecast, a panel for each deep model."""
    known = deep(tables, method)
    same = sum(one["first_measured"] == one["first_forecast"] for one in known.values())
    slopes = [0.0, *(value for one in known.values() for kind in ("measured", "forecast") for value in one[kind])]
    room = 0.08 * max(0.1, max(slopes) - min(slopes))
    y = Axis("entropy gained per nat of ln n", (min(slopes) - room, max(slopes) + room))
    most = max(len(one["measured"]) for one in known.values())
    x = Axis(
        "layer", (0.5, most + 0.5), ticks=tuple((float(i), str(i)) for i in range(1, most + 1)), hover="layer %{x}"
    )
    return Plot(
        f"Which layer of {method} disperses first: as forecast in {same} of {plural(len(known), 'model')}",
        _note(tables, models_of(tables, method)),
        "The layer whose entropy grows fastest disperses first. Measured beyond 64, and forecast from sizes up to 64 "
        "alone; 1 is the growth of attention that gives all items the same.",
        f"Growth of entropy by layer, measured and forecast, a panel for each of {plural(len(known), 'deep model')}; "
        f"in {same} of them the layer that disperses first is the one forecast.",
        [Panel(x, y, _slopes(one), title=_short(label)) for label, one in known.items()],
        small=len(known) > 2,
    )


def _lines(tables: Tables, method: str, measure: str, y: Axis, models: Sequence[Mapping[str, Any]]) -> list[Series]:
    across, by_line, _ = varying(tables, method)
    values = sorted({model[by_line] for model in models_of(tables, method)})
    law = tables["laws"][method][measure]
    found, outside, drawn = [], [], []
    for place, value in enumerate(values):
        label = factor_words(by_line, value)
        look = in_turn(label, place)
        here = sorted((model for model in models if model[by_line] == value), key=lambda model: int(model[across]))
        inside = [model for model in here if isinstance(end_of(model, measure), float)]
        words = [f"{_short(model['model'])}: {end_words(tables, model, measure)}" for model in inside]
        ends = [float(end_of(model, measure) or 0.0) for model in inside]
        found.append(Series(label, look, [float(m[across]) for m in inside], ends, words, arm=label))
        other = [model for model in here if isinstance(end_of(model, measure), str)]
        words = [f"{_short(model['model'])}: {end_words(tables, model, measure)}" for model in other]
        if other:
            ends = [_edge(tables, str(end_of(model, measure))) for model in other]
            x = [float(model[across]) for model in other]
            outside.append(
                Series(_OUTSIDE, look, x, ends, words, stroke=None, marker="hollow", arm=label,
                       in_legend=Look(_OUTSIDE, SOFT, CIRCLE))
            )  # fmt: skip
        if law["exponents"] is not None and here:
            drawn.append(_law_line(law, look, y, across, here))
    return [*found, *outside, *drawn]


def _law_line(
    law: Mapping[str, Any], look: Look, axis: Axis, across: str, models: Sequence[Mapping[str, Any]]
) -> Series:
    low, high = axis.limits
    x = [float(model[across]) for model in models]
    y = [min(max(by_law(law, model) or low, low), high) for model in models]
    if len(x) == 1:  # one point alone would be a line without length
        x, y = [x[0] / 1.15, x[0] * 1.15], y * 2
    thin = Look(_LAW, look.colour, width=1.0, layer=1.4)
    return Series(
        _LAW, thin, x, y, "", stroke="dot", marker=None, arm=look.label, in_legend=Look(_LAW, SOFT, width=1.0)
    )


def _slopes(one: Mapping[str, Any]) -> list[Series]:
    looks = {"measured": Look("measured", BLACK, CIRCLE), "forecast": Look("forecast", VERMILLION, SQUARE, layer=1.8)}
    return [
        Series(
            name, look, [float(place) for place in range(1, len(one[name]) + 1)], one[name],
            [f"{name}: {nats(value)}" for value in one[name]],
            stroke="solid" if name == "measured" else "dash", marker="full" if name == "measured" else "hollow",
        )
        for name, look in looks.items()
    ]  # fmt: skip


def _factor_axis(name: str, values: Sequence[int]) -> Axis:
    ticks = tuple((float(value), count(value)) for value in values)
    return Axis(name, (values[0] / 1.35, values[-1] * 1.35), log=True, ticks=ticks)


def _ends_axis(tables: Tables, method: str, measure: str) -> Axis:
    """Sizes from a little below the first end to a little above the last."""
    ends = [
        end if isinstance(end, float) else _edge(tables, end)
        for model in models_of(tables, method)
        if (end := end_of(model, measure)) is not None
    ]
    known = tables["setting"]["sizes"]
    low, high = min(ends, default=float(known[0])), max(ends, default=float(known[-1]))
    limits = low / _EDGE, high * _EDGE
    ticks = [(float(size), _brief(size)) for size in known if limits[0] <= size <= limits[1]]
    return Axis(f"size of the end ({tables['setting']['unit']})", limits, log=True, ticks=tuple(ticks) or None)


def _brief(size: int) -> str:
    """A size in the few letters that there is room for.

    >>> _brief(512), _brief(16384)
    ('512', '16k')
    """
    return str(size) if size < 1000 else f"{round(size / 1000)}k"


def _edge(tables: Tables, end: str) -> float:
    known = tables["setting"]["sizes"]
    return float(known[-1]) * _EDGE if end == BEYOND else float(known[0]) / _EDGE


def _title(tables: Tables, method: str, measure: str) -> str:
    known = exponents(tables["laws"][method][measure])
    what = f"{method}: the size at which {MEASURES[measure][1]}"
    sure = {name: one["mean"] for name, one in known.items() if one["low"] is not None and not _holds_zero(one)}
    if sure:
        return f"{what} goes as {' · '.join(f'{name}^{exponent_text(mean)}' for name, mean in sure.items())}"
    if known and all(one["low"] is not None for one in known.values()):
        return f"{what} is not shown to depend on {' or '.join(known)}"
    return f"{what}, by width, heads and depth"


def _holds_zero(one: Mapping[str, Any]) -> bool:
    return bool(one["low"] <= 0.0 <= one["high"])


def _one(factor: str) -> str:
    return "number of heads" if factor == "heads" else factor


def _note(tables: Tables, models: Sequence[Mapping[str, Any]]) -> str:
    text = note(tables).partition(" on ")[2]
    return f"{plural(len(models), 'encoder')} on {text}"


def _short(label: str) -> str:
    """A model without what all of them share.

    >>> _short("encoder w32 h1 d2 global")
    'w32 h1 d2'
    """
    return label.removeprefix("encoder ").removesuffix(" global").removesuffix(" causal")
