"""A policy per head: the same as asking every head's own policy."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import ArgumentError, OutOfRangeWarning
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial

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


@every_grid
@anywhere
def test_gradients_equal_the_heads_one_by_one(heads):
    logits = (torch.randn(3, 4, 6, dtype=torch.float64) * 1.5).requires_grad_()

    def gradient(p: Tensor) -> Tensor:
        return torch.autograd.grad(p.square().sum(), logits)[0]

    together = gradient(sm.softmax(logits, policy=PerHead((heads,))))
    torch.testing.assert_close(together, gradient(one_by_one(logits, heads)), rtol=1e-9, atol=1e-10)


def test_query_heads_count_when_keys_are_shared():
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    policy = PerHead.of(Constant, value=[[1.0, 2.0, 3.0, 4.0]])
    out = sm.attention(q, k, k, policy=policy, enable_gqa=True)
    for h in range(4):
        want = sm.attention(
            q[:, h : h + 1], k[:, h // 2 : h // 2 + 1], k[:, h // 2 : h // 2 + 1], policy=Constant(h + 1)
        )
        torch.testing.assert_close(out[:, h : h + 1], want)


def test_nan_stays_in_its_head():
    logits = torch.randn(3, 2, 6)
    clean = sm.softmax(logits, policy=PerHead((HEADS["mixed"],)))
    logits[1, 0, 2] = torch.nan
    got = sm.softmax(logits, policy=PerHead((HEADS["mixed"],)))
    assert got[1, 0].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert torch.equal(got[1, 1], clean[1, 1])


class TestGrid:
    def test_more_than_one_layer_has_to_be_chosen_from(self):
        policy = PerHead.of(Constant, value=[[1.0, 2.0], [3.0, 4.0]])
        with pytest.raises(ArgumentError, match=r"policy: got 2 layers × 2 heads.*choose it with policy.for_layer"):
            sm.softmax(torch.randn(2, 3, 4), policy=policy)

    @pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5), (5,), (2, 3, 4, 5)])
    def test_the_number_of_heads_has_to_fit(self, shape):
        policy = PerHead.of(Constant, value=[[2.0, 3.0]])
        with pytest.raises(ArgumentError, match="policy: got 2 heads for rows of shape"):
            sm.softmax(torch.randn(shape), policy=policy)

    def test_needs_what_any_head_needs(self):
        assert PerHead(((Constant(2.0), LogLength(4)),)).needs == {"count"}
        assert PerHead(((PAPER, LogLength(4)),)).needs == {"count", "entropy"}
        assert PerHead(((PAPER,), (EntropyTarget(1.0),))).needs == {"count", "entropy", "var"}

    def test_is_identity_only_if_every_head_is(self):
        assert PerHead.of(Constant, value=[[1.0, 1.0]]).is_identity
        assert not PerHead.of(Constant, value=[[1.0, 1.0], [1.0, 1.1]]).is_identity

    def test_of_takes_several_parameters_and_arrays(self):
        policy = PerHead.of(EntropyTarget, target=cast(Any, np.array([[0.5, 1.0]])), floor=[[1.0, 0.5]])
        assert policy == PerHead(((EntropyTarget(0.5), EntropyTarget(1.0, floor=0.5)),))

    def test_every_head_warns_for_its_own_rows(self):
        inside, outside = Curve((0.0, 9.0), (1.0, 2.0)), Curve((0.0, 0.1), (1.0, 2.0))
        with pytest.warns(OutOfRangeWarning, match="outside 0 … 0.1") as said:
            sm.softmax(torch.zeros(2, 3, 8), policy=PerHead(((inside, outside),)))
        assert len(said) == 1
        sm.softmax(torch.zeros(2, 3, 8), policy=PerHead(((inside, outside),)))
