"""Means and paired comparisons against scipy, and where no test is possible."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from sharpmax.experiments.statistics import compare, mean

RNG = np.random.default_rng(0)
BASE = 50 + 5 * RNG.standard_normal(10)
ARM = BASE + 1 + RNG.standard_normal(10)
CEILING = BASE + 10


def test_mean_and_standard_error() -> None:
    found = mean(BASE)
    assert found == {"mean": pytest.approx(BASE.mean()), "sem": pytest.approx(stats.sem(BASE)), "n": 10}
    assert all(type(found[key]) is kind for key, kind in (("mean", float), ("sem", float), ("n", int)))


def test_one_seed_has_no_standard_error() -> None:
    assert mean(np.array([3.0])) == {"mean": 3.0, "sem": None, "n": 1}


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_comparison_is_the_two_sided_paired_test(seeds: int) -> None:
    arm, base, ceiling = ARM[:seeds], BASE[:seeds], CEILING[:seeds]
    difference = arm - base
    found = compare(arm, base, ceiling)
    # By its definition: the mean difference in standard errors, on both sides of Student's t.
    t = difference.mean() / (difference.std(ddof=1) / np.sqrt(seeds))
    assert found["p"] == pytest.approx(2 * stats.t.sf(abs(t), seeds - 1))
    assert found["gain"] == pytest.approx(difference.mean())
    assert found["of_ceiling"] == pytest.approx(100 * arm.mean() / ceiling.mean())
    assert all(type(value) is float for value in found.values())


def test_a_loss_is_as_significant_as_a_gain() -> None:
    gain, loss = compare(ARM, BASE, CEILING), compare(BASE, ARM, CEILING)
    assert loss["gain"] == -gain["gain"]
    assert loss["p"] == pytest.approx(gain["p"])


@pytest.mark.parametrize(
    ("arm", "base", "gain"),
    [
        (BASE, BASE, 0.0),  # the arm never acts
        (np.array([50.0]), np.array([40.0]), 10.0),  # one seed
        (np.array([50.0, 60.0]), np.array([40.0, 50.0]), 10.0),  # the same difference in every seed
        # One set in a hundred more in every seed: 57.99999999999999 − 56.99999999999999 and the like are not quite
        # equal, and their tiny spread is no evidence.
        (100.0 * (np.array([58, 59, 30]) / 100), 100.0 * (np.array([57, 58, 29]) / 100), 1.0),
    ],
)
def test_no_test_is_possible_without_a_spread_of_differences(arm: np.ndarray, base: np.ndarray, gain: float) -> None:
    found = compare(arm, base, np.full(len(arm), 80.0))
    assert found["p"] is None
    assert found["gain"] == pytest.approx(gain)


def test_a_ceiling_of_nothing_has_no_share() -> None:
    assert compare(np.zeros(3), np.zeros(3), np.zeros(3)) == {"gain": 0.0, "p": None, "of_ceiling": None}
