"""What capacity changes, in plain sentences computed from the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.report.compare.models import (
    BELOW,
    BEYOND,
    MEASURES,
    capacity_methods,
    deep,
    end_of,
    end_words,
    exponents,
    formula,
    models_of,
    name_of,
)
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import capital, count, joined, plural

__all__ = ["capacity_care", "capacity_verdict"]


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
    said += [_law(method, MEASURES[name][1], law) for name, law in laws.items()]
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


def _law(method: str, what: str, law: Mapping[str, Any]) -> str:
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
