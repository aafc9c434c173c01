"""Sharp attention for JAX: the names of sharpmax on JAX arrays, with the same policies and without torch.

The paper's adaptive temperature is `sharpmax.jax.softmax(logits, policy="paper")`.
"""

from sharpmax.lazy import require

require("jax", extra="jax", purpose="sharpmax.jax")

from sharpmax.jax.ops import attention, entropy, softmax  # noqa: E402
from sharpmax.policies.base import Policy  # noqa: E402
from sharpmax.policies.basic import Constant, Curve, LogLength  # noqa: E402
from sharpmax.policies.entropy_target import EntropyTarget  # noqa: E402
from sharpmax.policies.per_head import PerHead  # noqa: E402
from sharpmax.policies.polynomial import PAPER, Polynomial  # noqa: E402
from sharpmax.policies.registry import load_policy  # noqa: E402
from sharpmax.stats.statistics import RowStats  # noqa: E402

__all__ = [
    "PAPER", "Constant", "Curve", "EntropyTarget", "LogLength", "PerHead", "Policy", "Polynomial", "RowStats",
    "attention", "entropy", "load_policy", "softmax",
]  # fmt: skip
