"""Windows and packed sequences: the same statistics as the masks they stand for."""

import os
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

import sharpmax as sm
from tests.numerics import assert_same_stats, exact, heads, worst

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
IMPLS = ["reference", "streaming", "triton"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "window"),
    [
        (torch.float32, 200, 200, 1),
        (torch.bfloat16, 200, 200, 70),
        (torch.float32, 40, 300, 150),
        (torch.bfloat16, 130, 90, 500),
    ],
)
def test_a_window_is_a_band(impl: Any, dtype: torch.dtype, queries: int, keys: int, window: int) -> None:
    q, k = heads(2, 4, queries, 16, dtype=dtype).to(DEVICE), heads(2, 2, keys, 16, dtype=dtype).to(DEVICE)
    place = torch.arange(queries, device=DEVICE)[:, None] + keys - queries
    j = torch.arange(keys, device=DEVICE)
    band = (j <= place) & (j > place - window)
    got = sm.row_stats(q, k, is_causal=True, window=window, enable_gqa=True, impl=impl)
    assert_same_stats(got, exact(q, k, attn_mask=band, enable_gqa=True), 1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("is_causal", "window"), [(False, None), (True, None), (True, 30)])
def test_packed_sequences_do_not_see_each_other(impl: Any, dtype: torch.dtype, is_causal: bool, window: Any) -> None:
    starts, starts_k = [0, 5, 5, 140, 150], [0, 70, 70, 210, 229]
    q, k = heads(2, 160, 16, dtype=dtype).to(DEVICE), heads(1, 240, 16, dtype=dtype).to(DEVICE)
    got = sm.row_stats(
        q, k, is_causal=is_causal, window=window, enable_gqa=True, impl=impl,
        cu_seqlens=torch.tensor(starts, device=DEVICE, dtype=torch.int32),
        cu_seqlens_k=torch.tensor(starts_k, device=DEVICE, dtype=torch.int32),
    )  # fmt: skip
    for first, last, first_k, last_k in zip(starts, starts[1:], starts_k, starts_k[1:], strict=False):
        if last > first:
            one = sm.row_stats(
                q[:, first:last].double(), k[:, first_k:last_k].double(), is_causal=is_causal, window=window,
                enable_gqa=True, impl="reference",
            )  # fmt: skip
            assert_same_stats(got.map(lambda rows, a=first, b=last: rows[:, a:b]), one, 1e-4)
    assert (got.count[:, 150:] == 0).all()
    assert (got.entropy[:, 150:] == 0).all()


def test_gradients_stay_within_the_span() -> None:
    q, k = heads(1, 40, 16).to(DEVICE).requires_grad_(), heads(1, 40, 16).to(DEVICE).requires_grad_()
    starts = torch.tensor([0, 25, 40], device=DEVICE)
    for impl in ("streaming", "triton"):
        stats = sm.row_stats(q, k, is_causal=True, cu_seqlens=starts, impl=impl)
        (stats.entropy + stats.lse)[:, :25].sum().backward()
        same = torch.zeros(40, 40, dtype=torch.bool, device=DEVICE)
        same[:25, :25] = same[25:, 25:] = True
        want = sm.row_stats(q, k, attn_mask=same.tril(), impl="reference")
        wanted = torch.autograd.grad((want.entropy + want.lse)[:, :25].sum(), (q, k))
        for x, gradient in zip((q, k), wanted, strict=True):
            assert x.grad is not None
            assert worst(x.grad, gradient) < 1e-4
            assert not x.grad[:, 25:].any()
            x.grad = None
