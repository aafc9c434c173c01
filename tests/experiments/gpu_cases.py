"""A small shape, and decoding in plain torch, to test the GPU benchmark on a CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.experiments.benchmarks.gpu_inputs import Shape

CPU = torch.device("cpu")
SHAPE = Shape(2, 4, 2, 40, 40, 16, causal=True)


def plain_decode(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, block_table: Tensor | None = None, **options: Any
) -> Tensor:
    if block_table is not None:
        assert lengths is not None
        keys = int(lengths[0])
        pages = [x[block_table.long()].flatten(1, 2) for x in (k, v)]
        assert all(x[:, keys:].isnan().all() for x in pages), "unused slots must not be read"
        k, v = (x[:, :keys].transpose(1, 2) for x in pages)
    out: Tensor = sm.attention(q, k, v, enable_gqa=True, **options)
    return out


def set_decode(monkeypatch: pytest.MonkeyPatch, decode: Any = plain_decode) -> None:
    monkeypatch.setattr(sys.modules["sharpmax"], "decode", decode, raising=False)
