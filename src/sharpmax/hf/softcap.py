"""Attention whose logits are capped by a tanh: there β has to meet the logit after the cap, not the query before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sharpmax.attention.sharp import scaled_mask
from sharpmax.hf.dense import DenseLogits
from sharpmax.rows.layout import room_for

__all__ = ["capped_attention"]


def capped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    beta_of: Callable[[DenseLogits], Tensor],
    *,
    softcap: float,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The eager attention of Gemma 2, step by step, with β between the cap and the mask."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    s = torch.tanh(torch.matmul(query, key.transpose(2, 3)) * scale / softcap) * softcap
    beta = beta_of(DenseLogits.masked(s, attention_mask))
    s = s * beta.clamp_max(room_for(s.dtype) / softcap)[..., None].to(s.dtype)
    mask = scaled_mask(attention_mask, beta)
    if mask is not None:
        s = s + mask
    weights = F.softmax(s, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights
