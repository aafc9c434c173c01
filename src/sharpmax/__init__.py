"""sharpmax: measure, predict and fix softmax dispersion, the loss of focus of attention as inputs grow."""

from typing import TYPE_CHECKING

import sharpmax.attention  # noqa: F401  (light; see below)
from sharpmax.lazy import lazy_exports

if TYPE_CHECKING:
    from sharpmax import policies as policies
    from sharpmax import theory as theory
    from sharpmax.attention import attention as attention
    from sharpmax.attention import entropy as entropy
    from sharpmax.attention import normalisers as normalisers
    from sharpmax.attention import softmax as softmax
    from sharpmax.policies import load_policy as load_policy
    from sharpmax.rows import RowStats as RowStats
    from sharpmax.rows import row_stats as row_stats
    from sharpmax.theory import horizon as horizon

__version__ = "0.1.0"

_homes = {
    "RowStats": "sharpmax.rows",
    "attention": "sharpmax.attention.sharp",
    "entropy": "sharpmax.attention.dense",
    "horizon": "sharpmax.theory",
    "load_policy": "sharpmax.policies",
    "normalisers": "sharpmax.attention.normalisers",
    "policies": "sharpmax.policies",
    "row_stats": "sharpmax.rows",
    "softmax": "sharpmax.attention.dense",
    "theory": "sharpmax.theory",
}

__all__ = [
    "RowStats",
    "attention",
    "entropy",
    "horizon",
    "load_policy",
    "normalisers",
    "policies",
    "row_stats",
    "softmax",
    "theory",
]

# The room sharpmax.attention and its main function share a name. Loading the (light) room above and letting go of
# the name makes `sharpmax.attention` the function whichever part of the package is used first.
del globals()["attention"]

__getattr__, __dir__ = lazy_exports(__name__, _homes)
