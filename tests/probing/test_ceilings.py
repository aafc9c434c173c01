"""The largest β of a policy against the β of many rows."""

from __future__ import annotations

import math

import pytest
import torch

from sharpmax.errors import UnsupportedError
from sharpmax.policies.constant import Constant
from sharpmax.policies.curve import Curve
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_length import LogLength
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.probing.certified import beta_ceiling, ceilings_of
from sharpmax.stats.statistics import RowStats


def rows() -> RowStats:
    """Rows of every entropy between 0 and ln n, for n up to a billion."""
    n = torch.logspace(1, 9, 40, dtype=torch.float64)[:, None].expand(40, 400)
    entropy = torch.linspace(1e-6, 1.0, 400, dtype=torch.float64) * n.log()
    top = torch.exp(-entropy)
    lse = -top.log()
    return RowStats(n, torch.zeros_like(n), lse, lse - entropy, torch.ones_like(n))


@pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
@pytest.mark.parametrize(
    "policy",
    [
        PAPER,
        Constant(0.7),
        Constant(3.0),
        Curve((0.5, 2.0, 4.0), (0.5, 1.0, 1.7)),
        Curve((0.5, 2.0), (1.5, 0.2)),
        LogLinear(level=-0.4),
        LogLinear(level=9.0),
        LogLinear(length=0.5, ceiling=4.0),
        Polynomial((0.3, 0.5), (0.5, 4.0)),
        Polynomial((-1.0, 4.0, -2.0), (0.5, 4.0)),
        Polynomial((-1.0, 4.0, -2.0), (0.5, 1.5)),
        Polynomial((0.2,), (0.5, 4.0), outside_is="extrapolate"),
    ],
    ids=lambda policy: policy.describe(),
)
def test_no_row_gets_more_and_some_row_gets_it(policy) -> None:
    beta = float(policy.beta(rows()).max())
    assert beta <= beta_ceiling(policy) * (1 + 1e-12)
    assert beta >= beta_ceiling(policy) * (1 - 1e-3)


def test_a_target_is_sought_up_to_its_ceiling() -> None:
    assert beta_ceiling(EntropyTarget(0.5, ceiling=40.0)) == 40.0


@pytest.mark.parametrize(
    "policy", [LogLength(16), Polynomial((0.1, 1.0), (0.5, 4.0), outside_is="extrapolate")], ids=lambda one: one.kind
)
def test_a_policy_without_a_ceiling_is_refused(policy) -> None:
    with pytest.raises(UnsupportedError, match=r"^policy: β = .* certified; allowed: policies with a ceiling"):
        beta_ceiling(policy)


def test_each_head_has_its_own() -> None:
    grid = PerHead.of(Constant, value=[[1.0, 2.0], [0.5, 3.0]])
    assert ceilings_of(grid, 1, 2) == [0.5, 3.0]
    assert ceilings_of(Constant(2.0), 1, 3) == [2.0] * 3
    assert ceilings_of(None, 0, 2) == [1.0, 1.0]
    assert beta_ceiling(LogLinear(level=math.log(2.0))) == pytest.approx(2.0)
