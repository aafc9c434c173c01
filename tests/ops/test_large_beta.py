"""β beyond what the dtype can hold: the softmax becomes hard, and stays finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.policies.basic import Constant, PerFrequency
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from tests.numerics import worst

pytestmark = [
    # The interpreter computes in numpy, which warns where a GPU is silent.
    pytest.mark.filterwarnings("ignore:.*(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning"),
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGE = (1e5, 1e39, 1e300)
ROWS, KEYS, WIDTH = 6, 11, 16

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_beta = pytest.mark.parametrize("beta", LARGE)


def peaked(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and which key each row of q has its largest logit with: the others are at least 1 below."""
    best = torch.tensor([0, 1, 0, 2, 4, 3])
    k = torch.zeros(1, 1, KEYS, WIDTH, dtype=dtype)
    k[0, 0, :, :KEYS] = -8.0 * torch.eye(KEYS, dtype=dtype)
    k[..., -1] = 40.0  # an offset, so that logits are large on both sides of 0
    q = torch.zeros(1, 2, ROWS, WIDTH, dtype=dtype)
    q[0, :, torch.arange(ROWS), best] = -4.0
    q[0, 0, :, -1], q[0, 1, :, -1] = 3.0, -3.0
    v = torch.randn(1, 1, KEYS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    return q, k, v, best


def masks(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    hidden = torch.zeros(ROWS, KEYS, dtype=torch.bool)
    hidden[:, 7:] = True
    bias = -torch.arange(KEYS, dtype=dtype).div(64).expand(ROWS, KEYS)
    return {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": ~hidden},
        "lowest": {"attn_mask": torch.zeros(ROWS, KEYS, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)},
        "bias": {"attn_mask": bias.masked_fill(hidden, -torch.inf)},
    }


@every_dtype
@every_beta
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "lowest", "bias"])
def test_attention_takes_the_largest_logit(dtype: torch.dtype, beta: float, impl: Any, kind: str) -> None:
    if impl == "triton" and dtype == torch.float64:
        pytest.skip("the kernel takes no float64")
    q, k, v, best = peaked(dtype)
    q = q.requires_grad_()
    out = sm.attention(q, k, v, policy=Constant(beta), impl=impl, enable_gqa=True, **masks(dtype)[kind])
    assert worst(out, v[:, :, best].expand_as(out)) < 4 * torch.finfo(dtype).eps
    out.sum().backward()
    assert q.grad is not None
    assert bool(q.grad.isfinite().all())


@pytest.mark.parametrize(
    "policy",
    [PerHead(((Constant(5e3), Constant(6e3)),)), PerFrequency((5e3,) * (WIDTH // 2))],
    ids=["head", "frequency"],
)
@pytest.mark.parametrize("kind", ["none", "bool"])
def test_factors_of_the_query_stop_at_the_range_of_float16(policy: Any, kind: str) -> None:
    q, k, v, best = peaked(torch.float16)
    out = sm.attention(100 * q, k, v, policy=policy, enable_gqa=True, **masks(torch.float16)[kind])
    assert worst(out, v[:, :, best].expand_as(out)) < 4 * torch.finfo(torch.float16).eps


@every_beta
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_decode_takes_the_largest_logit(dtype: torch.dtype, beta: float, impl: Any) -> None:
    q, k, v, best = peaked(dtype)
    out = sm.decode(q[:, :, :1], k, v, policy=Constant(beta), impl=impl)
    assert worst(out, v[:, :, best[:1]].expand_as(out)) < 4 * torch.finfo(dtype).eps


@every_dtype
@every_beta
def test_softmax_takes_the_largest_logit(dtype: torch.dtype, beta: float) -> None:
    logits = torch.tensor([[1.0, -3.0, 0.5, -torch.inf], [-1000.0, 1000.0, 960.0, 0.0]], dtype=dtype).requires_grad_()
    weights = sm.softmax(logits, policy=Constant(beta))
    assert torch.equal(weights, torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=dtype))
    weights[:, 0].sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("policy", [LogLinear(level=200.0, ceiling=1e200), EntropyTarget(1e-9, ceiling=1e200)], ids=str)
def test_other_policies_with_a_large_beta(policy: Any) -> None:
    q, k, v, best = peaked(torch.float32)
    out = sm.attention(q, k, v, policy=policy, enable_gqa=True)
    assert worst(out, v[:, :, best].expand_as(out)) < 1e-6
    s = q @ k.mT / 4
    assert worst(sm.softmax(s, policy=policy) @ v, out) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_large_beta_of_small_logits_is_kept(dtype: torch.dtype, impl: Any, biased: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 7, 16, generator=rng) for _ in range(3))
    small, beta = (2.0**-12, 2.0**17) if dtype == torch.float16 else (2.0**-90, 2.0**92)
    q, k, v = (q * small).to(dtype), k.to(dtype), v.to(dtype)
    bias = (torch.randn(7, 7, generator=rng) * small).to(dtype) if biased else None
    s = (q.double() @ k.double().mT / 4 + (0.0 if bias is None else bias.double())) * beta
    out = sm.attention(q, k, v, attn_mask=bias, policy=Constant(beta), impl=impl)
    assert worst(out, s.softmax(-1) @ v.double()) < (2e-2 if dtype == torch.float16 else 1e-5)
