"""Failure detection against counting every pair, drawing every resample, and another minimiser."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from sharpmax.experiments.reproduce.evaluation import Detector
from sharpmax.experiments.statistics import auroc


def by_pairs(suspicion: np.ndarray, correct: np.ndarray) -> float | None:
    """Every wrong answer against every right one, one pair at a time."""
    pairs = [(w, r) for w in suspicion[~correct] for r in suspicion[correct]]
    return sum(1.0 if w > r else 0.5 if w == r else 0.0 for w, r in pairs) / len(pairs) if pairs else None


def answers(heads: int, samples: int, seed: int = 0, *, levels: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Suspicions of a few levels (so that many tie), higher where wrong, by different amounts in each head."""
    rng = np.random.default_rng(seed)
    correct = rng.random((heads, samples)) < 0.7
    shift = np.linspace(0.2, 2.0, heads)[:, None] * ~correct
    return np.round((rng.standard_normal((heads, samples)) + shift) * levels / 6) / levels, correct


class TestAuroc:
    @pytest.mark.parametrize("levels", [1, 6, 10_000])
    @pytest.mark.parametrize("heads", [1, 2, 5])
    def test_is_the_share_of_pairs_won_with_ties_as_halves(self, heads: int, levels: int) -> None:
        suspicion, correct = answers(heads, 30, levels=levels)
        found = auroc(suspicion, correct, seed=0)
        # Pairs reach across heads: one threshold has to serve them all.
        want = by_pairs(suspicion.ravel(), correct.ravel())
        assert found["auroc"] == pytest.approx(want)
        assert (found["wrong"], found["right"]) == ((~correct).sum(), correct.sum())
        assert type(found["auroc"]) is float
        assert type(found["wrong"]) is type(found["right"]) is int

    def test_perfect_useless_and_upside_down(self) -> None:
        correct = np.array([[True, True, False], [True, False, False]])
        assert auroc(np.where(correct, 0.0, 1.0), correct, 0)["auroc"] == 1.0
        assert auroc(np.zeros((2, 3)), correct, 0)["auroc"] == 0.5
        assert auroc(np.where(correct, 1.0, 0.0), correct, 0)["auroc"] == 0.0

    def test_the_order_alone_matters(self) -> None:
        suspicion, correct = answers(4, 40)
        assert auroc(np.exp(3 * suspicion), correct, 0) == auroc(suspicion, correct, 0)

    @pytest.mark.parametrize("right", [True, False])
    def test_without_wrong_or_without_right_answers_there_is_none(self, right: bool) -> None:
        found = auroc(np.ones((3, 4)), np.full((3, 4), right), 0)
        counts = {"wrong": 0, "right": 12} if right else {"wrong": 12, "right": 0}
        assert found == {"auroc": None, "low": None, "high": None, **counts}


def resampled(suspicion: np.ndarray, correct: np.ndarray, chosen: tuple[int, ...]) -> float | None:
    picked = list(chosen)
    return by_pairs(suspicion[picked].ravel(), correct[picked].ravel())


class TestInterval:
    def test_of_three_heads_spans_every_resample(self) -> None:
        """Each of the 27 equally likely resamples is likelier than 2.5%, so the interval ends at the extremes."""
        suspicion, correct = answers(3, 12)
        every = [resampled(suspicion, correct, chosen) for chosen in itertools.product(range(3), repeat=3)]
        values = [value for value in every if value is not None]
        found = auroc(suspicion, correct, seed=0)
        assert found["low"] == pytest.approx(min(values))
        assert found["high"] == pytest.approx(max(values))
        assert min(values) < found["auroc"] < max(values)

    def test_is_that_of_heads_drawn_with_replacement(self) -> None:
        suspicion, correct = answers(6, 20)
        rng = np.random.default_rng(7)
        values = [resampled(suspicion, correct, tuple(rng.integers(6, size=6))) for _ in range(600)]
        low, high = np.quantile(np.array(values, dtype=float), (0.025, 0.975))
        found = auroc(suspicion, correct, seed=0)
        width = high - low
        assert width > 0.05
        assert found["low"] == pytest.approx(low, abs=0.15 * width)
        assert found["high"] == pytest.approx(high, abs=0.15 * width)

    def test_resamples_without_a_pair_do_not_count(self) -> None:
        # Only the first head is ever wrong: without it there is nothing to tell apart.
        suspicion = np.array([[0.9, 0.1, 0.2], [0.5, 0.6, 0.3], [0.95, 0.2, 0.1]])
        correct = np.array([[False, True, True], [True, True, True], [True, True, True]])
        found = auroc(suspicion, correct, seed=0)
        values = [
            value
            for chosen in itertools.product(range(3), repeat=3)
            if (value := resampled(suspicion, correct, chosen)) is not None
        ]
        assert len(values) == 19
        assert (found["low"], found["high"]) == (pytest.approx(min(values)), pytest.approx(max(values)))

    @pytest.mark.parametrize("samples", [10, 400])
    def test_of_one_head_is_that_of_its_answers_drawn_with_replacement(self, samples: int) -> None:
        suspicion, correct = answers(1, samples)
        rng = np.random.default_rng(7)
        drawn = [rng.integers(samples, size=samples) for _ in range(2000)]
        values = [
            # Every pair at once, as there are too many to count one by one.
            np.mean(np.sign(wrong[:, None] - right[None]) + 1) / 2
            for at in drawn
            if len(wrong := suspicion[0, at][~correct[0, at]]) and len(right := suspicion[0, at][correct[0, at]])
        ]
        low, high = np.quantile(values, (0.025, 0.975))
        found = auroc(suspicion, correct, seed=0)
        assert found["low"] < found["auroc"] < found["high"]
        assert found["auroc"] == pytest.approx(by_pairs(suspicion[0], correct[0]))
        # Of few answers each is a block of its own; of many, twenty blocks know the spread to a sixth of itself.
        assert found["low"] == pytest.approx(low, abs=(0.05 if samples == 10 else 0.2) * (high - low))
        assert found["high"] == pytest.approx(high, abs=(0.05 if samples == 10 else 0.2) * (high - low))

    def test_the_seed_decides_it_and_nothing_else(self) -> None:
        suspicion, correct = answers(8, 40)
        first = auroc(suspicion, correct, seed=1)
        assert auroc(suspicion, correct, seed=1) == first
        other = auroc(suspicion, correct, seed=2)
        assert other["auroc"] == first["auroc"]
        assert other != first


