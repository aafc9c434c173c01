"""`sharpmax calibrate`, told: its figures, numbers, tables, summary and method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sharpmax.report.calibrate import grids, summary
from sharpmax.report.calibrate.facts import leash
from sharpmax.report.calibrate.plots import curve, heads
from sharpmax.report.plot import Heat, Plot
from sharpmax.report.story import Figure, Part, Story
from sharpmax.report.tables import Tables
from sharpmax.report.words import count, joined

__all__ = ["STORY"]

_PART = "all"
_FIGURES: Mapping[str, Callable[[Tables], Plot | Heat]] = {"heads": heads, "curve": curve}


def _tells(tables: Tables) -> bool:
    return "candidates" in tables


def _figures(tables: Tables) -> list[Figure]:
    return [Figure(name, _PART, name, name, partial(make, tables)) for name, make in _FIGURES.items() if name in tables]


def _parts(tables: Tables) -> list[Part]:
    found = [grids.validation_grid(tables), grids.candidates_grid(tables), grids.heads_grid(tables)]
    model = str(tables["setting"]["model"])
    return [Part(_PART, model, tiles=summary.tiles(tables), grids=[grid for grid in found if grid])]


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("What was learned", summary.done),
        ("What came out", summary.found),
        ("What it costs", summary.cost),
        ("Without any cost at all", summary.folded),
    )
    return [(title, said) for title, say in parts if (said := say(tables))]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables["setting"]
    return {
        "task": setting["task"],
        "sizes": joined([count(n) for n in setting["sizes"]]),
        "steps": count(setting["steps"]),
        "leash": f"{leash(tables):g}%",
        "kinds": joined([str(kind) for kind in setting["kinds"]]),
    }


STORY = Story("calibrate", _tells, _figures, _parts, _summary, _method)
