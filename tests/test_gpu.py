"""What only a GPU can show: the compiled kernel and PyTorch's CUDA kernels behind the same functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sharpmax as sm
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from tests.numerics import NEEDS_GPU, assert_same_stats, exact, heads, tables, worst

pytestmark = [
    *NEEDS_GPU,
    # torch's compiler uses parts of torch that torch advises against.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", ["triton", "streaming", "auto"])
@pytest.mark.parametrize("width", [59, 64, 111, 128])
@pytest.mark.parametrize("is_causal", [False, True])
def test_statistics_equal_the_oracle(dtype: torch.dtype, impl: Any, width: int, is_causal: bool) -> None:
    q = heads(2, 6, 1023, width, dtype=dtype).cuda()
    k = heads(2, 2, 1025, width, dtype=dtype).cuda()
    got = sm.row_stats(q, k, enable_gqa=True, is_causal=is_causal, impl=impl)
    assert_same_stats(got, exact(q, k, enable_gqa=True, is_causal=is_causal), 1e-4)


@pytest.mark.parametrize("impl", ["triton", "streaming"])
def test_131072_keys(impl: Any) -> None:
    q, k = heads(1, 1, 3, 64, dtype=torch.bfloat16).cuda(), heads(1, 1, 131_072, 64, dtype=torch.bfloat16).cuda()
    assert worst(sm.row_stats(q, k, impl=impl).entropy, exact(q, k).entropy) < 2e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", ["paper", LogLength(16), EntropyTarget(1.0)], ids=str)
def test_attention_equals_the_cpu(dtype: torch.dtype, policy: Any) -> None:
    if isinstance(policy, EntropyTarget):
        dtype = torch.float32  # a solved β can be large, and β·q in half precision is then what limits the result
    q, k, v = heads(1, 4, 97, 64, dtype=dtype), heads(1, 2, 97, 64, dtype=dtype), heads(1, 2, 97, 64, dtype=dtype)
    want = sm.attention(q.double(), k.double(), v.double(), enable_gqa=True, is_causal=True, policy=policy)
    got = sm.attention(q.cuda(), k.cuda(), v.cuda(), enable_gqa=True, is_causal=True, policy=policy)
    assert worst(got.cpu(), want) < (1e-3 if dtype == torch.float32 else 4e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", ["paper", LogLength(16), Constant(1e39)], ids=str)
@pytest.mark.parametrize("kind", ["visibility", "bias"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_float_mask_does_not_wait_for_the_device(dtype: torch.dtype, policy: Any, kind: str) -> None:
    q, k, v = (heads(1, 4, 97, 64, dtype=dtype) for _ in range(3))
    hidden = torch.ones(97, 97, dtype=torch.bool).triu(1)
    bias = heads(97, 97, dtype=dtype) if kind == "bias" else torch.zeros(97, 97, dtype=dtype)
    mask = bias.masked_fill(hidden, torch.finfo(dtype).min)
    inputs: Any = [x.cuda() for x in (q, k, v)]
    on_gpu = mask.cuda()
    sm.attention(
        inputs[0], inputs[1], inputs[2], attn_mask=on_gpu, policy=policy
    )  # compiles, and looks once whether rows are in range
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = sm.attention(inputs[0], inputs[1], inputs[2], attn_mask=on_gpu, policy=policy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(got.isfinite().all())
    if not isinstance(policy, Constant):
        want = sm.attention(
            q.double(), k.double(), v.double(), attn_mask=bias.double().masked_fill(hidden, -torch.inf), policy=policy
        )
        assert worst(got.cpu(), want) < (1e-3 if dtype == torch.float32 else 4e-2)


def test_gradients_and_compilation() -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = sm.attention(q, k, v, is_causal=True, policy="paper").square().sum()
        return out

    inputs = [heads(1, 2, 130, 64).cuda().requires_grad_() for _ in range(3)]
    truth = torch.autograd.grad(run(*(x.double() for x in inputs)), inputs)
    eager = torch.autograd.grad(run(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(run, fullgraph=True)(*inputs), inputs)
    for t, e, c in zip(truth, eager, compiled, strict=True):
        assert worst(e, t) < 1e-3
        assert worst(c, t) < 1e-3


def test_fifty_runs_are_bit_equal() -> None:
    q, k = heads(2, 4, 257, 64, dtype=torch.bfloat16).cuda(), heads(2, 4, 300, 64, dtype=torch.bfloat16).cuda()
    first = sm.row_stats(q, k, impl="triton")
    for _ in range(50):
        for (name, a), (_, b) in zip(tables(first), tables(sm.row_stats(q, k, impl="triton")), strict=True):
            assert torch.equal(a, b), name
