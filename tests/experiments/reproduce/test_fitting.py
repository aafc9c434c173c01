"""What is learned before the evaluation: from which sets, by which procedure, and what if there is too little of it."""

from __future__ import annotations

import itertools
import json
from functools import cache

import numpy as np
import pytest
import torch

from sharpmax.experiments.reproduce.evaluation import Detector, Fitted, fit, fit_samples, measure, read
from sharpmax.policies.base import Policy, policy_from_dict
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER, Polynomial
from tests.experiments.reproduce.test_best_beta import log_weight
from tests.experiments.reproduce.trained_heads import heads_of

SEED, SAMPLES = 3, 256
SIZES = (128, 512, 2048)
TRAIN_SIZES = (5, 16)
VARIANTS = ["softmax", "paper", "refit", "log-length", "entropy-target"]


def ignore(items: int) -> None:
    pass


@cache
def fitted() -> Fitted:
    return fit(heads_of("paper"), SIZES, SAMPLES, SEED, TRAIN_SIZES, ignore)


@cache
def surveyed() -> dict[str, np.ndarray]:
    """The inputs spent on fitting, surveyed here once more: entropy, best β by a search, confidence and correctness."""
    columns: dict[str, list[float]] = {"entropy": [], "beta": [], "confidence": [], "correct": []}
    grid = np.logspace(-3, 3, 601)
    for position, size in itertools.product(range(2), SIZES):
        for seen in read(heads_of("paper")[position], size, fit_samples(SAMPLES), (SEED, 1, position)):
            p = seen.logits.double().softmax(-1)
            columns["entropy"] += (-torch.special.xlogy(p, p).sum(-1)).tolist()
            pooled = torch.matmul(p.float()[:, None], seen.features)[:, 0]
            scores = seen.scores(pooled)
            columns["confidence"] += scores.softmax(-1).amax(-1).tolist()
            columns["correct"] += (scores.argmax(-1) == seen.answer).tolist()
            for logits, best in zip(seen.logits.double().numpy(), seen.best.tolist(), strict=True):
                if logits.argmax() == best:
                    columns["beta"].append(np.nan)
                    continue
                at = int(log_weight(logits, best, grid).argmax()) if logits[best] > logits.mean() else 0
                columns["beta"].append(float(grid[at]) if at else 0.0)
    return {name: np.array(values) for name, values in columns.items()}


def test_variants_are_the_same_for_every_head_but_for_its_entropy_on_training_sizes() -> None:
    plain: list[dict[str, Policy | None]] = [{"softmax": None}] * 2
    # Other sets of the same kind, so that the means agree to their standard errors and not to the last digit.
    inside = measure(heads_of("paper"), plain, TRAIN_SIZES, 2048, (SEED, 77))
    for variants, entropy in zip(fitted().variants, inside.entropy["softmax"], strict=True):
        assert list(variants) == VARIANTS
        assert (variants["softmax"], variants["paper"], variants["log-length"]) == (None, PAPER, LogLength(16))
        assert variants["refit"] == fitted().variants[0]["refit"]
        target = variants["entropy-target"]
        assert isinstance(target, EntropyTarget)
        error = float(entropy.std()) * (2 / 2048) ** 0.5
        assert 5 * error < 0.5 * entropy.mean()
        assert target.target == pytest.approx(entropy.mean(), abs=5 * error)
    assert fitted().variants[0]["entropy-target"] != fitted().variants[1]["entropy-target"]


