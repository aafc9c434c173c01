"""A β per rotary frequency: the same in attention, in a model, in a folded model and in a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPTJConfig, LlamaConfig, Qwen3Config

import sharpmax as sm
import sharpmax.jax as smj
from sharpmax.errors import UnsupportedError
from sharpmax.policies import Constant, LogLength, PerFrequency, PerHead

VALUES = (0.5, 1.0, 1.75, 1.25)  # for heads of size 8
FACTORS = torch.tensor(2 * VALUES)


def _grid(layers: int, heads: int, frequencies: int = 4, *, shared: bool = False) -> PerHead:
    rng = torch.Generator().manual_seed(7)
    values = torch.rand(layers, 1 if shared else heads, frequencies, generator=rng).add(0.5).expand(-1, heads, -1)
    return PerHead(tuple(tuple(PerFrequency(tuple(head)) for head in layer) for layer in values.double().tolist()))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_the_scaled_query(causal: bool) -> None:
    q, k, v = torch.randn(3, 2, 3, 5, 8).unbind()
    wanted = F.scaled_dot_product_attention(q * FACTORS, k, v, is_causal=causal)
    assert torch.allclose(sm.attention(q, k, v, is_causal=causal, policy=PerFrequency(VALUES)), wanted, atol=1e-6)
    found = smj.attention(*(jnp.asarray(x) for x in (q, k, v)), is_causal=causal, policy=PerFrequency(VALUES))
    assert torch.allclose(torch.tensor(found.tolist()), wanted, atol=1e-5)


def test_heads_may_mix_kinds() -> None:
    q, k, v = torch.randn(3, 1, 3, 40, 8).unbind()
    policy = PerHead(((PerFrequency(VALUES), Constant(1.5), LogLength(4.0)),))
    beta = math.log(40) / math.log(4)
    scaled = q * torch.stack([FACTORS, torch.full((8,), 1.5), torch.full((8,), beta)])[:, None]
    assert torch.allclose(sm.attention(q, k, v, policy=policy), F.scaled_dot_product_attention(scaled, k, v), atol=1e-5)
    one = sm.decode(q[:, :, :1], k, v, policy=policy)
    assert torch.allclose(one, F.scaled_dot_product_attention(scaled[:, :, :1], k, v), atol=1e-5)


def _model(config: type, **more: object) -> Any:
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(config(vocab_size=97, **({"head_dim": 8} | shape | more)))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model.eval()


@pytest.mark.parametrize(("config", "shared"), [(LlamaConfig, False), (Qwen3Config, True)])
def test_a_folded_model_equals_the_applied_policy_and_scaled_weights(config: type, shared: bool) -> None:
    model = _model(config, num_key_value_heads=2)
    policy, ids = _grid(2, 4, shared=shared), torch.randint(97, (2, 11))
    plain = model(ids).logits
    with sm.applied(model, policy):
        applied = model(ids).logits
    folded = sm.fold(model, policy)
    assert torch.allclose(folded(ids).logits, applied, atol=1e-4)
    assert not torch.allclose(plain, applied, atol=1e-2)
    if not shared:  # by hand: rows i and i + 4 of each head
        for layer, row in zip(model.model.layers, policy.policies, strict=True):
            factors = torch.tensor([2 * one.values for one in row if isinstance(one, PerFrequency)]).flatten()
            layer.self_attn.q_proj.weight.data *= factors[:, None]
        assert torch.allclose(model(ids).logits, applied, atol=1e-4)


def test_one_gain_for_all_heads_holds_no_scale_per_head() -> None:
    with pytest.raises(UnsupportedError, match="its heads need the same β"):
        sm.fold(_model(Qwen3Config, num_key_value_heads=2), _grid(2, 4))


def test_interleaved_rotary_pairs_are_refused_by_the_check() -> None:
    torch.manual_seed(0)
    config = GPTJConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)
    with pytest.raises(UnsupportedError):
        sm.fold(AutoModelForCausalLM.from_config(config).eval(), _grid(2, 4))
