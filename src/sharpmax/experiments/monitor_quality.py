"""How well wrong answers are told from right ones: by the monitor, by the model's own signals, and by both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sharpmax.experiments.evaluate.statistics import accuracy
from sharpmax.experiments.monitor_signals import OWN, Answered
from sharpmax.experiments.reproduce.detection import auroc
from sharpmax.probe.watch.judging import Learned

__all__ = ["ALL", "MONITOR", "POOLED", "SIGNALS", "Cells", "alarms_of", "auroc_of", "aurocs", "by_size"]

ALL, POOLED = "all", "pooled"
"""All tasks, all sizes."""

MONITOR, _LENGTH, _BOTH = "monitor", "length", "both"

SIGNALS: Mapping[str, str] = MappingProxyType(
    {
        MONITOR: "attention entropies against the reference",
        **OWN,
        _LENGTH: "tokens read",
        _BOTH: "monitor and entropy, each in standard deviations of the reference, added",
    }
)

Cells = Mapping[tuple[str, int], Answered]
"""What a model answered, by task and size."""


def _scores(known: Learned, one: Answered) -> np.ndarray:
    return np.asarray(known.prompt.baseline.score(one.entropy))


def alarms_of(known: Learned, one: Answered) -> np.ndarray:
    """For which prompts there is an alarm."""
    return np.asarray(_scores(known, one) > known.prompt.threshold)


def by_size(cells: Cells, task: str, what: Callable[[Answered], np.ndarray]) -> dict[str, Any]:
    """How often something is so, at each size of a task, in percent."""
    return {str(size): accuracy([int(x) for x in what(one)]) for (name, size), one in cells.items() if name == task}


def _of(cells: Cells, task: str) -> Answered:
    return Answered.together([one for (name, _), one in cells.items() if task in (name, ALL)])


def auroc_of(cells: Cells, task: str, known: Learned, seed: int) -> dict[str, Any]:
    """AUROC of the monitor over all sizes of a task."""
    whole = _of(cells, task)
    return auroc(_scores(known, whole)[None], whole.right[None], seed)


def aurocs(cells: Cells, task: str, known: Learned, typical: Answered, seed: int) -> dict[str, Any]:
    """AUROC of every signal at each size of a task and over all of them; `typical` is the reference."""

    def signals(one: Answered) -> dict[str, np.ndarray]:
        score, usual = _scores(known, one), typical.own["entropy"]
        both = score + (one.own["entropy"] - usual.mean()) / max(usual.std(), 1e-9)
        return {MONITOR: score, **one.own, _LENGTH: one.count.numpy().astype(float), _BOTH: both}

    lots = {str(size): one for (name, size), one in cells.items() if name == task} | {POOLED: _of(cells, task)}
    table: dict[str, Any] = {signal: {} for signal in SIGNALS}
    for lot, one in lots.items():
        for signal, suspicion in signals(one).items():
            table[signal][lot] = auroc(suspicion[None], one.right[None], seed)
    return table
