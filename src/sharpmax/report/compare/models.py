"""What the tables of `sharpmax compare --capacity` hold: models of several capacities, laws through them, layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sharpmax.report.tables import Tables
from sharpmax.report.words import count, nats

__all__ = [
    "BELOW",
    "BEYOND",
    "FACTORS",
    "MEASURES",
    "by_law",
    "capacity_methods",
    "constant",
    "deep",
    "end_of",
    "end_words",
    "exponent_text",
    "exponents",
    "factor_words",
    "formula",
    "models_of",
    "name_of",
    "varying",
]

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
