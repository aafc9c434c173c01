"""What a normalisation leaves of its input: a point of a ball, times a gain, plus a bias."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sharpmax.errors import UnsupportedError
from sharpmax.hf.queries import exact

__all__ = ["Ball"]


@dataclass(frozen=True, eq=False)
class Ball:
    """Every output of a normalisation of d numbers: gain·z + bias with ‖z‖ ≤ √d, and z of mean 0 if `centred`."""

    gain: Tensor
    bias: Tensor
    centred: bool
    epsilon: float

    @classmethod
    def of(cls, norm: nn.Module, where: str) -> Ball:
        """What a module leaves, or an error that says it is not known."""
        weight: Any = getattr(norm, "weight", None)
        if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1:
            ones = torch.ones(norm.normalized_shape, dtype=torch.float64)
            gain = ones if weight is None else exact(weight)
            bias: Any = norm.bias
            return cls(gain, torch.zeros_like(ones) if bias is None else exact(bias), True, norm.eps)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if isinstance(weight, Tensor) and weight.ndim == 1 and isinstance(epsilon, float):
            gain = exact(weight)
            with torch.no_grad():
                seen = exact(norm(torch.ones_like(weight)))
            # Some families store the gain, some the gain minus 1: which of them this is shows in what comes out.
            for offset in (0.0, 1.0):
                if torch.allclose(seen * math.sqrt(1.0 + epsilon), gain + offset, rtol=1e-2, atol=1e-2):
                    return cls(gain + offset, torch.zeros_like(gain), False, epsilon)
        raise UnsupportedError(
            f"model: {where} has a normalisation {type(norm).__name__} that no certificate knows; "
            "allowed: LayerNorm and RMSNorm with a gain"
        )

    @property
    def radius(self) -> float:
        """The largest ‖z‖."""
        return math.sqrt(len(self.gain))

    def folded(self, matrix: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """A linear map of the output, matrix `[..., D, d]` and bias `[..., D]`, as one of z."""
        through = matrix * self.gain
        if self.centred:
            through = through - through.mean(-1, keepdim=True)
        return through, bias + matrix @ self.bias

    def points(self, inputs: Tensor, epsilon: float | None = None) -> Tensor:
        """z for inputs `[..., d]`; with an epsilon of 0 instead of the module's own, z is never shorter."""
        if self.centred:
            inputs = inputs - inputs.mean(-1, keepdim=True)
        square = inputs.square().mean(-1, keepdim=True) + (self.epsilon if epsilon is None else epsilon)
        return inputs / torch.where(square > 0, square, 1.0).sqrt()
