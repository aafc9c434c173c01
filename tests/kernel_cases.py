"""What the tests of the kernels share: interpreted on a processor, compiled on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from torch import Tensor

from sharpmax.stats.call import AttentionCall

pytest.importorskip("triton")

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64

# The interpreter computes in numpy, which warns where a GPU is silent; non-finite numbers are meant here.
SILENT = pytest.mark.filterwarnings(
    "ignore:.*(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill fresh memory with NaN, so that an output which is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = SINGLE, size: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng, dtype=DOUBLE) * size).to(dtype).to(DEVICE)


def random_problem(
    queries: int, keys: int, width: int, *, dtype: torch.dtype = HALF, batch: int = 1, heads: int = 1, group: int = 1,
    size: float = 1.0, **changes: Any,
) -> AttentionCall:  # fmt: skip
    fields: dict[str, Any] = {"mask": None, "gain": None, "offset": None, "scale": 1 / math.sqrt(width)}
    return AttentionCall(
        q=randn(batch, heads, group, queries, width, seed=1, dtype=dtype, size=size),
        k=randn(batch, heads, keys, width, seed=2, dtype=dtype, size=size),
        rows=(batch, heads * group, queries),
        **{**fields, **changes},
    )
