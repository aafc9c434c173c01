"""Means over seeds, and paired comparisons between arms that share seeds and items."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sharpmax.lazy import require

__all__ = ["compare", "mean", "paired_p"]


def mean(per_seed: np.ndarray) -> dict[str, Any]:
    """Mean, standard error (None for a single seed) and number of seeds."""
    n = len(per_seed)
    sem = float(np.std(per_seed, ddof=1) / math.sqrt(n)) if n > 1 else None
    return {"mean": float(np.mean(per_seed)), "sem": sem, "n": n}


def compare(arm: np.ndarray, base: np.ndarray, ceiling: np.ndarray) -> dict[str, Any]:
    """Gain of an arm over the base, the p-value of a two-sided paired t-test, and its share of the ceiling in percent.

    The p-value is None where no test is possible: a single seed, or the same difference in every seed.
    """
    share = 100.0 * float(arm.mean() / ceiling.mean()) if ceiling.mean() > 0 else None
    return {"gain": float((arm - base).mean()), "p": paired_p(arm, base), "of_ceiling": share}


def paired_p(arm: np.ndarray, base: np.ndarray) -> float | None:
    """The p-value of a two-sided paired t-test; None for a single seed, or the same difference in every seed."""
    # Equal differences of percentages differ by their rounding, and a test would call that certainty.
    if len(arm) < 2 or np.ptp(arm - base) <= 1e-9:
        return None
    stats = require("scipy.stats", "reproduce", "comparing arms")
    return float(stats.ttest_rel(arm, base).pvalue)
