"""Facts, tables and figures of `sharpmax compare --capacity`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.report.plot import Axis, Panel, Plot, Series
from sharpmax.report.section import NOTHING, Cell, Grid
from sharpmax.report.sections.compare_charts import note
from sharpmax.report.tables import Tables, readable
from sharpmax.report.theme import BLACK, CIRCLE, SOFT, SQUARE, VERMILLION, Look, in_turn
from sharpmax.report.words import capital, count, joined, nats, plural

FACTORS = ("width", "heads", "depth")
MEASURES = {
    "accuracy": ("half_accuracy_size", "accuracy halves"),
    "top": ("half_top_weight_size", "the top weight falls under ½"),
}
"""The two ends of a model: where they stand in a cell, and what happens there."""

BEYOND, BELOW = "beyond", "never above"


def capacity_methods(tables: Tables) -> list[str]:
    """The methods that models of several capacities were trained with."""
    return list(tables["capacity"])


def models_of(tables: Tables, method: str) -> Sequence[Mapping[str, Any]]:
    """The models of a method."""
    found: Sequence[Mapping[str, Any]] = tables["capacity"][method]
    return found


def varying(tables: Tables, method: str) -> list[str]:
    """All three factors, those first that have more than one value among the models."""
    several = {name: len({model[name] for model in models_of(tables, method)}) > 1 for name in FACTORS}
    return sorted(FACTORS, key=lambda name: not several[name])


def end_of(model: Mapping[str, Any], measure: str) -> float | str | None:
    """The size at which a measure of a model ends, or in a word why there is none."""
    found: float | str | None = model[MEASURES[measure][0]]
    return found


def end_words(tables: Tables, model: Mapping[str, Any], measure: str) -> str:
    """The same, to be read."""
    end, known = end_of(model, measure), tables["setting"]["sizes"]
    if end is None:
        return "–"
    if isinstance(end, str):
        return f"> {count(known[-1])}" if end == BEYOND else f"< {count(known[0])}"
    return count(end)


def exponents(law: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The exponents of a law; none where there is no law."""
    return law["exponents"] or {}


def by_law(law: Mapping[str, Any], model: Mapping[str, Any]) -> float | None:
    """The size that a law says for a model."""
    if law["exponents"] is None:
        return None
    return float(law["constant"] * math.prod(float(model[name]) ** one["mean"] for name, one in exponents(law).items()))


def formula(law: Mapping[str, Any]) -> str:
    """A law in signs, with intervals of its exponents where seeds allow them."""
    powers = []
    for name, one in exponents(law).items():
        reach = "" if one["low"] is None else f" ({exponent_text(one['low'])} to {exponent_text(one['high'])})"
        powers.append(f"{name}^{exponent_text(one['mean'])}{reach}")
    return " · ".join([constant(law), *powers])


def constant(law: Mapping[str, Any]) -> str:
    """The constant of a law."""
    return count(law["constant"]) if law["constant"] >= 1000.0 else f"{law['constant']:.3g}"


def name_of(model: Mapping[str, Any]) -> str:
    """A model in words."""
    return ", ".join(factor_words(name, model[name]) for name in FACTORS)


def deep(tables: Tables, method: str) -> dict[str, Mapping[str, Any]]:
    """Models of several layers in which measured and forecast dispersion can be compared."""
    return {label: found for label, found in tables["layers"].get(method, {}).items() if found is not None}


def factor_words(name: str, value: int) -> str:
    """A factor with its value.

    >>> factor_words("heads", 1), factor_words("width", 64)
    ('1 head', 'width 64')
    """
    if name == "heads":
        return f"{value} head" + ("" if value == 1 else "s")
    return f"{name} {value}"


def exponent_text(value: float) -> str:
    """An exponent to two places.

    >>> exponent_text(-0.002), exponent_text(-0.25)
    ('0.00', '−0.25')
    """
    return nats(round(value, 2) + 0.0)  # no zero has a sign


