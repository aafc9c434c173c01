"""Sharpened attention written out by hand: dense, float64, row by row, with formulas of its own for every policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import Polynomial
from tests.integrations.families import transformers

NAME = "by-hand"


def entropy(s: np.ndarray) -> float:
    p = np.exp(s - s.max())
    p = p / p.sum()
    return float(-(p * np.log(np.where(p > 0, p, 1.0))).sum())


def beta(policy: Policy, s: np.ndarray) -> float:
    """β of one row of visible logits."""
    if isinstance(policy, Constant):
        return policy.value
    if len(s) <= 1:
        return 1.0
    if isinstance(policy, LogLength):
        return max(policy.floor, math.log(len(s)) / math.log(policy.reference))
    if isinstance(policy, EntropyTarget):
        low, high = math.log(policy.floor), math.log(policy.ceiling)
        if entropy(s * policy.floor) <= policy.target:
            return policy.floor
        for _ in range(80):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if entropy(s * math.exp(middle)) > policy.target else (low, middle)
        return math.exp(low)
    assert isinstance(policy, Polynomial)
    h = entropy(s)
    powers = range(len(policy.coefficients) - 1, -1, -1)
    return max(1.0, sum(c * h**p for c, p in zip(policy.coefficients, powers, strict=True))) if h > 0.5 else 1.0


@contextmanager
def by_hand(model: Any, policy: Policy) -> Iterator[None]:
    """The model with its attention replaced by the oracle, with `policy`."""
    inner = model.config._attn_implementation
    order: list[int] = []

    def layer_policy(module: torch.nn.Module, head: int) -> Policy:
        if not isinstance(policy, PerHead):
            return policy
        return policy.policies[order.index(id(module))][head]

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
        is_causal: bool | None = None, softcap: float | None = None, position_bias: Tensor | None = None,
        s_aux: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        (batch, heads, rows, width), keys = query.shape, key.shape[2]
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if inner == "eager":
            causal = False
        q, k, v = (x.detach().double().numpy() for x in (query, key, value))
        out = np.zeros((batch, rows, heads, v.shape[-1]))
        for b, h, i in np.ndindex(batch, heads, rows):
            shared = h // (heads // key.shape[1])
            s = k[b, shared] @ q[b, h, i] * (width**-0.5 if scaling is None else scaling)
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            if position_bias is not None:
                s = s + position_bias[min(b, len(position_bias) - 1), h, i].detach().double().numpy()
            if mask is not None:
                m = mask[min(b, len(mask) - 1), min(h, mask.shape[1] - 1), i].numpy()
                seen = m if m.dtype == bool else m > -1e30
                s = s if m.dtype == bool else s + np.where(seen, m, 0.0)
            else:
                seen = np.arange(keys) <= i if causal and rows > 1 else np.ones(keys, bool)
            s = s[seen]
            if len(s):
                s = s * beta(layer_policy(module, h), s)
                p = np.exp(s - s.max())
                sink = 0.0 if s_aux is None else np.exp(s_aux[h].item() - s.max())  # a logit that β leaves alone
                out[b, i, h] = (p / (p.sum() + sink)) @ v[b, shared][seen]
        return torch.from_numpy(out).to(query.dtype), None

    transformers.AttentionInterface.register(NAME, attention)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionMaskInterface.register(NAME, masks[inner])
    order.extend(id(m) for m in model.modules() if "Attention" in type(m).__name__ and not list(_inside(m)))
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _inside(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    return (m for m in module.modules() if m is not module and "Attention" in type(m).__name__)
