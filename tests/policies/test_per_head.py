"""A policy per head: the same as asking every head's own policy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import OutOfRangeWarning
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from tests.policies.rows import beta_of

anywhere = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
HEADS: dict[str, tuple[Policy, Policy, Policy]] = {
    "constant": (Constant(1.0), Constant(2.0), Constant(0.5)),
    "equal": (Constant(2.0), Constant(2.0), Constant(2.0)),
    "polynomial": (
        PAPER,
        Polynomial((0.1, 0.0, 0.3, 0.4, 1.0), (0.5, 4.0), 0.2, "extrapolate"),
        Polynomial((-0.1, 0.2, 0.0, 0.0, 2.0), (0.1, 3.0), 0.7, "extrapolate"),
    ),
    "clamped": (
        Polynomial((0.5, 1.0), (0.5, 1.5), 0.1),
        Polynomial((0.7, 1.0), (0.2, 1.0), 0.2),
        Polynomial((0.9, 1.0), (0.1, 0.9), 0.3),
    ),
    "degrees": (Polynomial((0.5, 1.0), (0.5, 4.0)), Polynomial((2.0,), (0.5, 4.0)), PAPER),
    "length": (LogLength(2), LogLength(4, floor=1.5), LogLength(8, floor=0.2)),
    "fitted-first": (LogLength(2, fitted_on=(2, 9)), LogLength(4), LogLength(8)),
    "fitted-last": (LogLength(2), LogLength(4), LogLength(8, fitted_on=(2, 9))),
    "target": (EntropyTarget(0.5), EntropyTarget(1.0, floor=0.2), EntropyTarget(0.1, ceiling=3.0)),
    "curve": (
        Curve((0.1, 1.0), (1.0, 2.0)),
        Curve((0.5, 1.5), (1.5, 3.0)),
        Curve((0.2, 1.9), (3.0, 1.0)),
    ),
    "knots": (Curve((0.1, 1.0), (1.0, 2.0)), Curve((0.5, 1.0, 1.5), (1.5, 2.0, 3.0)), Curve((1.0, 2.0), (1.0, 2.0))),
    "log-linear": (
        LogLinear(level=0.4, entropy=-0.7, entropy_length=0.8),
        LogLinear(length=0.3, top=0.9, top2=-0.4, top_length=-0.6, reference=3.0),
        LogLinear(var=0.2, entropy2=0.5, floor=0.9, ceiling=1.1),
    ),
    "mixed": (PAPER, EntropyTarget(0.6), LogLength(3)),
    "mixed-targets": (EntropyTarget(0.3), Constant(1.0), EntropyTarget(1.2, floor=0.3)),
}
every_grid = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}


def one_by_one(logits: Tensor, heads: tuple[Policy, ...], mask: Tensor | None = None) -> Tensor:
    out = [
        sm.softmax(logits[..., h, :, :], policy=policy, mask=None if mask is None else mask[..., h, :, :])
        for h, policy in enumerate(heads)
    ]
    return torch.stack(out, -3)


@every_grid
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@anywhere
def test_equals_the_heads_one_by_one(heads, dtype):
    logits = torch.randn(2, 3, 5, 9, dtype=dtype) * 1.5
    mask = torch.rand(2, 3, 5, 9) < 0.8
    mask[0, 1, 2] = False
    policy = PerHead((heads,))
    tolerance = TOLERANCE[dtype]
    got = sm.softmax(logits, policy=policy)
    assert got.dtype == dtype
    torch.testing.assert_close(got, one_by_one(logits, heads), rtol=tolerance, atol=tolerance)
    got = sm.softmax(logits, policy=policy, mask=mask)
    torch.testing.assert_close(got, one_by_one(logits, heads, mask), rtol=tolerance, atol=tolerance)


@every_grid
@anywhere
def test_equals_the_heads_one_by_one_in_attention(heads):
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64).unbind()
    got = sm.attention(2 * q, k, v, policy=PerHead((heads,)), is_causal=True, impl="streaming")
    for h, policy in enumerate(heads):
        alone = slice(h, h + 1)
        want = sm.attention(2 * q[:, alone], k[:, alone], v[:, alone], policy=policy, is_causal=True, impl="streaming")
        torch.testing.assert_close(got[:, alone], want, rtol=1e-10, atol=1e-11)


class TestGrid:
    def test_every_head_warns_for_its_own_rows(self):
        inside, outside = Curve((0.0, 9.0), (1.0, 2.0)), Curve((0.0, 0.1), (1.0, 2.0))
        with pytest.warns(OutOfRangeWarning, match="outside 0 … 0.1") as caught:
            sm.softmax(torch.zeros(2, 3, 8), policy=PerHead(((inside, outside),)))
        assert len(caught) == 1
        sm.softmax(torch.zeros(2, 3, 8), policy=PerHead(((inside, outside),)))

    def test_layers_are_counted_from_either_end(self):
        grid = PerHead(((Constant(1.0),), (Constant(2.0),), (Constant(3.0),)))
        assert [grid.for_layer(i).policies[0][0] for i in (-3, -2, -1, 0, 1, 2)] == [
            Constant(v) for v in (1, 2, 3, 1, 2, 3)
        ]
        assert (grid.layers, grid.heads) == (3, 1)
        assert grid.for_layer(1).for_layer(0) == grid.for_layer(1)

    def test_a_layer_of_one_head(self):
        rows = torch.randn(1, 4, 9, dtype=torch.float64)
        for policy in (Constant(3.0), EntropyTarget(0.5), LogLinear(entropy=1.0)):
            torch.testing.assert_close(beta_of(PerHead(((policy,),)), rows), beta_of(policy, rows))
