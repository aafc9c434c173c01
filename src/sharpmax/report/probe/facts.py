"""What the tables of `sharpmax probe` hold and show, before it is put into words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sharpmax.errors import FileFormatError
from sharpmax.report.tables import RUNS, Tables, sizes

__all__ = ["LOSES_FOCUS", "UNKNOWN", "Run", "chosen", "forecast_error", "is_pair", "place", "runs", "tasks"]

LOSES_FOCUS = ("dispersing", "uniform")
"""The kinds of heads that this is all about: those whose rows spread as inputs grow."""

UNKNOWN = "unknown"
"""The kind of a head without numbers."""

_HEADS = "heads/"


@dataclass(frozen=True)
class Run:
    """One probed model; where there are several, each has a letter."""

    letter: str
    name: str
    tables: Tables

    @property
    def label(self) -> str:
        """What a reader calls it."""
        return f"{self.letter}: {self.name}" if self.letter else self.name

    @property
    def setting(self) -> Mapping[str, Any]:
        """How it was probed."""
        found: Mapping[str, Any] = self.tables["setting"]
        return found

    def heads(self, task: str) -> Mapping[str, Any]:
        """Every head by its name, layer.head."""
        found: Mapping[str, Any] = self.tables[_HEADS + task]
        return found

    def layers(self, task: str) -> Mapping[str, Any]:
        """Every layer by its number; empty where the run says nothing of layers."""
        return self.tables.get(f"layers/{task}") or {}

    def forecast(self, task: str) -> Mapping[str, Any]:
        """The errors of the forecast; empty where nothing was forecast and measured."""
        return self.tables.get(f"forecast/{task}") or {}

    def chain(self, task: str) -> Mapping[str, Any]:
        """How layers go with those that follow; empty where the run does not say."""
        return self.tables.get(f"chain/{task}") or {}

    def unit(self, task: str) -> str:
        """What sizes are counted in."""
        return str(self.setting["unit"][task])

    def shape(self, task: str) -> tuple[list[int], int]:
        """The layers that have heads, and the most heads of a layer."""
        known = [place(name) for name in self.heads(task)]
        return sorted({layer for layer, _ in known}), 1 + max(head for _, head in known)

    def kinds(self, task: str) -> Counter[str]:
        """How many heads there are of each kind."""
        return Counter(str(about["kind"]) for about in self.heads(task).values())

    def known(self, task: str) -> int:
        """How many heads have numbers."""
        return len(self.heads(task)) - self.kinds(task)[UNKNOWN]

    def losing(self, task: str) -> int:
        """How many heads lose their focus."""
        return sum(self.kinds(task)[kind] for kind in LOSES_FOCUS)

    def horizons(self, task: str) -> dict[str, float]:
        """The horizons of all heads that have one."""
        found = {name: about["horizon"]["tokens"] for name, about in self.heads(task).items()}
        return {name: tokens for name, tokens in found.items() if tokens is not None}

    def ranked(self, task: str) -> list[str]:
        """The layers in the order in which they disperse."""
        known = self.layers(task)
        return sorted((layer for layer in known if known[layer]["rank"] is not None), key=lambda n: known[n]["rank"])

    def first(self, task: str) -> list[str]:
        """The layers that disperse at all, in that order."""
        return [layer for layer in self.ranked(task) if (self.layers(task)[layer]["slope"] or 0.0) > 0.0]

    def visible(self, task: str, size: str) -> float | None:
        """How many keys a head sees at a size, in the middle of all heads."""
        cells = [about["curve"].get(size) or {} for about in self.heads(task).values()]
        known = [cell["count"] for cell in cells if cell.get("count") is not None]
        return median(known) if known else None


def place(name: str) -> tuple[int, int]:
    """The layer and the head of a head's name.

    >>> place("12.3")
    (12, 3)
    """
    layer, _, head = name.partition(".")
    return int(layer), int(head)


def is_pair(tables: Tables) -> bool:
    """Whether two runs are told together."""
    return RUNS in tables


def runs(tables: Tables) -> list[Run]:
    """The run of these tables, or both."""
    if not is_pair(tables):
        return [Run("", _name(tables["setting"]), tables)]
    found = tables[RUNS]
    names = [_name(run["tables"]["setting"]) for run in found]
    if len(set(names)) < len(names):  # the models do not tell them apart, so their folders must
        names = [f"{name} ({run['name']})" for name, run in zip(names, found, strict=True)]
    elif len({run["tables"]["setting"]["model"] for run in found}) == 1:
        settings = [run["tables"]["setting"] for run in found]
        names = [name if of["policy"] else f"{name} as it comes" for name, of in zip(names, settings, strict=True)]
    return [Run(letter, name, run["tables"]) for letter, name, run in zip("AB", names, found, strict=True)]


def tasks(tables: Tables) -> list[str]:
    """The tasks of a run, in its order; of two runs those that both have."""
    first, *rest = ([n.removeprefix(_HEADS) for n in run.tables if n.startswith(_HEADS)] for run in runs(tables))
    shared = [task for task in first if all(task in other for other in rest)]
    if not shared:
        given = " and ".join(", ".join(known) for known in (first, *rest))
        raise FileFormatError(f"results: no task is in both of them ({given}); allowed: two runs that share a task")
    return shared


def chosen(tables: Tables, task: str) -> str:
    """The head to look at first: the one of the first run that disperses most, if possible one that all runs have."""
    found = runs(tables)
    heads = found[0].heads(task)

    def rank(name: str) -> tuple[bool, bool, float]:
        slope = heads[name]["slope"]
        shared = all(name in run.heads(task) for run in found)
        # A uniform head has nothing to lose; one that disperses has.
        return shared, heads[name]["kind"] == LOSES_FOCUS[0], -math.inf if slope is None else slope

    return max(heads, key=rank)


def forecast_error(run: Run, task: str) -> tuple[str, Mapping[str, Any]] | None:
    """The largest size at which the forecast was tested, and its errors there."""
    tested = run.forecast(task).get("tested") or {}
    known = sizes(tested)
    return (known[-1], tested[known[-1]]) if known else None


def _name(setting: Mapping[str, Any]) -> str:
    policy = setting.get("policy")
    return f"{setting['model']} with {policy}" if policy else str(setting["model"])
