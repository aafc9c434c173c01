"""The best temperature of a row against searches that know nothing of its slope."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharpmax.experiments.reproduce.evaluation import best_beta

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


def ours(logits: np.ndarray, wanted: int) -> float:
    return float(best_beta(torch.tensor(logits, dtype=torch.float64), torch.tensor(wanted)))


rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12).flatmap(
    lambda logits: st.tuples(st.just(np.array(logits)), st.integers(0, len(logits) - 1))
)


@given(rows, st.sampled_from([1.0, 50.0]))
def test_no_temperature_of_a_fine_grid_is_better(row: tuple[np.ndarray, int], scale: float) -> None:
    logits, wanted = row[0] * scale, row[1]
    best = ours(logits, wanted)
    assert best >= 0.0
    assert math.isfinite(best) or logits[wanted] == logits.max()
    assert no_grid_point_is_better(logits, wanted, best)


def test_the_slope_vanishes_at_the_best() -> None:
    """Sharper than any search: the wanted logit is the mean one at the best β."""
    logits = torch.randn(200, 30, dtype=torch.float64) * 4
    wanted = logits.topk(3).indices[:, 2]
    best = best_beta(logits, wanted)
    free = (best > 0) & best.isfinite()
    assert int(free.sum()) > 150
    mean = ((logits * best[:, None]).softmax(-1) * logits).sum(-1)
    goal = logits.gather(-1, wanted[:, None])[:, 0]
    assert float((mean - goal)[free].abs().max()) < 1e-7


@pytest.mark.parametrize(
    ("logits", "wanted", "best"),
    [
        ([2.0, 2.0, 0.0], 0, math.inf),  # a tie at the top: no other is above it
        ([2.0, 2.0, 0.0], 1, math.inf),
        ([2.0, 2.0, 0.0], 2, 0.0),
        ([1.0, 1.0, 1.0], 2, math.inf),
        ([5.0], 0, math.inf),
        ([2.0, 0.0, 0.0, 0.0, 0.5], 4, 0.0),  # exactly at the mean
        ([1.0, 0.0], 1, 0.0),
        # Two levels and the wanted between them: (n − 1)·e^(−β)… has a closed form, E[s] = 1 at e^β = 3.
        ([2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], 10, 0.5 * math.log(9.0)),
    ],
)
def test_ties_and_closed_forms(logits: list[float], wanted: int, best: float) -> None:
    assert ours(np.array(logits), wanted) == pytest.approx(best, rel=1e-9)


def test_items_at_minus_infinity_are_not_part_of_the_row() -> None:
    # The third lies above the mean of the five that are there, and would lie below that of eight.
    logits = torch.tensor([2.0, 1.5, 1.1, 0.0, 0.0])
    gaps = torch.tensor([-math.inf, 2.0, -math.inf, 1.5, 1.1, 0.0, 0.0, -math.inf])
    for short, long in ((0, 1), (1, 3), (2, 4), (3, 5)):
        want = float(best_beta(logits, torch.tensor(short)))
        assert float(best_beta(gaps, torch.tensor(long))) == pytest.approx(want, rel=1e-9)


def test_float32_rows_of_any_shape() -> None:
    logits = torch.randn(4, 5, 40)
    wanted = torch.randint(40, (4, 5))
    got = best_beta(logits, wanted)
    assert (got.dtype, got.shape) == (torch.float64, (4, 5))
    # A row does not depend on those beside it, though all of them take as many steps as the slowest.
    alone = torch.stack([best_beta(row, at) for row, at in zip(logits.flatten(0, 1), wanted.flatten(), strict=True)])
    assert torch.allclose(got.flatten(), alone, rtol=1e-8)


def test_rows_that_reach_from_minus_to_plus_a_thousand() -> None:
    logits = torch.linspace(-1000, 1000, 41, dtype=torch.float64).repeat(41, 1)
    got = best_beta(logits, torch.arange(41)).numpy()
    assert (got[:21] == 0.0).all()
    assert got[40] == np.inf
    assert (np.diff(got[20:]) > 0).all()
    assert all(no_grid_point_is_better(logits[0].numpy(), at, got[at]) for at in range(21, 41))
