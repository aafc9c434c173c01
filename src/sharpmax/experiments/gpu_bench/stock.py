"""The stock kernels that ours are measured against: every backend that takes the case."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor

__all__ = ["BACKENDS", "attend", "with_backend"]

T = TypeVar("T")

BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
"""What they are called here and in torch; the one that builds the n×n matrix is not among them."""


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Plain attention by torch's own choice of backend."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def with_backend(name: str, run: Callable[[], T]) -> Callable[[], T]:
    """The same with one backend and no other; it raises `RuntimeError` where that one refuses."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, BACKENDS[name])

    def alone() -> T:
        with sdpa_kernel([backend]):
            return run()

    return alone
