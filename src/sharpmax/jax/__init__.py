"""Sharp attention for JAX: the names of sharpmax on JAX arrays, with the same policies and without torch.

The paper's adaptive temperature is `sharpmax.jax.softmax(logits)`.
"""

from sharpmax.lazy import require

require("jax", extra="jax", purpose="sharpmax.jax")

from sharpmax.jax.dense import entropy, softmax  # noqa: E402  (they import jax, whose absence was explained above)
from sharpmax.jax.sharp import attention  # noqa: E402
from sharpmax.policies import (  # noqa: E402
    PAPER,
    Constant,
    Curve,
    EntropyTarget,
    LogLength,
    PerHead,
    Policy,
    Polynomial,
    load_policy,
)
from sharpmax.rows import RowStats  # noqa: E402

__all__ = [
    "PAPER",
    "Constant",
    "Curve",
    "EntropyTarget",
    "LogLength",
    "PerHead",
    "Policy",
    "Polynomial",
    "RowStats",
    "attention",
    "entropy",
    "load_policy",
    "softmax",
]
