"""Small shapes and a decode in plain torch, for tests of the GPU benchmark on a CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.experiments.benchmarks.gpu import Shape

CPU = torch.device("cpu")
SHAPE = Shape(2, 4, 2, 40, 40, 16, causal=True)


def plain_decode(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Tensor | None = None, block_table: Tensor | None = None, **options: Any
) -> Tensor:
    if block_table is not None:
        assert lengths is not None
        keys = int(lengths[0])
        k, v = (x[block_table.long()].flatten(1, 2)[:, :keys].transpose(1, 2) for x in (k, v))
    out: Tensor = sm.attention(q, k, v, enable_gqa=True, **options)
    return out


def set_decode(monkeypatch: pytest.MonkeyPatch, decode: Any = plain_decode) -> None:
    monkeypatch.setattr(sys.modules["sharpmax"], "decode", decode, raising=False)
