"""Who stands where: ranks over methods that were tested on the same seeds and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sharpmax.experiments.reproduce.statistics import paired_p
from sharpmax.lazy import require

__all__ = ["LEVEL", "ranks", "with_interval"]

LEVEL = 0.05
"""A difference is one if chance alone gives as large a one less often."""


def with_interval(per_seed: np.ndarray) -> dict[str, Any]:
    """Mean over seeds with Student's 95% interval, None for one seed; seeds without a number do not count.

    >>> with_interval(np.array([1.0, 3.0]))["mean"]
    2.0
    """
    known = per_seed[np.isfinite(per_seed)]
    count = len(known)
    if not count:
        return {"mean": None, "sem": None, "low": None, "high": None, "n": 0}
    mean = float(known.mean())
    if count == 1:
        return {"mean": mean, "sem": None, "low": None, "high": None, "n": 1}
    stats = require("scipy.stats", "reproduce", "sharpmax compare")
    sem = float(known.std(ddof=1) / np.sqrt(count))
    reach = float(stats.t.ppf(1.0 - LEVEL / 2.0, count - 1)) * sem
    return {"mean": mean, "sem": sem, "low": mean - reach, "high": mean + reach, "n": count}


def ranks(scores: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Rank of every method by its mean score, [seeds] each; best first.

    A method shares the rank of the one that leads its group if their paired difference is not significant; the first
    that is significantly behind leads the next group, and its rank counts all those before it. A single seed knows no
    significance: then only equal scores share a rank.
    """
    order = sorted(scores, key=lambda name: -float(scores[name].mean()))
    found: dict[str, dict[str, Any]] = {}
    leader = order[0]
    for place, name in enumerate(order, start=1):
        p = paired_p(scores[leader], scores[name])
        if place > 1 and _apart(scores[leader], scores[name], p):
            leader, p = name, None
        rank = place if name == leader else found[leader]["rank"]
        found[name] = {"rank": rank, "leader": leader, "p": p}
    return found


def _apart(best: np.ndarray, other: np.ndarray, p: float | None) -> bool:
    if p is not None:
        return p < LEVEL
    # The same difference in every seed: nothing varies, so any difference is one.
    return bool(abs(float((best - other).mean())) > 1e-9)
