"""Softmax and its alternatives, all with one signature.

`weights = normaliser(q, k, mask=None, is_causal=False, scale=None)`; `attend` applies them to values.

| name | weights | can disperse |
|---|---|---|
| softmax | exp(s)/Σ exp(s) | yes |
| adaptive | softmax(β·s), β from a policy | yes, later |
| ssmax | softmax(s·ln n·logits), s learnable | while s·spread < 1 |
| sparsemax, entmax15 | sparse projections | not for a clear leader |
| top-k, hard | softmax over k keys, one-hot | no |
| local, stick-breaking | by position too | no |
| sigmoid | σ(s − ln n), no sum over keys | yes |
| softmax-plus-one | exp(s)/(1 + Σ exp(s)) | yes |
| linear | φ(q)·φ(k)/Σ φ(q)·φ(k) | yes |

>>> import torch
>>> q, k, v = torch.randn(3, 2, 5, 8).unbind(0)
>>> attend(q, k, v, normaliser("top-k", k=2), is_causal=True).shape
torch.Size([2, 5, 8])
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