def observed(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence and entropy that both tell something about being right, in the dtypes they are measured in."""
    rng = np.random.default_rng(seed)
    odds, entropy = 3 * rng.standard_normal(count), 3 * rng.random(count)
    correct = rng.random(count) < 1 / (1 + np.exp(-(1 + odds - entropy)))
    return (1 / (1 + np.exp(-odds))).astype(np.float32), entropy.astype(np.float32), correct


def penalised_newton(confidence: np.ndarray, entropy: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Logistic regression with ½|w|² by Newton's method."""
    p = confidence.astype(np.float64)
    x = np.stack((np.ones_like(p), np.log(p / (1 - p)), entropy.astype(np.float64)), axis=1)
    w = np.zeros(3)
    for _ in range(50):
        risk = 1 / (1 + np.exp(-(x @ w)))
        slope = x.T @ (risk - ~correct) + w
        w = w - np.linalg.solve((x * (risk * (1 - risk))[:, None]).T @ x + np.eye(3), slope)
    assert np.abs(slope).max() < 1e-8
    return w


class TestDetector:
    @pytest.mark.parametrize("count", [60, 2000])
    def test_is_the_penalised_maximum_of_likelihood(self, count: int) -> None:
        data = observed(count)
        detector = Detector.fit(*data)
        assert detector is not None
        assert detector.weights == pytest.approx(penalised_newton(*data), abs=1e-4)
        # Confident answers are less suspicious, dispersed ones more.
        assert detector.weights[1] < 0 < detector.weights[2]

    def test_suspicion_is_the_log_odds_in_any_shape(self) -> None:
        detector = Detector((0.5, -1.0, 2.0))
        confidence, entropy = np.array([[0.5, 0.9]]), np.array([[1.0, 0.25]])
        assert detector.suspicion(confidence, entropy) == pytest.approx(np.array([[2.5, 1.0 - np.log(9)]]))

    def test_both_signals_together_beat_each(self) -> None:
        detector = Detector.fit(*observed(2000))
        assert detector is not None
        confidence, entropy, correct = (column.reshape(2, -1) for column in observed(2000, seed=1))
        both = auroc(detector.suspicion(confidence, entropy), correct, 0)["auroc"]
        assert both > auroc(-confidence, correct, 0)["auroc"] + 0.01
        assert both > auroc(entropy, correct, 0)["auroc"] + 0.01

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_a_confidence_rounded_to_the_end_stays_finite(self, value: float) -> None:
        got = Detector((0.0, -1.0, 0.0)).suspicion(np.full(1, value, dtype=np.float32), np.zeros(1))
        assert np.isfinite(got).all()
        inside = np.float32(1 - 2**-23) if value else np.float32(1e-6)
        beside = Detector((0.0, -1.0, 0.0)).suspicion(np.full(1, inside), np.zeros(1))
        assert (got < beside) if value else (got > beside)

    def test_answers_that_separate_perfectly_keep_finite_weights(self) -> None:
        correct = np.arange(100) % 2 == 0
        confidence = np.where(correct, 1.0, 0.3).astype(np.float32)
        detector = Detector.fit(confidence, np.where(correct, 0.0, 3.0), correct)
        assert detector is not None
        assert np.isfinite(detector.weights).all()
        suspicion = detector.suspicion(confidence, np.where(correct, 0.0, 3.0))
        assert suspicion[~correct].min() > suspicion[correct].max()

    @pytest.mark.parametrize(("wrong", "right"), [(0, 100), (9, 100), (100, 0), (100, 9)])
    def test_too_few_of_either_kind_teach_nothing(self, wrong: int, right: int) -> None:
        count = wrong + right
        correct = np.arange(count) >= wrong
        assert Detector.fit(np.full(count, 0.5), np.zeros(count), correct) is None

    def test_ten_of_each_are_enough(self) -> None:
        confidence, entropy, _ = observed(20)
        assert Detector.fit(confidence, entropy, np.arange(20) < 10) is not None
