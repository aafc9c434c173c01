"""Intervals and paired tests for accuracies, losses and means over seeds. Intervals hold 95%."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sharpmax.lazy import require

CONFIDENCE = 0.95
"""Confidence level of every interval."""

LEVEL = 0.05
"""Differences with a smaller p-value are significant."""


@dataclass(frozen=True)
class Accuracy:
    """Percentage of n answers that are right, with Wilson's interval."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class PairedTest:
    """Prompts that a variant gained and lost, and the p-value of McNemar's exact test."""

    gained: int
    lost: int
    p: float


@dataclass(frozen=True)
class Perplexity:
    """Perplexity over the n tokens of some texts, and its rise over the base in percent with an interval over texts."""

    mean: float
    n: int
    rise: float
    low: float | None
    high: float | None
    texts: int


@dataclass(frozen=True)
class SeedMean:
    """Mean over n seeds, its standard error and Student's interval, which need two seeds or more; None without them."""

    mean: float | None
    sem: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class SeedComparison:
    """Gain over the base, and p-value of a two-sided paired t-test."""

    gain: float
    p: float | None


@dataclass(frozen=True)
class Auroc:
    """Area under the ROC curve with its bootstrap interval, and the numbers of incorrect and correct answers."""

    auroc: float | None
    low: float | None
    high: float | None
    wrong: int
    right: int


def accuracy(right: Sequence[float]) -> Accuracy:
    """Accuracy of right (1) and wrong (0) answers. Scores in between get Student's interval of their mean.

    >>> accuracy([1, 1, 0, 0]).mean
    50.0
    """
    if not set(right) <= {0, 1}:
        found = seed_mean(np.array([100.0 * score for score in right]))
        low, high = (0.0, 100.0) if found.low is None or found.high is None else (found.low, found.high)
        return Accuracy(float(np.mean(right)) * 100.0, max(low, 0.0), min(high, 100.0), len(right))
    wilson = _scipy().binomtest(int(sum(right)), len(right)).proportion_ci(CONFIDENCE, method="wilson")
    return Accuracy(100.0 * sum(right) / len(right), 100.0 * float(wilson.low), 100.0 * float(wilson.high), len(right))


def paired(base: Sequence[float], variant: Sequence[float]) -> PairedTest:
    """McNemar's exact test on the same prompts; for scores, the sign test.

    >>> paired([0, 0, 1], [1, 1, 1])
    PairedTest(gained=2, lost=0, p=0.5)
    """
    gained = sum(b < a for b, a in zip(base, variant, strict=True))
    lost = sum(b > a for b, a in zip(base, variant, strict=True))
    p = float(_scipy().binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return PairedTest(gained, lost, p)


def perplexity(losses: Sequence[tuple[float, int]], base: Sequence[tuple[float, int]]) -> Perplexity:
    """Perplexity over all tokens, compared with a base on the same texts: (summed loss in nats, tokens) of each text.

    The rise in nats per token is a ratio of sums; its interval is that of a ratio estimator. For texts of equal length
    it is the paired t interval of their mean differences. One text has no interval.
    """
    (here, before), tokens = (np.array([loss for loss, _ in each]) for each in (losses, base)), [n for _, n in base]
    total, texts = sum(tokens), len(tokens)
    ratio, low, high = float((here - before).sum()) / total, None, None
    if texts > 1:
        apart = here - before - ratio * np.array(tokens)
        reach = _student(texts) * math.sqrt(texts / (texts - 1) * float((apart**2).sum())) / total
        low, high = (100.0 * math.expm1(ratio + side * reach) for side in (-1, 1))
    mean = math.exp(math.fsum(loss for loss, _ in losses) / total)
    return Perplexity(mean, total, 100.0 * math.expm1(ratio), low, high, texts)


def _student(count: int) -> float:
    """Half the width of Student's interval of a mean of `count` numbers, in standard errors."""
    return float(_scipy().t.ppf(0.5 + 0.5 * CONFIDENCE, count - 1))


def _scipy() -> Any:
    return require("scipy.stats", "fit", "comparing variants")


def seed_mean(per_seed: np.ndarray) -> SeedMean:
    """Mean over seeds with Student's interval, ignoring seeds without a finite number.

    >>> seed_mean(np.array([1.0, 3.0])).mean
    2.0
    """
    known = per_seed[np.isfinite(per_seed)]
    count = len(known)
    if count < 2:
        return SeedMean(float(known[0]) if count else None, None, None, None, count)
    mean, sem = float(known.mean()), float(known.std(ddof=1) / math.sqrt(count))
    return SeedMean(mean, sem, mean - _student(count) * sem, mean + _student(count) * sem, count)


def compare(variant: np.ndarray, base: np.ndarray) -> SeedComparison:
    """Compare a variant with the base, seed by seed."""
    return SeedComparison(float((variant - base).mean()), paired_p(variant, base))


def paired_p(variant: np.ndarray, base: np.ndarray) -> float | None:
    """The p-value of a two-sided paired t-test; None for a single seed or equal differences in all seeds."""
    # Equal differences of percentages still differ by rounding, which the test would take for certainty.
    if len(variant) < 2 or np.ptp(variant - base) <= 1e-9:
        return None
    return float(_scipy().ttest_rel(variant, base).pvalue)


_RESAMPLES, _BLOCKS = 2000, 20


def auroc(suspicion: np.ndarray, correct: np.ndarray, seed: int) -> Auroc:
    """How often a wrong answer is more suspicious than a right one (ties count half), with a bootstrap interval.

    Both arrays are [heads, samples]. Answers of one head are not independent, so the bootstrap resamples heads. For a
    single head it resamples blocks of answers, and the interval holds for that head only.
    """
    groups = list(zip(suspicion, correct, strict=True))
    if len(groups) == 1:
        blocks = np.array_split(np.random.default_rng(seed).permutation(correct.shape[1]), min(_BLOCKS, correct.size))
        groups = [(suspicion[0, block], correct[0, block]) for block in blocks]
    # For each pair of groups: pairs of a wrong and a right answer, and how many the wrong one wins. The AUROC of any
    # resampling of groups is a ratio of sums over these two tables.
    right = [np.sort(values[known]) for values, known in groups]
    wrong = [values[~known] for values, known in groups]
    wins = np.array([[0.5 * sum(np.searchsorted(b, a, side).sum() for side in _SIDES) for b in right] for a in wrong])
    pairs = np.array([[float(len(a) * len(b)) for b in right] for a in wrong])
    counts = int((~correct).sum()), int(correct.sum())
    if pairs.sum() == 0:
        return Auroc(None, None, None, *counts)
    drawn = np.random.default_rng(seed).multinomial(
        len(groups), np.full(len(groups), 1.0 / len(groups)), size=_RESAMPLES
    )
    total = np.einsum("ra,ab,rb->r", drawn, pairs, drawn)
    values = np.einsum("ra,ab,rb->r", drawn, wins, drawn)[total > 0] / total[total > 0]
    low, high = (float(q) for q in np.quantile(values, (0.025, 0.975)))
    return Auroc(float(wins.sum() / pairs.sum()), low, high, *counts)


_SIDES: tuple[Literal["left", "right"], ...] = ("left", "right")
