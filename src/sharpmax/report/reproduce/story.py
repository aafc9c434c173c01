"""`sharpmax reproduce`, told: its figures, parts, summary and method."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sharpmax.report.origin import Pairs, origin_of_weights
from sharpmax.report.reproduce.gains import end_sentence
from sharpmax.report.reproduce.grids import end_grid, grids
from sharpmax.report.reproduce.looks import in_order, look
from sharpmax.report.reproduce.plots import build, file_name, plottable
from sharpmax.report.reproduce.summary import detected, fixed, meant, measured
from sharpmax.report.reproduce.tables import describe, part, recipe_name, recipes
from sharpmax.report.reproduce.tiles import tiles
from sharpmax.report.story import Figure, Part, Story
from sharpmax.report.tables import Tables
from sharpmax.report.words import capital, count, joined

__all__ = ["STORY"]


def _tells(tables: Tables) -> bool:
    return bool(plottable(tables))


def _figures(tables: Tables) -> list[Figure]:
    return [
        Figure(name, recipe, f"{name}-{recipe}", file_name(name, recipe), partial(build, tables, name, recipe))
        for name, recipe in plottable(tables)
    ]


def _parts(tables: Tables) -> list[Part]:
    return [_part(tables, recipe) for recipe in recipes(tables)]


def _part(tables: Tables, recipe: str) -> Part:
    fit = part(tables, "fit", recipe) or {}
    return Part(
        recipe,
        capital(recipe_name(recipe)),
        describe(tables, recipe),
        tiles(tables, recipe),
        grids(tables, recipe),
        {
            "end": end_sentence(tables, recipe),
            "end_grid": end_grid(tables, recipe) if fit else None,
            "end_span": fit.get("paper_acts_on"),
        },
    )


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("What was measured", measured),
        ("What it means", meant),
        ("What the fix buys", fixed),
        ("Can failures be noticed?", detected),
    )
    return [(title, said) for title, say in parts if (said := say(tables))]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables.get("setting") or {}
    arms = in_order({arm for recipe in recipes(tables) for arm in part(tables, "accuracy", recipe) or {}})
    policies = setting.get("policies") or {}
    return {
        "train_sizes": [count(n) for n in setting.get("train_sizes") or []],
        "classes": setting.get("classes"),
        "samples": setting.get("samples"),
        "sizes": joined([count(n) for n in setting.get("sizes") or []]),
        "recipes": [
            {
                "label": capital(recipe_name(recipe)),
                "describe": describe(tables, recipe),
                "steps": count(chosen["steps"]),
                "seeds": len(chosen["seeds"]),
            }
            for recipe, chosen in (setting.get("recipes") or {}).items()
        ],
        "arms": [
            {"label": capital(look(arm).label), "about": look(arm).about, "rules": _rules(policies, arm)}
            for arm in arms
        ],
    }


def _rules(policies: Mapping[str, Any], arm: str) -> list[tuple[str, str]]:
    """The rule of an arm for each recipe, or once if it is the same for all."""
    rules = [(capital(recipe_name(recipe)), str(known[arm])) for recipe, known in policies.items() if known.get(arm)]
    return rules[:1] if len({rule for _, rule in rules}) == 1 else rules


def _origins(tables: Tables) -> list[tuple[str, Pairs]]:
    weights = (tables.get("weights") or {}).items()
    return [(f"Models of {recipe_name(recipe)}", origin_of_weights(about)) for recipe, about in weights]


STORY = Story("reproduce", _tells, _figures, _parts, _summary, _method, _origins)