def models_grid(tables: Tables, method: str) -> Grid:
    """Where every model ends, what the law says, and which of its layers disperses first."""
    with readable("the models", tables):
        setting, laws = tables["setting"], tables["laws"][method]
        layered = bool(deep(tables, method))
        ends = [cell for measure in MEASURES for cell in (Cell(_TITLES[measure], setting["unit"]), Cell("by the law"))]
        return Grid(
            f"Models of {method}: where they end",
            "Accuracy halves: falls to half of what it is at the smallest size. By the law: what the fitted law says. "
            "> and <: the end lies outside the sizes tested, and the law is fitted without it."
            + (" First layer: the one whose entropy grows fastest, and the one forecast from sizes up to 64."
               if layered else ""),
            [
                *(Cell(name) for name in FACTORS), Cell("parameters"), *ends,
                *([Cell("first layer", "measured"), Cell("first layer", "forecast")] if layered else []),
                Cell("diverged", "seeds"),
            ],
            [_model(tables, method, model, laws, layered=layered) for model in models_of(tables, method)],
        )  # fmt: skip


def laws_grid(tables: Tables, method: str) -> Grid:
    """The exponents of the two laws."""
    with readable("the laws", tables):
        laws = tables["laws"][method]
        names = [name for name in FACTORS if any(name in exponents(law) for law in laws.values())]
        return Grid(
            f"Laws of {method}: size of the end ≈ constant · width^a · heads^b · depth^c",
            "Least squares of the logarithms. Intervals: 95%, of seeds drawn again, the same for all models. A bold "
            "exponent's interval holds no zero. Where many models end beyond the sizes tested, exponents come out too "
            "small.",
            [
                Cell("end"), Cell("constant"), *(Cell(f"exponent of {name}") for name in names), Cell("R²"),
                Cell("models", "in the law"), Cell("models", "that end beyond"),
            ],
            [_law(name, law, names) for name, law in laws.items()],
        )  # fmt: skip


_TITLES = {"accuracy": "accuracy halves", "top": "top weight under ½"}


def _model(
    tables: Tables, method: str, model: Mapping[str, Any], laws: Mapping[str, Any], *, layered: bool
) -> list[Cell]:
    ends = []
    for measure in MEASURES:
        told = by_law(laws[measure], model)
        ends += [
            Cell(end_words(tables, model, measure)),
            Cell(NOTHING if told is None else count(told), faint=True),
        ]
    first = deep(tables, method).get(model["model"])
    same = first is not None and first["first_measured"] == first["first_forecast"]
    layers = [
        Cell(NOTHING, faint=True) if first is None else Cell(str(first[name] + 1), strong=not same)
        for name in ("first_measured", "first_forecast")
    ]
    gone = model["diverged"]
    return [
        *(Cell(str(model[name])) for name in FACTORS),
        Cell(count(model["parameters"])),
        *ends,
        *(layers if layered else []),
        Cell(", ".join(map(str, gone)), strong=True) if gone else Cell("none", faint=True),
    ]


def _law(name: str, law: Mapping[str, Any], names: list[str]) -> list[Cell]:
    nothing = Cell(NOTHING, faint=True)
    known = exponents(law)
    return [
        Cell(_TITLES[name]),
        nothing if law["constant"] is None else Cell(constant(law)),
        *(_exponent(known[one]) if one in known else nothing for one in names),
        nothing if law["r2"] is None else Cell(f"{law['r2']:.2f}"),
        Cell(f"{law['used']} of {law['models']}"),
        Cell(str(law["beyond"])),
    ]


def _exponent(one: Mapping[str, Any]) -> Cell:
    if one["low"] is None:
        return Cell(exponent_text(one["mean"]))
    sure = not one["low"] <= 0.0 <= one["high"]
    return Cell(exponent_text(one["mean"]), f"{exponent_text(one['low'])} to {exponent_text(one['high'])}", strong=sure)


def capacity_verdict(tables: Tables) -> list[str]:
    """For every method: how far its models carry, by which law, and which layer disperses first."""
    with readable("the summary", tables):
        return [sentence for method in capacity_methods(tables) for sentence in _method(tables, method)]


