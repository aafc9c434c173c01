"""The tables of capacity: every model with its two ends, and the laws through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpmax.report.compare.models import (
    FACTORS,
    MEASURES,
    by_law,
    constant,
    deep,
    end_words,
    exponent_text,
    exponents,
    models_of,
)
from sharpmax.report.grid import NOTHING, Cell, Grid
from sharpmax.report.tables import Tables, readable
from sharpmax.report.words import count

__all__ = ["laws_grid", "models_grid"]


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
