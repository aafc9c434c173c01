"""What is learned before the evaluation: from which sets, by which procedure, and what if there is too little of it."""

from __future__ import annotations

import itertools
import json
from functools import cache

import numpy as np
import pytest
import torch

from sharpmax.experiments.reproduce import fitting
from sharpmax.experiments.reproduce.detection import Detector
from sharpmax.experiments.reproduce.evaluation import measure, read
from sharpmax.experiments.reproduce.fitting import Fitted, fit, fit_samples
from sharpmax.policies.base import Policy, policy_from_dict
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_length import LogLength
from sharpmax.policies.polynomial import PAPER, Polynomial
from tests.experiments.reproduce.test_best_beta import log_weight
from tests.experiments.reproduce.trained_heads import heads_of

SEED, SAMPLES = 3, 256
SIZES = (128, 512, 2048)
TRAIN_SIZES = (5, 16)
ARMS = ["softmax", "paper", "refit", "log-length", "entropy-target"]


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


def test_a_quarter_of_the_evaluation_is_spent_but_never_too_little() -> None:
    assert [fit_samples(samples) for samples in (1, 128, 129, 256, 1000)] == [32, 32, 32, 64, 250]


class TestArms:
    def test_are_the_same_for_every_head_in_their_order(self) -> None:
        assert [list(arms) for arms in fitted().arms] == [ARMS, ARMS]
        for arms in fitted().arms:
            assert arms["softmax"] is None
            assert arms["paper"] == PAPER
            assert arms["log-length"] == LogLength(reference=16)
        assert fitted().arms[0]["refit"] == fitted().arms[1]["refit"]

    def test_each_head_aims_at_its_own_entropy_on_training_sizes(self) -> None:
        plain: list[dict[str, Policy | None]] = [{"softmax": None}] * 2
        # Other sets of the same kind, so that the means agree to their standard errors and not to the last digit.
        inside = measure(heads_of("paper"), plain, TRAIN_SIZES, 2048, (SEED, 77))
        for arms, entropy in zip(fitted().arms, inside.entropy["softmax"], strict=True):
            target = arms["entropy-target"]
            assert isinstance(target, EntropyTarget)
            error = float(entropy.std()) * (2 / 2048) ** 0.5
            assert 5 * error < 0.5 * entropy.mean()
            assert target.target == pytest.approx(entropy.mean(), abs=5 * error)
        assert fitted().arms[0]["entropy-target"] != fitted().arms[1]["entropy-target"]


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

    def test_uses_what_is_above_0_and_up_to_10(self) -> None:
        beta = np.array([*np.linspace(1, 2, 60), 1e-3, 10.0, 0.0, 10.001, 50.0, np.nan, np.nan])
        table, _ = fitting._polynomial({"beta": beta, "entropy": np.linspace(1, 4, len(beta))}, (16,))
        assert table is not None
        assert (table["inputs"], table["wrong"], table["dropped"]) == (67, 62, 3)
        assert (min(table["points"]["beta"]), max(table["points"]["beta"])) == (1e-3, 10.0)

    @pytest.mark.parametrize(("points", "enough"), [(49, False), (50, True)])
    def test_needs_fifty_points(self, points: int, enough: bool) -> None:
        survey = {"beta": np.linspace(1, 2, points), "entropy": np.linspace(1, 4, points)}
        table, policy = fitting._polynomial(survey, (16,))
        assert (table is not None) == (policy is not None) == enough

    def test_shows_a_thousand_points_of_more(self) -> None:
        survey = {"beta": np.linspace(1, 2, 5000), "entropy": np.linspace(1, 4, 5000)}
        table, _ = fitting._polynomial(survey, (16,))
        assert table is not None
        assert table["wrong"] == 5000
        assert len(table["points"]["beta"]) == len(table["points"]["entropy"]) == 1000
        assert (table["points"]["beta"][0], table["points"]["beta"][-1]) == (1.0, 2.0)

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
        table, refit = fitted().polynomial, fitted().arms[0]["refit"]
        assert table is not None
        assert isinstance(refit, Polynomial)
        json.dumps(table, allow_nan=False)
        assert policy_from_dict(table["policy"]) == refit
        assert table["coefficients"] == list(refit.coefficients)
        assert len(table["coefficients"]) == 5
        assert table["threshold"] == refit.threshold
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
        assert "too few" in scarce.left_out["refit"]
        assert "too few" in scarce.left_out["both"]
        assert fitted().left_out == {}
        assert [list(arms) for arms in scarce.arms] == [[name for name in ARMS if name != "refit"]] * 2


class TestDetector:
    def test_learns_from_the_same_inputs(self) -> None:
        survey = surveyed()
        want = Detector.fit(survey["confidence"], survey["entropy"], survey["correct"].astype(bool))
        got = fitted().detector
        assert want is not None
        assert got is not None
        assert got.weights == pytest.approx(want.weights, rel=1e-2, abs=1e-2)


class TestSets:
    def test_no_evaluation_sees_them(self) -> None:
        # What learns entropies, what learns the rest, what evaluates, and what draws the heat map.
        streams = [(SEED, 0, 0), (SEED, 1, 0), (SEED, 2, 0), (SEED, 3)]
        head = heads_of("paper")[0]
        seen = [{float(x) for part in read(head, 64, 8, stream) for x in part.priority[:, 0]} for stream in streams]
        assert all(not a & b for i, a in enumerate(seen) for b in seen[:i])

    def test_the_same_seed_learns_the_same_and_another_does_not(self) -> None:
        heads = heads_of("paper")[:1]
        first, again, other = (fit(heads, (512,), 128, seed, TRAIN_SIZES, ignore) for seed in (1, 1, 2))
        assert first == again
        assert other.arms != first.arms

    def test_progress_counts_what_is_read(self) -> None:
        told: list[int] = []
        fit(heads_of("paper")[:1], (64, 100), 128, SEED, TRAIN_SIZES, told.append)
        assert sum(told) == 2048 * 16 + 32 * (64 + 100)
