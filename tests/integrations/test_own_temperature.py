"""Families that scale their queries by position already: a policy on top would sharpen twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sharpmax.errors import UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import modules_of
from tests.integrations.families import _LLAMA, FAMILIES, transformers

LLAMA: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
ALL_ATTENTION_FUNCTIONS, eager_attention_forward = LLAMA.ALL_ATTENTION_FUNCTIONS, LLAMA.eager_attention_forward

_GROUPED = {**_LLAMA, "head_dim": 8}
_LATENT = {
    **_LLAMA, "n_routed_experts": 2, "num_experts_per_tok": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 2,
}  # fmt: skip
_INKLING = {
    **_GROUPED, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "layer_types": ["hybrid", "hybrid_sliding"], "mlp_layer_types": ["dense", "dense"],
}  # fmt: skip

RULES = [
    ("Llama4ForCausalLM", "Llama4TextConfig", {**_GROUPED, "num_local_experts": 1}, "attn_temperature_tuning"),
    ("Ministral3ForCausalLM", "Ministral3Config", _GROUPED, "llama_4_scaling_beta"),
    ("Mistral4ForCausalLM", "Mistral4Config", _LATENT, "llama_4_scaling_beta"),
    ("InklingForCausalLM", "InklingTextConfig", {**_INKLING, "log_scaling_n_floor": 16}, "log_scaling_n_floor"),
    ("BeamForCausalLM", "BeamConfig", _GROUPED, "attention_scaling"),
]
OFF = [
    ("Llama4ForCausalLM", "Llama4TextConfig", {**_GROUPED, "num_local_experts": 1, "attn_temperature_tuning": False}),
    ("InklingForCausalLM", "InklingTextConfig", _INKLING),
]


def build(name: str, config: str, options: dict[str, Any]) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"this release of transformers has no {name}")
    return getattr(transformers, name)(getattr(transformers, config)(**options))


@pytest.mark.parametrize(("name", "config", "options", "rule"), RULES, ids=[rule[0] for rule in RULES])
def test_every_rule_that_transformers_ships_is_refused(
    name: str, config: str, options: dict[str, Any], rule: str
) -> None:
    model = build(name, config, options)
    for skip in (False, True):
        with pytest.raises(UnsupportedError, match=rf"{name} scales its queries by position already \({rule}"):
            hf.apply(model, "paper", skip_unsupported=skip)


@pytest.mark.parametrize(("name", "config", "options"), OFF, ids=[off[0] for off in OFF])
def test_a_rule_that_is_off_is_none(name: str, config: str, options: dict[str, Any]) -> None:
    assert len(modules_of(build(name, config, options))) == 2


def longer(positions: torch.Tensor) -> torch.Tensor:
    return 1 + torch.log1p(positions / 16)


def grows(self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Llama's attention with queries that grow with their position, without an option that says so."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k = LLAMA.apply_rotary_pos_emb(q, k, *position_embeddings)
    q = q * longer(torch.arange(q.shape[2]))[:, None]
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


def told(self: Any, hidden_states: Any, attention_mask: Any, query_scale: Any = 1.0, **kwargs: Any) -> Any:
    """Llama's attention with queries scaled by what its caller says."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    out, weights = attend(self, q * query_scale, k, v, attention_mask, scaling=self.scaling, **kwargs)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


@pytest.mark.parametrize(("forward", "rule"), [(grows, "a logarithm in grows"), (told, "query_scale of told")])
def test_a_rule_of_a_family_unknown_here_shows_in_its_code(forward: Callable[..., Any], rule: str) -> None:
    model = FAMILIES["llama"].build()
    kind = type("OtherAttention", (LLAMA.LlamaAttention,), {"forward": forward})
    model.model.layers[1].self_attn = kind(model.config, 1)
    with pytest.raises(UnsupportedError, match=rule):
        hf.apply(model, "paper")
