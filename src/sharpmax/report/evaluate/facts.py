"""What the tables of `sharpmax evaluate` hold and show, before it is put into words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharpmax.report.tables import Tables, sizes
from sharpmax.report.texts import texts_in_order

__all__ = [
    "LEVEL",
    "Gain",
    "accuracy",
    "arms",
    "base",
    "columns",
    "gain",
    "home",
    "policies",
    "tasks",
]

LEVEL = 0.01
"""A difference counts as shown when its p value is below this: there are many sizes and tasks to be wrong about."""


def tasks(tables: Tables) -> list[str]:
    """The tasks of a run, in its order."""
    return [name.partition("/")[2] for name in tables if name.startswith("accuracy/")]


def arms(tables: Tables) -> Mapping[str, Any]:
    """What the run says of its arms, in its order: the model as it comes first."""
    known: Mapping[str, Any] = tables["setting"]["arms"]
    return known


def base(tables: Tables) -> str:
    """The arm without a policy."""
    return next(arm for arm, about in arms(tables).items() if about["policy"] is None)


def policies(tables: Tables) -> list[str]:
    """The arms with a policy."""
    return [arm for arm, about in arms(tables).items() if about["policy"] is not None]


def home(tables: Tables, arm: str) -> str:
    """The task that a policy was calibrated on where that is known and was run, else the first task."""
    known = tasks(tables)
    task = arms(tables)[arm].get("calibrated_on")
    return task if task in known else known[0]


def accuracy(tables: Tables, task: str, arm: str) -> Mapping[str, Any]:
    """An arm's cells in a task, by size."""
    cells: Mapping[str, Any] = tables[f"accuracy/{task}"][arm]
    return cells


def columns(tables: Tables) -> list[str]:
    """The texts that perplexity was measured on: lengths of windows, and the model's own answers last."""
    return texts_in_order(column for cells in tables.get("perplexity", {}).values() for column in cells)


@dataclass(frozen=True)
class Gain:
    """What a policy changes in one task: points by size, sizes at which a change is shown, and the mean change."""

    task: str
    arm: str
    points: Mapping[str, float]
    better: tuple[str, ...]
    worse: tuple[str, ...]

    @property
    def mean(self) -> float:
        """Mean change over the sizes."""
        return sum(self.points.values()) / len(self.points)

    @property
    def best(self) -> str:
        """The size of the largest gain."""
        return max(self.points, key=self.points.__getitem__)

    @property
    def worst(self) -> str:
        """The size of the largest loss."""
        return min(self.points, key=self.points.__getitem__)


def gain(tables: Tables, task: str, arm: str) -> Gain:
    """What a policy changes in a task."""
    plain, cells, tests = accuracy(tables, task, base(tables)), accuracy(tables, task, arm), tables[f"paired/{task}"]
    apart = {n: cells[n]["mean"] - plain[n]["mean"] for n in sizes(cells)}
    shown = [n for n in apart if tests[arm][n]["p"] < LEVEL]
    return Gain(
        task,
        arm,
        apart,
        better=tuple(n for n in shown if apart[n] > 0),
        worse=tuple(n for n in shown if apart[n] < 0),
    )
