"""Intervals and tests against formulas written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sharpmax.experiments.statistics import accuracy, paired, perplexity, rise


@pytest.mark.parametrize(("right", "n"), [(0, 50), (1, 50), (32, 50), (50, 50), (93, 100)])
def test_wilsons_interval(right: int, n: int) -> None:
    z, p = 1.959963984540054, right / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = accuracy([1] * right + [0] * (n - right))
    assert found["mean"] == pytest.approx(100 * p)
    assert found["n"] == n
    assert found["low"] == pytest.approx(100 * (middle - reach), abs=1e-9)
    assert found["high"] == pytest.approx(100 * (middle + reach), abs=1e-9)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (9, 2), (2, 9), (5, 5), (40, 1)])
def test_mcnemar_counts_only_prompts_that_changed(gained: int, lost: int) -> None:
    base = [0] * gained + [1] * lost + [0] * 7 + [1] * 30
    arm = [1] * gained + [0] * lost + [0] * 7 + [1] * 30
    found = paired(base, arm)
    n, few = gained + lost, min(gained, lost)
    wanted = min(1.0, 2.0 * sum(math.comb(n, k) for k in range(few + 1)) / 2.0**n) if n else 1.0
    assert (found["gained"], found["lost"]) == (gained, lost)
    assert found["p"] == pytest.approx(wanted, rel=1e-12)


def test_perplexity_weighs_tokens_not_texts() -> None:
    found = perplexity([(10.0, 5), (30.0, 20)])
    assert found == {"mean": pytest.approx(math.exp(40.0 / 25.0)), "n": 25}


def test_rise_of_windows_of_one_length_is_the_paired_t_interval() -> None:
    from scipy import stats

    rng = np.random.default_rng(0)
    base = rng.normal(2.7, 0.3, 9)
    arm = base + rng.normal(0.01, 0.02, 9)
    found = rise([(100 * x, 100) for x in base], [(100 * x, 100) for x in arm])
    interval = stats.ttest_rel(arm, base).confidence_interval(0.95)
    assert found["rise"] == pytest.approx(100 * math.expm1((arm - base).mean()))
    assert found["low"] == pytest.approx(100 * math.expm1(interval.low))
    assert found["high"] == pytest.approx(100 * math.expm1(interval.high))


def test_rise_of_answers_of_different_lengths_is_that_of_all_tokens() -> None:
    base, arm = [(10.0, 5), (30.0, 20), (2.0, 4)], [(11.0, 5), (29.5, 20), (2.5, 4)]
    found = rise(base, arm)
    before, after = perplexity(base)["mean"], perplexity(arm)["mean"]
    assert found["rise"] == pytest.approx(100 * (after / before - 1))
    assert found["low"] < found["rise"] < found["high"]


def test_one_text_has_no_interval_and_the_same_arm_no_rise() -> None:
    assert rise([(10.0, 5)], [(11.0, 5)])["low"] is None
    assert rise([(10.0, 5), (9.0, 5)], [(10.0, 5), (9.0, 5)]) == {"rise": 0.0, "low": 0.0, "high": 0.0}
