"""Row statistics written out by hand: dense, float64, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = dict[str, np.ndarray]


def row(s: np.ndarray) -> dict[str, float]:
    """Statistics of one row of visible logits."""
    if len(s) == 0:
        return dict.fromkeys(("entropy", "top", "sink", "spread", "local", "count"), 0.0)
    p = np.exp(s - s.max())
    p = p / p.sum()
    some = p[p > 0]
    return {
        "entropy": float(-(some * np.log(some)).sum()),
        "top": float(p.max()),
        "sink": float(p[0]),
        "spread": float(s.max() - s.min()),
        "local": float(p[-16:].sum()),
        "count": float(len(s)),
    }


def rows(logits: np.ndarray, visible: np.ndarray) -> Rows:
    """Statistics of logits `[..., Lk]` where `visible` (broadcasting) is True, each of the leading shape."""
    visible = np.broadcast_to(visible, logits.shape)
    found = [row(logits[i][visible[i]]) for i in np.ndindex(logits.shape[:-1])]
    return {name: np.array([one[name] for one in found]).reshape(logits.shape[:-1]) for name in row(np.zeros(0))}


def split(mask: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """What a mask adds to the logits, and what it leaves visible."""
    if mask is None:
        return np.zeros(1), np.ones(1, bool)
    if mask.dtype == torch.bool:
        return np.zeros(1), mask.numpy()
    values = mask.detach().double().numpy()
    visible = values > -1e30
    return np.where(visible, values, 0.0), visible


def dense(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None = None, cap: float | None = None,
    bias: Tensor | None = None, beta: float = 1.0,
) -> Rows:  # fmt: skip
    """Statistics of all rows of query `[..., H, Lq, D]` and key `[..., Hkv, Lk, D]`; causal is aligned upper-left."""
    q, k = query.detach().double().numpy(), key.detach().double().numpy()
    if q.ndim > 2 and k.shape[-3] != q.shape[-3]:
        k = np.repeat(k, q.shape[-3] // k.shape[-3], axis=-3)
    s = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        s = cap * np.tanh(s / cap)
    if bias is not None:
        s = s + bias.detach().double().numpy()
    added, visible = split(mask)
    s = s + added
    if causal:
        visible = visible & (np.arange(s.shape[-1]) <= np.arange(s.shape[-2])[:, None])
    return rows(beta * s, visible)


@contextmanager
def recorded(model: Any, beta: float = 1.0) -> Iterator[list[tuple[int, Rows]]]:
    """Run the model's own attention and note the statistics of every row: (number of the module, rows) per call."""
    import transformers

    inner = model.config._attn_implementation
    attending = [m for m in model.modules() if "Attention" in type(m).__name__ and not _holds_another(m)]
    number = {id(module): place for place, module in enumerate(attending)}
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    found: list[tuple[int, Rows]] = []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        function = _eager_of(module) if inner == "eager" else transformers.AttentionInterface()[inner]
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        causal = bool(causal) and mask is None and inner != "eager" and query.shape[2] > 1
        bias, cap = kwargs.get("position_bias"), kwargs.get("softcap")
        q, k = query, key
        if torch.is_autocast_enabled("cpu"):  # PyTorch's attention casts its inputs
            q, k = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key))
        measured = dense(q, k, mask, causal, kwargs.get("scaling"), cap, bias, beta)
        found.append((number[id(module)], measured))
        return function(module, query, key, value, mask, **kwargs)

    transformers.AttentionInterface.register("recording", attention)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    transformers.AttentionMaskInterface.register("recording", masks[inner])
    for config in configs.values():
        config._attn_implementation_internal = "recording"
    try:
        yield found
    finally:
        for config in configs.values():
            config._attn_implementation_internal = inner


def _holds_another(module: torch.nn.Module) -> bool:
    return any("Attention" in type(m).__name__ for m in module.modules() if m is not module)


def _eager_of(module: torch.nn.Module) -> Any:
    import importlib

    return importlib.import_module(type(module).__module__).eager_attention_forward
