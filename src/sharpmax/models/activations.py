"""Activations of feed-forward layers by name: a smooth one, and discontinuous ones with a gradient to train by."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation", "hard_threshold", "step"]

Activation = Callable[[Tensor], Tensor]

_THRESHOLD = 0.5


def step(x: Tensor) -> Tensor:
    """1 where x > 0, else 0; the gradient is that of the sigmoid.

    >>> step(torch.tensor([-1.0, 0.5, 3.0]))
    tensor([0., 1., 1.])
    """
    return _straight_through((x > 0).to(x.dtype), torch.sigmoid(x))


def hard_threshold(x: Tensor) -> Tensor:
    """x where x > 1/2, else 0: a jump of 1/2; the gradient is that of GELU.

    >>> hard_threshold(torch.tensor([-1.0, 0.4, 0.75]))
    tensor([0.0000, 0.0000, 0.7500])
    """
    return _straight_through(torch.where(x > _THRESHOLD, x, 0.0), F.gelu(x))


def _straight_through(value: Tensor, smooth: Tensor) -> Tensor:
    # smooth − smooth is exactly 0, so the value is what it is to the bit.
    return value.detach() + (smooth - smooth.detach())


ACTIVATIONS: Mapping[str, Activation] = {"gelu": F.gelu, "step": step, "hard-threshold": hard_threshold}
