"""Families that scale their queries by position already: a policy replaces their rule, or the family is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.errors import UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.policies import Constant, LogLength, PerHead, from_config
from sharpmax.stats import RowStats
from tests.integrations.families import _LLAMA, FAMILIES, LENGTH, Family, transformers

LLAMA: Any = pytest.importorskip("transformers.models.llama.modeling_llama")
ALL_ATTENTION_FUNCTIONS, eager_attention_forward = LLAMA.ALL_ATTENTION_FUNCTIONS, LLAMA.eager_attention_forward

_GROUPED = {**_LLAMA, "head_dim": 8}
_LATENT = {
    **_LLAMA, "num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 1, "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 2,
}  # fmt: skip
_INKLING = {
    **_GROUPED, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
    "layer_types": ["hybrid", "hybrid_sliding"], "mlp_layer_types": ["dense", "dense"],
}  # fmt: skip

_LLAMA4 = {**_GROUPED, "num_local_experts": 1, "floor_scale": 5, "no_rope_layers": [1, 0]}
_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 3,
         "max_position_embeddings": 64, "llama_4_scaling_beta": 0.7}  # fmt: skip

RULES = {
    "llama4": Family("llama4", "Llama4ForCausalLM", "Llama4TextConfig", {**_LLAMA4, "attn_scale": 0.9}),
    "ministral3": Family("ministral3", "Ministral3ForCausalLM", "Ministral3Config",
                         {**_GROUPED, "rope_parameters": _ROPE}),
    "mistral4": Family("mistral4", "Mistral4ForCausalLM", "Mistral4Config", {**_LATENT, "rope_parameters": _ROPE}),
    "inkling": Family("inkling", "InklingForCausalLM", "InklingTextConfig",
                      {**_INKLING, "log_scaling_n_floor": 4, "log_scaling_alpha": 0.8, "swa_num_attention_heads": 4,
                       "swa_num_key_value_heads": 2}),
}  # fmt: skip


_NO_ROPE = {"rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.0}}
OFF: dict[str, dict[str, Any]] = {
    "llama4": {"attn_temperature_tuning": False}, "ministral3": _NO_ROPE, "mistral4": _NO_ROPE,
    "inkling": {"log_scaling_n_floor": None},
}  # fmt: skip


@pytest.fixture(params=RULES.values(), ids=list(RULES))
def family(request: pytest.FixtureRequest) -> Family:
    if not hasattr(transformers, request.param.model):
        pytest.skip(f"this release of transformers has no {request.param.model}")
    found: Family = request.param
    return found


def queries(model: Any, family: Family) -> list[torch.Tensor]:
    """The queries that each layer hands to the attention interface, after the model's own scaling."""
    seen: list[torch.Tensor] = []

    def record(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(query)
        return inner(module, query, *args, **kwargs)

    config = model.config
    inner, name = ALL_ATTENTION_FUNCTIONS["sdpa"], config._attn_implementation
    transformers.AttentionInterface.register("recorder", record)
    transformers.AttentionMaskInterface.register("recorder", transformers.masking_utils.sdpa_mask)
    config._attn_implementation_internal = "recorder"
    family.logits(model)
    config._attn_implementation_internal = name
    return seen


def test_a_rule_read_from_the_configuration_has_the_numbers_of_the_model(family: Family) -> None:
    model = family.build("sdpa").double()
    policy = from_config(model.config)
    assert policy is not None
    without = family.build("sdpa", **OFF[family.name]).double()
    assert from_config(without.config) is None
    # The first layer with a rule: what comes before it is the same in both models.
    layer = 1 if family.name == "llama4" else 0
    scaled, plain = queries(model, family)[layer], queries(without, family)[layer]
    counts = torch.arange(1, LENGTH + 1)[None].expand(4, -1)
    rule = policy.for_layer(layer) if isinstance(policy, PerHead) else policy
    expected = rule.beta(RowStats.anchored(counts))
    assert len(expected[0].unique()) > 2
    # Row 0 sees one key and has β = 1 in a policy, which changes nothing there. Inkling scales in float32.
    torch.testing.assert_close(scaled[:, :, 1:], (plain * expected[..., None])[:, :, 1:], rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_own_rule_applied_as_a_policy_is_the_model_as_published(family: Family, attention: str) -> None:
    model = family.build(attention)
    published = family.logits(model)
    with hf.applied(model, from_config(model.config)):
        torch.testing.assert_close(family.logits(model), published, rtol=1e-4, atol=1e-5)
    assert torch.equal(family.logits(model), published)


def test_a_policy_replaces_the_own_rule_and_none_keeps_it(family: Family, tmp_path: Path) -> None:
    model, own = family.build(), from_config(family.build().config)
    published, policy = family.logits(model), LogLength(2.0)
    other = family.build()
    other.config = model.config
    for part in other.modules():
        if hasattr(part, "config"):
            part.config = model.config
    for nothing in (None, "none", PerHead.of(Constant, value=[[1.0] * 4] * 2)):
        with hf.applied(model, nothing):
            assert torch.equal(family.logits(model), published)
    with hf.applied(model, policy):
        replaced = family.logits(model)
        copied = copy.deepcopy(model)
        assert torch.equal(family.logits(copied), replaced)
        assert torch.equal(family.logits(other), published)  # a model with the same configuration object
        model.save_pretrained(tmp_path)
        with hf.applied(model, None):
            assert torch.equal(family.logits(model), published)
        assert torch.equal(family.logits(model), replaced)
    assert torch.equal(family.logits(model), published)
    assert torch.equal(family.logits(hf.restore(copied)), published)
    assert from_config(model.config) == own
    with hf.applied(family.build(**OFF[family.name]), policy) as without:
        assert torch.equal(family.logits(without), replaced)
    assert not torch.allclose(replaced, published, atol=1e-3)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(family.logits(loaded), published)


def test_the_own_rule_goes_on_over_a_cache(family: Family) -> None:
    model = family.build()
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    published = model.generate(**family.inputs(model), **options)
    with hf.applied(model, from_config(model.config)):
        found = model.generate(**family.inputs(model), **options)
    assert torch.equal(found.sequences, published.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(published.logits), rtol=1e-4, atol=1e-5)


def test_weights_cannot_replace_an_own_rule(family: Family) -> None:
    with pytest.raises(UnsupportedError, match=r"scales its queries by position|position bias"):
        hf.fold(family.build(), Constant(2.0))


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


def given(self: Any, hidden_states: Any, attention_mask: Any, query_scale: Any = 1.0, **kwargs: Any) -> Any:
    """Llama's attention with queries scaled by what its caller says."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    out, weights = attend(self, q * query_scale, k, v, attention_mask, scaling=self.scaling, **kwargs)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


def test_a_scale_given_by_the_model_is_refused() -> None:
    if not hasattr(transformers, "BeamForCausalLM"):
        pytest.skip("this release of transformers has no BeamForCausalLM")
    model = transformers.BeamForCausalLM(transformers.BeamConfig(**_GROUPED))
    for skip in (False, True):
        with pytest.raises(UnsupportedError, match=r"BeamForCausalLM scales its queries by position .*attention_scal"):
            hf.apply(model, "paper", skip_unsupported=skip)


@pytest.mark.parametrize(("forward", "rule"), [(grows, "a logarithm in grows"), (given, "query_scale of given")])
def test_a_rule_of_a_family_unknown_here_shows_in_its_code(forward: Callable[..., Any], rule: str) -> None:
    model = FAMILIES["llama"].build()
    kind = type("OtherAttention", (LLAMA.LlamaAttention,), {"forward": forward})
    model.model.layers[1].self_attn = kind(model.config, 1)
    with pytest.raises(UnsupportedError, match=rule):
        hf.apply(model, "paper")
