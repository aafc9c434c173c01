"""How a small model is trained: everything besides its seed, its data and its length."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Everything that training depends on besides its seed and its length."""

    name: str
    summary: str
    l2: float
    decay: bool
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 0
    batch: int = 128
    sizes: tuple[int, int] = (5, 16)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, 0 … steps − 1."""
        rate = self.learning_rate * (0.5 * (1.0 + math.cos(math.pi * step / steps)) if self.decay else 1.0)
        return rate * min(1.0, (step + 1) / (self.warmup + 1))
