"""Inputs and oracles that several test files share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.policies.polynomial import PAPER
from sharpmax.stats.call import AttentionCall

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IMPLS = ("reference", "streaming", "sdpa", "triton")
# What an attention kernel with v := k cannot tell.
FULL = ("reference", "streaming", "triton")

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run by `make test-gpu` on one"),
]


def heads(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Random numbers rounded to `dtype`, so that a float64 oracle can start from the very same ones."""
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def call_at(q: Tensor, k: Tensor, mask: Tensor | None = None, *, offset: int | None, **options: Any) -> AttentionCall:
    """An attention call whose causal limit is at an offset of its own."""
    return replace(AttentionCall.of(q, k, mask, **options), offset=offset)


def exact(q: Tensor, k: Tensor, **options: Any) -> sm.RowStats:
    """The float64 oracle on the numbers that q and k hold."""
    return sm.row_stats(q.double(), k.double(), impl="reference", **options)


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, policy: Any, scale: float | None = None, bias: Any = 0.0
) -> Tensor:
    """The definition: softmax(β·s) over the visible keys, times v, dense and in float64; heads may share keys."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    visible = visible.expand(s.shape)
    v = v.masked_fill(~visible.any(2)[..., None], 0.0)
    out: Tensor = sm.softmax(s, policy=policy, mask=visible) @ v
    return out


def paper_beta(entropy: Tensor) -> Tensor:
    """β of the paper's rule, by Horner's scheme in the dtype of the entropy."""
    beta = torch.zeros_like(entropy)
    for c in PAPER.coefficients:
        beta = beta * entropy + c
    return torch.where(entropy > 0.5, beta.clamp_min(1.0), 1.0)


def worst(got: Tensor, want: Tensor) -> float:
    """The largest absolute error."""
    return float((got.detach().double() - want.detach().double()).abs().max()) if got.numel() else 0.0


def textbook(s: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """The statistics of logits by their textbook formulas, in the dtype of the logits."""
    blind = ~visible.any(-1, keepdim=True)
    s = s.masked_fill(~visible & ~blind, -torch.inf)
    p, lse = s.softmax(-1), s.logsumexp(-1)
    s = s.masked_fill(~visible, 0.0)
    mean = (p * s).sum(-1)
    return {"lse": lse, "mean": mean, "var": (p * (s - mean[..., None]) ** 2).sum(-1), "entropy": lse - mean}


def tables(stats: sm.RowStats) -> Iterator[tuple[str, Tensor]]:
    """Every measured statistic by name."""
    for name in (*stats.measured, "entropy"):
        yield name, getattr(stats, name)


def assert_same_stats(got: sm.RowStats, want: sm.RowStats, error: float, *names: str) -> None:
    """Equal counts, and every measured statistic (or those named) within `error` in rows that see a key."""
    assert got.count.tolist() == want.count.tolist()
    seen = want.count > 0  # elsewhere the maximum is −inf on both sides
    for name, value in tables(got):
        if name in (names or (name,)):
            assert worst(value[seen], getattr(want, name)[seen]) < error, name
