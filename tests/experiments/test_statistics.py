"""Intervals, tests and AUROC against formulas, scipy and actual resampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from sharpmax.experiments.statistics import (
    Auroc,
    SeedComparison,
    SeedMean,
    accuracy,
    auroc,
    compare,
    paired,
    perplexity,
    seed_mean,
)

RNG = np.random.default_rng(0)
BASE = 50 + 5 * RNG.standard_normal(10)
VARIANT = BASE + 1 + RNG.standard_normal(10)


def test_accuracy_has_wilsons_interval_and_that_of_scores_ends_at_100() -> None:
    z, p, n = 1.959963984540054, 0.93, 100
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found: Any = accuracy([1] * 93 + [0] * 7)
    assert (found.mean, found.n, found.low) == (93.0, n, pytest.approx(100 * (middle - reach), abs=1e-9))
    assert found.high == pytest.approx(100 * (middle + reach), abs=1e-9)
    scores = accuracy([0.5, 1.0, 0.75])
    assert (scores.mean, scores.high, scores.n) == (75.0, 100.0, 3)


@pytest.mark.parametrize(("gained", "lost", "p"), [(0, 0, 1.0), (1, 0, 1.0), (9, 2, 134 / 2**11), (5, 5, 1.0)])
def test_mcnemar_counts_only_prompts_that_changed(gained: int, lost: int, p: float) -> None:
    base = [0] * gained + [1] * lost + [0] * 7 + [1] * 30
    variant = [1] * gained + [0] * lost + [0] * 7 + [1] * 30
    found = paired(base, variant)
    assert (found.gained, found.lost) == (gained, lost)
    assert found.p == pytest.approx(p, rel=1e-12)


def test_rise_of_windows_of_one_length_is_the_paired_t_interval() -> None:
    base = RNG.normal(2.7, 0.3, 9)
    variant = base + RNG.normal(0.01, 0.02, 9)
    found: Any = perplexity([(100 * x, 100) for x in variant], [(100 * x, 100) for x in base])
    interval = stats.ttest_rel(variant, base).confidence_interval(0.95)
    assert found.rise == pytest.approx(100 * math.expm1((variant - base).mean()))
    assert found.low == pytest.approx(100 * math.expm1(interval.low))
    assert found.high == pytest.approx(100 * math.expm1(interval.high))


def test_perplexity_and_rise_weigh_tokens_not_texts() -> None:
    base, variant = [(10.0, 5), (30.0, 20), (2.0, 4)], [(11.0, 5), (29.5, 20), (2.5, 4)]
    found: Any = perplexity(variant, base)
    assert (found.mean, found.n, found.texts) == (pytest.approx(math.exp(43.0 / 29.0)), 29, 3)
    assert found.rise == pytest.approx(100 * (found.mean / math.exp(42.0 / 29.0) - 1))
    assert found.low < found.rise < found.high
    assert perplexity(variant[:1], base[:1]).low is None
    assert perplexity(base[:2], base[:2]).rise == 0.0


def test_means_over_seeds() -> None:
    found: Any = seed_mean(np.append(BASE, np.nan))
    low, high = stats.t.interval(0.95, 9, loc=BASE.mean(), scale=stats.sem(BASE))
    assert (found.mean, found.sem, found.n) == (pytest.approx(BASE.mean()), pytest.approx(stats.sem(BASE)), 10)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert seed_mean(np.array([7.0, np.nan])) == SeedMean(7.0, None, None, None, 1)
    assert seed_mean(np.array([np.nan])) == SeedMean(None, None, None, None, 0)


def test_a_comparison_is_the_paired_test_and_needs_a_spread_of_differences() -> None:
    found: Any = compare(VARIANT, BASE)
    assert (found.gain, found.p) == pytest.approx(((VARIANT - BASE).mean(), stats.ttest_rel(VARIANT, BASE).pvalue))
    assert compare(np.array([50.0]), np.array([40.0])) == SeedComparison(10.0, None)
    # 57.99999999999999 − 56.99999999999999 and the like are not quite equal, and their tiny spread is no evidence.
    equal: Any = compare(100.0 * (np.array([58, 59, 30]) / 100), 100.0 * (np.array([57, 58, 29]) / 100))
    assert (equal.p, equal.gain) == (None, pytest.approx(1.0))


def by_pairs(suspicion: np.ndarray, correct: np.ndarray) -> float | None:
    """AUROC by comparing every wrong answer with every right one."""
    wrong, right = suspicion[~correct], suspicion[correct]
    return float(np.mean(np.sign(wrong[:, None] - right[None]) + 1) / 2) if len(wrong) and len(right) else None


def answers(heads: int, samples: int, *, levels: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Suspicions at a few levels, so that many tie; higher for wrong answers, by a different amount in each head."""
    rng = np.random.default_rng(0)
    correct = rng.random((heads, samples)) < 0.7
    shift = np.linspace(0.2, 2.0, heads)[:, None] * ~correct
    return np.round((rng.standard_normal((heads, samples)) + shift) * levels / 6) / levels, correct


@pytest.mark.parametrize(("heads", "levels"), [(1, 1), (2, 6), (5, 10_000)])
def test_auroc_is_the_share_of_pairs_won_with_ties_as_halves(heads: int, levels: int) -> None:
    suspicion, correct = answers(heads, 30, levels=levels)
    found: Any = auroc(suspicion, correct, seed=0)
    # Pairs are formed across heads, since all heads share one threshold.
    assert found.auroc == pytest.approx(by_pairs(suspicion.ravel(), correct.ravel()))
    assert (found.wrong, found.right) == ((~correct).sum(), correct.sum())
    assert auroc(np.exp(3 * suspicion), correct, 0) == found, "only the order matters"
    assert auroc(suspicion, correct, seed=1).auroc == found.auroc


def test_auroc_needs_wrong_and_right_answers() -> None:
    assert auroc(np.ones((3, 4)), np.ones((3, 4), bool), 0) == Auroc(None, None, None, 0, 12)
    assert auroc(np.ones((3, 4)), np.zeros((3, 4), bool), 0) == Auroc(None, None, None, 12, 0)


@pytest.mark.parametrize(("heads", "samples", "within"), [(6, 20, 0.15), (1, 10, 0.05), (1, 400, 0.2)])
def test_the_interval_is_that_of_resampled_heads_or_answers(heads: int, samples: int, within: float) -> None:
    # A single head is resampled in blocks of answers. With few answers each is a block; with many there are twenty
    # blocks, which estimate the spread to about a sixth.
    suspicion, correct = answers(heads, samples)
    found: Any = auroc(suspicion, correct, seed=0)
    if heads == 1:
        suspicion, correct = suspicion.T, correct.T
    rng, count = np.random.default_rng(7), len(correct)
    drawn = [rng.integers(count, size=count) for _ in range(1500)]
    values = [by_pairs(suspicion[at].ravel(), correct[at].ravel()) for at in drawn]
    low, high = np.quantile([value for value in values if value is not None], (0.025, 0.975))
    assert (found.low, found.high) == pytest.approx((low, high), abs=within * (high - low))
