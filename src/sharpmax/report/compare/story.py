"""`sharpmax compare`, told: its figures, numbers, tables, summary and method."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from sharpmax.report.compare import capacity_summary, grids, summary
from sharpmax.report.compare.capacity_grids import laws_grid, models_grid
from sharpmax.report.compare.facts import has_capacity, has_league, methods
from sharpmax.report.compare.maps import capacity_map, layers
from sharpmax.report.compare.models import MEASURES, capacity_methods, deep, end_of, models_of
from sharpmax.report.compare.plots import accuracy, causes, sharpness
from sharpmax.report.compare.tiles import capacity_tiles, league_tiles
from sharpmax.report.story import Figure, Part, Story
from sharpmax.report.tables import Tables
from sharpmax.report.words import plural

__all__ = ["STORY"]

_LEAGUE = "league"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,40}")


def _tells(tables: Tables) -> bool:
    return has_league(tables) or has_capacity(tables)


def _figures(tables: Tables) -> list[Figure]:
    found: list[Figure] = []
    if has_league(tables):
        for name, make in (("accuracy", accuracy), ("sharpness", sharpness), ("causes", causes)):
            found.append(Figure(name, _LEAGUE, name, name, partial(make, tables)))
    for method, name in _capacities(tables).items():
        # A map of models that all end outside the sizes shows nothing that a sentence does not.
        telling = [
            measure
            for measure in MEASURES
            if any(isinstance(end_of(model, measure), float) for model in models_of(tables, method))
        ]
        drawn = [(one, partial(capacity_map, tables, method, one)) for one in telling or list(MEASURES)[:1]]
        if deep(tables, method):
            drawn.append(("layers", partial(layers, tables, method)))
        for kind, map_of in drawn:
            file = f"{name}-{kind}"
            found.append(Figure(kind, name, file, file, map_of))
    return found


def _capacities(tables: Tables) -> dict[str, str]:
    """Names of parts and files by method; a name that no file should have is counted instead."""
    known = capacity_methods(tables) if has_capacity(tables) else []
    return {
        method: f"capacity-{method if _PLAIN.fullmatch(method) else place}"
        for place, method in enumerate(known, start=1)
    }


def _parts(tables: Tables) -> list[Part]:
    found = []
    if has_league(tables):
        ties = grids.near_ties_grid(tables)
        tabled = [grids.causes_grid(tables), *([ties] if ties else [])]
        found.append(
            Part(
                _LEAGUE, "League", tiles=league_tiles(tables), grids=tabled,
                more={"league": grids.league_grid(tables)},
            )
        )  # fmt: skip
    for method, name in _capacities(tables).items():
        tabled = [laws_grid(tables, method), models_grid(tables, method)]
        found.append(Part(name, f"Capacity: {method}", tiles=capacity_tiles(tables, method), grids=tabled))
    return found


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    said: list[tuple[str, list[str]]] = []
    if has_league(tables):
        said += [
            ("Verdict", summary.verdict(tables)),
            ("The league", summary.ranks(tables)),
            ("What was asked", summary.asked(tables)),
            ("Take care", summary.care(tables)),
        ]
    if has_capacity(tables):
        said += [
            ("What capacity changes" if said else "Verdict", capacity_summary.capacity_verdict(tables)),
            ("About the laws" if said else "Take care", capacity_summary.capacity_care(tables)),
        ]
    return [(title, sentences) for title, sentences in said if sentences]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables["setting"]
    return {
        "league": has_league(tables),
        "capacity": has_capacity(tables),
        "task": setting["task"],
        "about": setting["task_summary"].rstrip("."),
        "unit": setting["unit"],
        "trained": setting["train_sizes"],
        "steps": plural(setting["steps"], "step"),
        "batch": plural(setting["batch"], "example"),
        "rate": f"{setting['learning_rate']:g}",
        "warmup": plural(setting["warmup"], "step"),
        "device": setting["device"],
        "level": f"{setting['level']:g}",
        "methods": [_about(tables, name) for name in methods(tables)] if has_league(tables) else [],
    }


def _about(tables: Tables, name: str) -> tuple[str, str, str]:
    """A method: its name, what it is, and what else is its own."""
    one = tables["methods"][name]
    own = [f"{what}: {_pairs(one[what])}" for what in ("options", "recipe", "data") if one[what]]
    if one["at_test"] is not None:
        own.append(f"at test: {one['at_test']['normaliser']}")
    if one["feed_forward"] != "gelu":
        own.append(f"feed-forward layers: {one['feed_forward']}")
    parameters = f"{tables['training'][name]['parameters']:,} parameters"
    return name, one["summary"] or one["normaliser"], "; ".join([*own, parameters])


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


STORY = Story("compare", _tells, _figures, _parts, _summary, _method)
