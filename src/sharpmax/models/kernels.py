"""Which of torch's attention kernels language models run on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["any_length"]

_OF_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def any_length(device: torch.device) -> AbstractContextManager[None]:
    """Attention kernels that take every length as it comes, for work whose lengths change from call to call.

    On newer GPUs torch prefers cuDNN, which plans anew for every shape: a good part of a second, again and again.
    """
    return sdpa_kernel(_OF_ANY_LENGTH) if device.type == "cuda" else nullcontext()
