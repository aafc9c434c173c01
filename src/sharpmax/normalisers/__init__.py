"""Softmax and its alternatives, all with one signature.

`weights = normaliser(q, k, mask=None, is_causal=False, scale=None)`; `attend` applies them to values.

`normalisers()` returns all of them by name. The attribute `disperses` of each says whether the largest weight must fall
as rows grow.
"""

from sharpmax.normalisers.base import Normaliser, attend, normaliser, normalisers, visible_softmax
from sharpmax.normalisers.variants import (
    Adaptive,
    Entmax15,
    Hard,
    Linear,
    Local,
    ScalableSoftmax,
    Sigmoid,
    Softmax,
    SoftmaxPlusOne,
    Sparsemax,
    StickBreaking,
    TopK,
)

__all__ = [
    "Adaptive", "Entmax15", "Hard", "Linear", "Local", "Normaliser", "ScalableSoftmax", "Sigmoid", "Softmax",
    "SoftmaxPlusOne", "Sparsemax", "StickBreaking", "TopK", "attend", "normaliser", "normalisers", "visible_softmax",
]  # fmt: skip