class TestPolynomial:
    def test_counts_its_inputs(self) -> None:
        table = fitted().polynomial
        assert table is not None
        beta = surveyed()["beta"]
        wrong = ~np.isnan(beta)
        assert table["sizes"] == list(SIZES)
        assert table["inputs"] == len(beta) == 2 * 64 * len(SIZES)
        assert table["wrong"] + table["dropped"] == wrong.sum()
        # A grid point beside the limit of 10 may fall on its other side.
        assert table["wrong"] == pytest.approx((wrong & (beta > 0) & (beta <= 10)).sum(), abs=2)
        assert 0 < table["dropped"] < table["wrong"]

    def test_is_the_least_squares_fit_of_degree_four(self) -> None:
        table = fitted().polynomial
        assert table is not None
        assert table["wrong"] <= 1000  # all points are shown
        entropy, beta = np.array(table["points"]["entropy"]), np.array(table["points"]["beta"])
        assert len(entropy) == len(beta) == table["wrong"]
        value = np.polyval(np.polyfit(entropy, beta, 4), entropy)
        assert np.polyval(table["coefficients"], entropy) == pytest.approx(value, abs=1e-3)
        assert table["r2"] == pytest.approx(np.corrcoef(value, beta)[0, 1] ** 2, abs=1e-3)
        assert table["fitted_on"] == pytest.approx([entropy.min(), entropy.max()], rel=1e-4)
        assert 0.0 < beta.min() < beta.max() <= 10.0

    def test_goes_through_the_best_temperatures_of_wrongly_ranked_inputs(self) -> None:
        table = fitted().polynomial
        assert table is not None
        survey = surveyed()
        used = (survey["beta"] > 0) & (survey["beta"] < 9.5)
        want = {round(h, 3): b for h, b in zip(survey["entropy"][used], survey["beta"][used], strict=True)}
        got = {round(h, 3): b for h, b in zip(table["points"]["entropy"], table["points"]["beta"], strict=True)}
        shared = want.keys() & got.keys()
        # Rounding may put a point under a neighbouring key.
        assert len(shared) > 0.9 * len(want)
        for key in shared:
            assert got[key] == pytest.approx(want[key], rel=0.03)  # the grid's step is 2.3%

    def test_policy_curve_and_ends_are_of_one_polynomial(self) -> None:
        table, refit = fitted().polynomial, fitted().variants[0]["refit"]
        assert table is not None
        assert isinstance(refit, Polynomial)
        json.dumps(table, allow_nan=False)
        assert policy_from_dict(table["policy"]) == refit
        assert (table["coefficients"], table["threshold"]) == (list(refit.coefficients), refit.threshold)
        curve = {name: np.array(values) for name, values in table["curve"].items()}
        assert {len(values) for values in curve.values()} == {200}
        assert curve["refit"] == pytest.approx(refit.value_at(curve["entropy"]), rel=1e-3)
        assert curve["paper"] == pytest.approx(PAPER.value_at(curve["entropy"]), rel=1e-3)
        assert curve["entropy"][0] == 0.0
        assert curve["entropy"][-1] >= max(6.5, table["fitted_on"][1] * 0.999)
        assert table["paper_acts_on"] == pytest.approx([0.85, 5.94], abs=0.01)
        assert table["acts_on"] is None or table["acts_on"][0] >= refit.threshold

    def test_is_left_out_where_too_few_inputs_are_ranked_wrongly(self) -> None:
        scarce = fit(heads_of("sharp"), (16,), 128, SEED, TRAIN_SIZES, ignore)
        assert scarce.polynomial is None
        assert scarce.detector is None
        assert scarce.left_out.keys() == {"refit", "both"}
        assert all("too few" in why for why in scarce.left_out.values())
        assert fitted().left_out == {}
        assert [list(variants) for variants in scarce.variants] == [[name for name in VARIANTS if name != "refit"]] * 2


def test_the_detector_learns_from_the_same_inputs() -> None:
    survey = surveyed()
    want = Detector.fit(survey["confidence"], survey["entropy"], survey["correct"].astype(bool))
    got = fitted().detector
    assert want is not None
    assert got is not None
    assert got.weights == pytest.approx(want.weights, rel=1e-2, abs=1e-2)


def test_no_evaluation_sees_the_sets_that_are_fitted_on() -> None:
    # What learns entropies, what learns the rest, what evaluates, and what draws the heat map.
    streams = [(SEED, 0, 0), (SEED, 1, 0), (SEED, 2, 0), (SEED, 3)]
    head = heads_of("paper")[0]
    seen = [{float(x) for part in read(head, 64, 8, stream) for x in part.priority[:, 0]} for stream in streams]
    assert all(not a & b for i, a in enumerate(seen) for b in seen[:i])


def observed(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence and entropy that both tell something about being right, in the dtypes they are measured in."""
    rng = np.random.default_rng(0)
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


class TestDetectorFit:
    @pytest.mark.parametrize("count", [60, 2000])
    def test_is_the_penalised_maximum_of_likelihood(self, count: int) -> None:
        data = observed(count)
        detector = Detector.fit(*data)
        assert detector is not None
        assert detector.weights == pytest.approx(penalised_newton(*data), abs=1e-4)
        # Confident answers are less suspicious, dispersed ones more.
        assert detector.weights[1] < 0 < detector.weights[2]

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_a_confidence_rounded_to_the_end_stays_finite(self, value: float) -> None:
        got = Detector((0.0, -1.0, 0.0)).suspicion(np.full(1, value, dtype=np.float32), np.zeros(1))
        assert np.isfinite(got).all()
        inside = np.float32(1 - 2**-23) if value else np.float32(1e-6)
        beside = Detector((0.0, -1.0, 0.0)).suspicion(np.full(1, inside), np.zeros(1))
        assert (got < beside) if value else (got > beside)

    @pytest.mark.parametrize(("wrong", "right"), [(9, 100), (100, 9), (10, 10)])
    def test_ten_of_each_are_enough(self, wrong: int, right: int) -> None:
        confidence, entropy, _ = observed(wrong + right)
        found = Detector.fit(confidence, entropy, np.arange(wrong + right) >= wrong)
        assert (found is not None) == (wrong == right)
