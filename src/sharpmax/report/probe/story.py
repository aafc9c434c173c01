"""`sharpmax probe`, told: its figures, numbers, tables, verdict and method, for one run or for two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sharpmax.report.board import Board
from sharpmax.report.origin import Pairs, origin_of_run
from sharpmax.report.plot import Plot
from sharpmax.report.probe.curves import curves, frame, heads_data
from sharpmax.report.probe.facts import chosen, forecast_error, is_pair, runs, tasks
from sharpmax.report.probe.forecasts import forecasts
from sharpmax.report.probe.grids import grids
from sharpmax.report.probe.kinds import letter_of
from sharpmax.report.probe.layers import layers
from sharpmax.report.probe.maps import board
from sharpmax.report.probe.summary import summary
from sharpmax.report.probe.tiles import tiles
from sharpmax.report.probe.told import measured_on
from sharpmax.report.story import Figure, Part, Story
from sharpmax.report.tables import RUNS, Tables, check_name
from sharpmax.report.words import capital, count, joined, plural

__all__ = ["STORY"]


def _tells(tables: Tables) -> bool:
    return is_pair(tables) or any(name.startswith("heads/") for name in tables)


def _figures(tables: Tables) -> list[Figure]:
    return [figure for task in tasks(tables) for figure in _of_task(tables, check_name(task, "task"))]


def _of_task(tables: Tables, task: str) -> list[Figure]:
    makers: dict[str, Callable[[], Plot | Board]] = {
        "heads": partial(board, tables, task),
        "curves": lambda: curves(frame(tables, task), chosen(tables, task)),
        "layers": partial(layers, tables, task),
    }
    if any(forecast_error(run, task) for run in runs(tables)):
        makers["forecast"] = partial(forecasts, tables, task)
    return [Figure(kind, task, f"{kind}-{task}", f"{kind}-{task}", make) for kind, make in makers.items()]


def _parts(tables: Tables) -> list[Part]:
    return [
        Part(
            task,
            f"Task {task}",
            _describe(tables, task),
            tiles(tables, task),
            grids(tables, task),
            {"heads": heads_data(tables, task), "runs": [run.label for run in runs(tables)]},
        )
        for task in tasks(tables)
    ]


def _describe(tables: Tables, task: str) -> str:
    said = {run.letter: measured_on(run, task) for run in runs(tables)}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{letter} {words}" for letter, words in said.items())


def _method(tables: Tables) -> dict[str, Any]:
    found = runs(tables)
    rules = {kind: rule for run in found for kind, rule in (run.setting.get("kind_rule") or {}).items()}
    methods = {str(run.forecast(task)["method"]) for run in found for task in tasks(tables) if run.forecast(task)}
    return {
        "compared": len(found) > 1,
        "rules": [(f"{letter_of(kind)} {kind}", capital(str(rule))) for kind, rule in rules.items()],
        "names": [run.name for run in found],
        "models": [(run.label, _model(run.setting)) for run in found],
        "forecast": joined(sorted(methods)),
    }


def _model(setting: Any) -> str:
    parts = [
        f"{setting['family']} family",
        f"{plural(setting['layers'], 'layer')} of {plural(setting['heads'], 'head')}",
        f"context of {count(setting['context'])} tokens" if setting.get("context") else "",
        f"policy {setting['policy']}" if setting.get("policy") else "no policy",
        f"{setting['dtype']} on {setting['device']}",
        f"rows: {setting['rows']}",
    ]
    return ", ".join(part for part in parts if part)


def _origins(tables: Tables) -> list[tuple[str, Pairs]]:
    if not is_pair(tables):
        return []
    return [
        (run.label, origin_of_run(saved["command"], saved["provenance"], saved["tables"]))
        for run, saved in zip(runs(tables), tables[RUNS], strict=True)
    ]


STORY = Story("probe", _tells, _figures, _parts, summary, _method, _origins, compares=True)
