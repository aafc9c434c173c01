"""Telling wrong answers from right ones: a score of suspicion, and how well it separates them (AUROC)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpmax.lazy import require

_LEAST_WRONG = 10
_RESAMPLES = 2000
_BLOCKS = 20


@dataclass(frozen=True)
class Detector:
    """Logistic regression for "the answer is wrong" on the classifier's confidence and the attention's entropy."""

    weights: tuple[float, float, float]

    @classmethod
    def fit(cls, confidence: np.ndarray, entropy: np.ndarray, correct: np.ndarray) -> Detector | None:
        """Most likely weights with a slight pull to 0; None if there are too few wrong answers to learn from."""
        wrong = ~correct
        if min(wrong.sum(), correct.sum()) < _LEAST_WRONG:
            return None
        x = _design(confidence, entropy)
        sign = np.where(wrong, 1.0, -1.0)

        def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
            margin = sign * (x @ w)
            slope = -sign / (1.0 + np.exp(np.clip(margin, -500.0, 500.0)))
            return float(np.logaddexp(0.0, -margin).sum() + 0.5 * w @ w), x.T @ slope + w

        optimize = require("scipy.optimize", "reproduce", "fitting the failure detector")
        best = optimize.minimize(loss, np.zeros(x.shape[1]), jac=True, method="BFGS")
        return cls(tuple(float(w) for w in best.x))  # type: ignore[arg-type]

    def suspicion(self, confidence: np.ndarray, entropy: np.ndarray) -> np.ndarray:
        """Log-odds that an answer is wrong."""
        return np.asarray(_design(confidence, entropy) @ np.asarray(self.weights))


def _design(confidence: np.ndarray, entropy: np.ndarray) -> np.ndarray:
    # Confidence in float32 rounds to 1 from 1 − 6e-8 on; as log-odds that is where it must stop.
    p = np.clip(np.asarray(confidence, dtype=np.float64), 1e-8, 1.0 - 2.0**-24)
    return np.stack((np.ones_like(p), np.log(p) - np.log1p(-p), np.asarray(entropy, dtype=np.float64)), axis=-1)


def auroc(suspicion: np.ndarray, correct: np.ndarray, seed: int) -> dict[str, Any]:
    """How often a wrong answer is more suspicious than a right one (ties count half), with a 95% bootstrap interval.

    Both arrays are [heads, samples]. Answers of one head are not independent of each other, so the bootstrap draws
    heads. Of a single head it draws blocks of answers: the interval then speaks of that head alone.
    """
    if len(correct) == 1:
        order = np.random.default_rng(seed).permutation(correct.shape[1])
        blocks = min(_BLOCKS, correct.shape[1])
        wins, pairs = _contests(*(np.array_split(array[0, order], blocks) for array in (suspicion, correct)))
    else:
        wins, pairs = _contests(list(suspicion), list(correct))
    wrong, right = int((~correct).sum()), int(correct.sum())
    counts = {"wrong": wrong, "right": right}
    if pairs.sum() == 0:
        return {"auroc": None, "low": None, "high": None, **counts}
    groups = len(pairs)
    drawn = np.random.default_rng(seed).multinomial(groups, np.full(groups, 1.0 / groups), size=_RESAMPLES)
    total = np.einsum("ra,ab,rb->r", drawn, pairs, drawn)
    values = np.einsum("ra,ab,rb->r", drawn, wins, drawn)[total > 0] / total[total > 0]
    low, high = (float(q) for q in np.quantile(values, (0.025, 0.975)))
    return {"auroc": float(wins.sum() / pairs.sum()), "low": low, "high": high, **counts}


def _contests(suspicion: Sequence[np.ndarray], correct: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """For the wrong answers of each group against the right ones of each: contests won, and contests held.

    From these two tables the AUROC of any resampling of groups is a ratio of sums.
    """
    groups = len(correct)
    wins, pairs = np.zeros((groups, groups)), np.zeros((groups, groups))
    right = [np.sort(suspicion[b][correct[b]]) for b in range(groups)]
    for a in range(groups):
        wrong = suspicion[a][~correct[a]]
        for b in range(groups):
            below = np.searchsorted(right[b], wrong, side="left")
            not_above = np.searchsorted(right[b], wrong, side="right")
            wins[a, b] = 0.5 * (below + not_above).sum()
            pairs[a, b] = len(wrong) * len(right[b])
    return wins, pairs