def capacity_care(tables: Tables) -> list[str]:
    """What stands against believing it."""
    with readable("the summary", tables):
        said = []
        for method in capacity_methods(tables):
            beyond = tables["laws"][method]["accuracy"]["beyond"]
            if beyond:
                said.append(
                    f"“{method}”: accuracy of {plural(beyond, 'model')} does not halve up to "
                    f"{count(tables['setting']['sizes'][-1])}; the law leaves that out, and its exponents tend to be "
                    "too small."
                )
            gone = [f"“{name_of(model)}”" for model in models_of(tables, method) if model["diverged"]]
            if gone:
                said.append(f"“{method}”: seeds diverged in {joined(gone)}; their answers count as wrong.")
        if len(tables["setting"]["seeds"]) == 1:
            said.append("One seed: the laws have no intervals.")
        return said


def _method(tables: Tables, method: str) -> list[str]:
    said = [_reach(tables, method, measure) for measure in MEASURES]
    laws = tables["laws"][method]
    said += [_law_sentence(method, MEASURES[name][1], law) for name, law in laws.items()]
    if known := deep(tables, method):
        said.append(_first(method, known))
    return said


def _reach(tables: Tables, method: str, measure: str) -> str:
    unit, models = tables["setting"]["unit"], models_of(tables, method)
    inside = [model for model in models if isinstance(end_of(model, measure), float)]
    what = f"“{method}”: {MEASURES[measure][1]}"
    outside = joined(_outside(tables, models, measure))
    if not inside:
        return f"{what} {outside}." if outside else f"{what} at no size that can be told."
    low, high = (
        pick(inside, key=lambda model: float(end_of(model, measure) or 0.0)) for pick in (min, max)
    )  # fmt: skip
    span = f"at {end_words(tables, low, measure)} {unit} ({name_of(low)})"
    if low is not high:
        span = (
            f"between {end_words(tables, low, measure)} {unit} ({name_of(low)}) and "
            f"{end_words(tables, high, measure)} ({name_of(high)})"
        )
    return f"{what} {span}{f'; {outside}' if outside else ''}."


def _outside(tables: Tables, models: Sequence[Mapping[str, Any]], measure: str) -> list[str]:
    """How many models end before the first or after the last of the sizes, in words."""
    first, last = (count(size) for size in (tables["setting"]["sizes"][0], tables["setting"]["sizes"][-1]))
    ends = [end_of(model, measure) for model in models]
    known = {f"before {first}": ends.count(BELOW), f"beyond {last}, if at all,": ends.count(BEYOND)}
    return [f"{where} in {many} of {plural(len(models), 'model')}" for where, many in known.items() if many]


def _law_sentence(method: str, what: str, law: Mapping[str, Any]) -> str:
    used = f"{law['used']} of {plural(law['models'], 'model')}"
    if law["exponents"] is None:
        return f"“{method}”: no law of the size at which {what}, as too few models end among the sizes tested ({used})."
    known = exponents(law)
    fit = "" if law["r2"] is None else f", R² {law['r2']:.2f}"
    said = f"“{method}”: {what} at a size of about {formula(law)} (from {used}{fit})"
    unsure = [name for name, one in known.items() if one["low"] is not None and one["low"] <= 0.0 <= one["high"]]
    if unsure:
        verb = "is" if len(unsure) == 1 else "are"
        return f"{said}; {joined(unsure)} {verb} not shown to matter."
    return f"{said}."


def _first(method: str, known: Mapping[str, Mapping[str, Any]]) -> str:
    measured = Counter(one["first_measured"] + 1 for one in known.values())
    same = sum(one["first_measured"] == one["first_forecast"] for one in known.values())
    (layer, times), *_ = measured.most_common()
    methods = sorted({str(one["method"]) for one in known.values()})
    how = f" (by {joined(methods)})" if len(methods) == 1 else ""
    start = f"“{method}”: of {plural(len(known), 'deep model')}, layer {layer} disperses first in {times}"
    return capital(f"{start}; the forecast from sizes up to 64{how} names the right layer in {same}.")


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
