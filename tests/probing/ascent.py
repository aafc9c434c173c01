"""Inputs made to spread the logits of a head as far as gradient ascent can, through the model itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.integrations.families import transformers

NAME = "by-hand-logits"

# The normalisation whose output the attention module of a layer reads, written down family by family.
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi")
NORMS = {
    **dict.fromkeys(LIKE_LLAMA, "model.layers.{}.input_layernorm"),
    "gpt_neox": "gpt_neox.layers.{}.input_layernorm",
    "gpt2": "transformer.h.{}.ln_1",
    "opt": "model.decoder.layers.{}.self_attn_layer_norm",
    "t5": "encoder.block.{}.layer.0.layer_norm",
}
AFTER = {"bert": "bert", "roberta": "roberta"}


def norm_before(family: str, layer: int) -> str:
    if family in AFTER:
        root = AFTER[family]
        return f"{root}.encoder.layer.{layer - 1}.output.LayerNorm" if layer else f"{root}.embeddings.LayerNorm"
    return NORMS[family].format(layer)


@contextmanager
def logits_seen(model: Any) -> Iterator[list[Tensor]]:
    """The logits `[B, H, Lq, Lk]` of every attention call, as eager attention computes them, with their gradients."""
    seen: list[Tensor] = []
    modules = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = {key: config._attn_implementation_internal for key, config in modules.items()}
    capped = any(name == "eager" for name in before.values())

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None,
        softcap: float | None = None, position_bias: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        s = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None and capped:
            s = softcap * torch.tanh(s / softcap)
        if position_bias is not None:
            s = s + position_bias
        seen.append(s)
        return (s.softmax(-1) @ value).transpose(1, 2), None

    transformers.AttentionInterface.register(NAME, attention)
    transformers.AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    for config in modules.values():
        config._attn_implementation_internal = NAME
    try:
        yield seen
    finally:
        for key, config in modules.items():
            config._attn_implementation_internal = before[key]


def furthest(family: Any, model: Any, layer: int, length: int = 10, steps: int = 100) -> Tensor:
    """The largest spread `[heads]` that ascent finds in a layer if whatever is normalised before it is free.

    Sequence h of a batch is made for head h; the last row sees all of them.
    """
    norm = dict(model.named_modules())[norm_before(family.name, layer)]
    heads = model.config.num_attention_heads
    free = torch.randn(heads, length, model.config.hidden_size, generator=torch.Generator().manual_seed(3))
    free.requires_grad_()
    handle = norm.register_forward_pre_hook(lambda module, args: (free,))
    inputs = {"input_ids": torch.full((heads, length), 5)}
    if family.kind == "seq2seq":
        inputs["decoder_input_ids"] = inputs["input_ids"][:, :2]
    optimiser = torch.optim.Adam([free], lr=0.1)
    best = torch.zeros(heads)
    try:
        for _ in range(steps):
            with logits_seen(model) as seen:
                model(**inputs)
            rows = torch.stack([seen[layer][h, h, -1] for h in range(heads)])
            spread = rows.amax(-1) - rows.amin(-1)
            best = torch.maximum(best, spread.detach())
            optimiser.zero_grad()
            (-spread.sum()).backward()
            optimiser.step()
    finally:
        handle.remove()
    return best
