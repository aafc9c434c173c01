"""Kernels that take every length: chosen for a while, on a GPU alone."""

from __future__ import annotations

import torch
from torch.backends import cuda

from sharpmax.models.language import any_length


def chosen() -> list[bool]:
    return [
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    ]


def test_cudnn_is_left_out_for_a_while_on_a_gpu() -> None:
    before = chosen()
    with any_length(torch.device("cuda")):
        assert chosen() == [True, True, True, False]
    with any_length(torch.device("cpu")):
        assert chosen() == before
    assert chosen() == before
