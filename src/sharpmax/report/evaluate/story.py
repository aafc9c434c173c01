"""`sharpmax evaluate`, told: its figures, numbers, tables, summary and method."""

from __future__ import annotations

from functools import partial
from typing import Any

from sharpmax.report.evaluate import grids, summary
from sharpmax.report.evaluate.facts import arms, tasks
from sharpmax.report.evaluate.plots import right_answers
from sharpmax.report.evaluate.tiles import tiles
from sharpmax.report.grid import Grid
from sharpmax.report.story import Figure, Part, Story
from sharpmax.report.tables import Tables, check_name
from sharpmax.report.words import count, joined

__all__ = ["STORY"]

_PART = "all"


def _tells(tables: Tables) -> bool:
    return any(name.startswith("paired/") for name in tables)


def _figures(tables: Tables) -> list[Figure]:
    names = [check_name(task, "task") for task in tasks(tables)]
    return [
        Figure("accuracy", _PART, f"accuracy-{task}", f"accuracy-{task}", partial(right_answers, tables, task))
        for task in names
    ]


def _parts(tables: Tables) -> list[Part]:
    found: list[Grid | None] = [
        *grids.accuracy_grids(tables),
        grids.perplexity_grid(tables),
        grids.cost_grid(tables),
        grids.harness_grid(tables),
        *grids.paired_grids(tables),
    ]
    model = str(tables["setting"]["model"])
    return [Part(_PART, model, tiles=tiles(tables), grids=[grid for grid in found if grid])]


def _summary(tables: Tables) -> list[tuple[str, list[str]]]:
    parts = (
        ("What was measured", summary.measured),
        ("What is lost as inputs grow", summary.lost),
        ("What a policy gets back", summary.gained),
        ("On other formats", summary.elsewhere),
        ("What it costs", summary.cost),
        ("Take care", summary.remarks),
    )
    return [(title, said) for title, say in parts if (said := say(tables))]


def _method(tables: Tables) -> dict[str, Any]:
    setting = tables["setting"]
    return {
        "sizes": joined([count(n) for n in setting["sizes"]]),
        "prompts": count(setting["prompts"]),
        "tasks": [
            (name, f"{about['summary']} (version {about['version']})") for name, about in setting["tasks"].items()
        ],
        "arms": [(arm, about["describe"], count(about["touched"])) for arm, about in arms(tables).items()],
        "heads": count(setting["layers"] * setting["heads"]),
        "text": setting.get("text"),
        "questions": setting.get("questions"),
    }


STORY = Story("evaluate", _tells, _figures, _parts, _summary, _method)
