"""Attention with any normaliser."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import reject, reject_type
from sharpmax.normalisers.base import Normaliser
from sharpmax.normalisers.base import normaliser as build
from sharpmax.stats.call import broadcast


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Normaliser | str,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Values weighted by a normaliser (or the name of one): v `[..., Lk, Dv]` -> `[..., Lq, Dv]`.

    Values of keys that a row does not see have no effect on it, NaN and inf included; one that it does see
    and that is not finite makes that output NaN.

    >>> v = torch.tensor([[1.0], [3.0], [float("nan")]])
    >>> attend(torch.zeros(2, 4), torch.zeros(3, 4), v, "softmax", mask=torch.tensor([True, True, False]))
    tensor([[2.],
            [2.]])
    """
    if isinstance(normaliser, str):
        normaliser = build(normaliser)
    if not isinstance(normaliser, Normaliser):
        reject_type("normaliser", type(normaliser).__name__, "a Normaliser or the name of one")
    weights: Tensor = normaliser(q, k, mask=mask, is_causal=is_causal, scale=scale)
    _check_values(v, k, weights)
    finite = v.isfinite()
    out = weights @ torch.where(finite, v, 0.0)
    # The second product is only needed to find rows that do see such a value, which is hardly ever.
    if not ops_for(finite).concrete(finite) or not bool(finite.all()):
        visible = normaliser.visible(q, k, mask, is_causal)
        out = out.masked_fill(visible.to(torch.float32) @ (~finite).to(torch.float32) > 0, math.nan)
    return out


def _check_values(v: Tensor, k: Tensor, weights: Tensor) -> None:
    if not isinstance(v, Tensor):
        reject_type("v", type(v).__name__, "a torch.Tensor")
    if v.dtype != k.dtype:
        reject_type("v", f"dtype {v.dtype}", f"the dtype of k, {k.dtype}")
    if v.device != k.device:
        reject("v", f"device {v.device}", f"the device of k, {k.device}")
    if v.ndim < 2 or v.shape[-2] != k.shape[-2]:
        reject("v", f"shape {tuple(v.shape)}", f"[..., {k.shape[-2]}, Dv], one value per key")
    batch = tuple(weights.shape[:-2])
    if broadcast(v.shape[:-2], batch) is None:
        reject("v", f"batch {tuple(v.shape[:-2])}", f"a batch that broadcasts with {batch}, that of q and k")
