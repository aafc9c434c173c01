"""Fitting before the evaluation: the best β of a row, and the polynomial through them."""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpmax.experiments.reproduce import Fitted, best_beta, fit, fit_samples, measure, read
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.polynomial import PAPER
from tests.experiments.reproduce.trained_heads import heads_of

GRID = np.logspace(-4, 4, 2001)


def log_weight(logits: np.ndarray, wanted: int, beta: Any) -> Any:
    """The logarithm of what `wanted` weighs at each finite β."""
    scaled = np.multiply.outer(beta, logits - logits.max())
    return scaled[..., wanted] - np.log(np.exp(scaled).sum(-1))


def no_grid_point_is_better(logits: np.ndarray, wanted: int, best: float) -> bool:
    # β = ∞ leaves the items at the top, sharing evenly.
    limit = -math.log((logits == logits.max()).sum())
    reached = limit if math.isinf(best) else float(log_weight(logits, wanted, best))
    return bool(reached >= log_weight(logits, wanted, GRID).max() - 1e-9)


rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12).flatmap(
    lambda logits: st.tuples(st.just(np.array(logits)), st.integers(0, len(logits) - 1))
)


@given(rows, st.sampled_from([1.0, 50.0]))
def test_no_temperature_of_a_fine_grid_is_better(row: tuple[np.ndarray, int], scale: float) -> None:
    logits, wanted = row[0] * scale, row[1]
    best = float(best_beta(torch.tensor(logits, dtype=torch.float64), torch.tensor(wanted)))
    assert best >= 0.0
    assert math.isfinite(best) or logits[wanted] == logits.max()
    assert no_grid_point_is_better(logits, wanted, best)


def test_the_wanted_logit_is_the_mean_at_the_best_of_float32_rows_of_any_shape() -> None:
    logits = torch.randn(4, 50, 30) * 4
    wanted = logits.topk(3).indices[..., 2]
    best = best_beta(logits, wanted)
    assert (best.dtype, best.shape) == (torch.float64, (4, 50))
    free = (best > 0) & best.isfinite()
    assert int(free.sum()) > 150
    exact = logits.double()
    mean = ((exact * best[..., None]).softmax(-1) * exact).sum(-1)
    goal = exact.gather(-1, wanted[..., None])[..., 0]
    assert float((mean - goal)[free].abs().max()) < 1e-7


@pytest.mark.parametrize(
    ("logits", "wanted", "best"),
    [
        ([2.0, 2.0, 0.0], 0, math.inf),  # a tie at the top
        ([5.0], 0, math.inf),
        ([2.0, 0.0, 0.0, 0.0, 0.5], 4, 0.0),  # exactly at the mean
        # Two levels and the wanted between them: (n − 1)·e^(−β)… has a closed form, E[s] = 1 at e^β = 3.
        ([2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], 10, 0.5 * math.log(9.0)),
    ],
)
def test_ties_and_closed_forms(logits: list[float], wanted: int, best: float) -> None:
    found = best_beta(torch.tensor(logits, dtype=torch.float64), torch.tensor(wanted))
    assert float(found) == pytest.approx(best, rel=1e-9)


def test_items_at_minus_infinity_are_not_part_of_the_row() -> None:
    # The third is above the mean of the five visible ones; with zeros for the others it would be below.
    logits = torch.tensor([2.0, 1.5, 1.1, 0.0, 0.0])
    gaps = torch.tensor([-math.inf, 2.0, -math.inf, 1.5, 1.1, 0.0, 0.0, -math.inf])
    for short, long in ((0, 1), (1, 3), (2, 4), (3, 5)):
        want = float(best_beta(logits, torch.tensor(short)))
        assert float(best_beta(gaps, torch.tensor(long))) == pytest.approx(want, rel=1e-9)


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
    """Entropy and best β, by a search, of the inputs that are fitted on."""
    columns: dict[str, list[float]] = {"entropy": [], "beta": []}
    grid = np.logspace(-3, 3, 601)
    for position, size in itertools.product(range(2), SIZES):
        for seen in read(heads_of("paper")[position], size, fit_samples(SAMPLES), (SEED, 1, position)):
            p = seen.logits.double().softmax(-1)
            columns["entropy"] += (-torch.special.xlogy(p, p).sum(-1)).tolist()
            for logits, best in zip(seen.logits.double().numpy(), seen.best.tolist(), strict=True):
                if logits.argmax() == best:
                    columns["beta"].append(np.nan)
                    continue
                at = int(log_weight(logits, best, grid).argmax()) if logits[best] > logits.mean() else 0
                columns["beta"].append(float(grid[at]) if at else 0.0)
    return {name: np.array(values) for name, values in columns.items()}


def test_heads_differ_only_in_their_entropy_target() -> None:
    plain: list[dict[str, Policy | None]] = [{"softmax": None}] * 2
    # Other sets of the same kind, so the means agree within their standard errors.
    inside = measure(heads_of("paper"), plain, [TRAIN_SIZES], 2048, (SEED, 77))[TRAIN_SIZES]
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


def test_the_polynomial_is_the_least_squares_fit_to_the_best_betas_of_wrongly_ranked_inputs() -> None:
    table = fitted().polynomial
    assert table is not None
    entropy, beta = np.array(table["points"]["entropy"]), np.array(table["points"]["beta"])
    assert len(entropy) == len(beta) < 1000  # all points are shown
    value = np.polyval(np.polyfit(entropy, beta, 4), entropy)
    assert np.polyval(table["coefficients"], entropy) == pytest.approx(value, abs=1e-3)
    assert table["r2"] == pytest.approx(np.corrcoef(value, beta)[0, 1] ** 2, abs=1e-3)
    assert table["fitted_on"] == pytest.approx([entropy.min(), entropy.max()], rel=1e-4)
    assert 0.0 < beta.min() < beta.max() <= 10.0
    survey = surveyed()
    used = (survey["beta"] > 0) & (survey["beta"] < 9.5)
    want = {round(h, 4): b for h, b in zip(survey["entropy"][used], survey["beta"][used], strict=True)}
    got = {round(h, 4): b for h, b in zip(entropy, beta, strict=True)}
    shared = want.keys() & got.keys()
    assert len(shared) > 0.9 * len(want)  # rounding may put a point under a neighbouring key
    for key in shared:
        assert got[key] == pytest.approx(want[key], rel=0.03)  # the step of the grid is 2.3%


def test_the_evaluation_sees_no_set_that_was_used_for_fitting() -> None:
    # Streams of the entropy target, the other fits, the evaluation, and the heat map.
    streams = [(SEED, 0, 0), (SEED, 1, 0), (SEED, 2, 0), (SEED, 3)]
    head = heads_of("paper")[0]
    seen = [{float(x) for part in read(head, 64, 8, stream) for x in part.priority[:, 0]} for stream in streams]
    assert all(not a & b for i, a in enumerate(seen) for b in seen[:i])
