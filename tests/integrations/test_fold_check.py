"""`fold` compares the folded model with the applied policy: what the weights cannot hold is refused, never returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sharpmax.errors import ArgumentError, UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.integrations.families import _LLAMA, _SMALL, _VIT, FAMILIES, Family

SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}
BEIT = {**_VIT, "use_relative_position_bias": True, "out_indices": [1]}
ZAMBA2 = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_head_dim": 16, "intermediate_size": 48,
    "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1,
    "use_shared_attention_adapter": False, "max_position_embeddings": 64,
}  # fmt: skip
PARAKEET = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "num_mel_bins": 16,
    "subsampling_conv_channels": 8,
}  # fmt: skip
CLIP = {
    "text_config": {**_SMALL, "eos_token_id": 2}, "vision_config": _VIT, "projection_dim": 16,
}  # fmt: skip
LLAVA = {
    "text_config": {**_LLAMA, "model_type": "llama"}, "vision_config": {**_VIT, "model_type": "clip_vision_model"},
    "image_token_index": 5,
}  # fmt: skip
SPEECH = {**_SMALL, "conv_dim": [16] * 7}

DIFFERENT = [
    Family("swin", "SwinModel", "SwinConfig", SWIN),
    Family("beit", "BeitModel", "BeitConfig", BEIT),
    Family("doge", "DogeForCausalLM", "DogeConfig", _LLAMA),
    Family("parakeet", "ParakeetEncoder", "ParakeetEncoderConfig", PARAKEET),
]
SAME = [
    Family("beit without bias", "BeitModel", "BeitConfig", {**BEIT, "use_relative_position_bias": False}, "image"),
    Family("albert", "AlbertModel", "AlbertConfig", {**_SMALL, "embedding_size": 16}, "encoder"),
    Family("cohere", "CohereForCausalLM", "CohereConfig", {**_LLAMA, "use_qk_norm": True}),
    Family("mixtral", "MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "num_local_experts": 2}),
]
TOWERS = [
    Family("clip", "CLIPModel", "CLIPConfig", CLIP),
    Family("llava", "LlavaForConditionalGeneration", "LlavaConfig", LLAVA),
    Family("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", SPEECH),
]


def constants(model: Any) -> PerHead:
    layers = len(modules_of(model))
    return PerHead.of(Constant, value=[[0.5 + 0.5 * ((layer + h) % 5) for h in range(4)] for layer in range(layers)])


def everything(model: Any) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def refused(model: Any, words: str, **options: Any) -> str:
    """The reason, with the model as it was to the last bit."""
    before, mode, config = everything(model), model.training, model.config.to_dict()
    with pytest.raises(UnsupportedError, match=words) as caught:
        hf.fold(model, Constant(2.0), **options)
    assert all(torch.equal(a, b) for a, b in zip(everything(model), before, strict=True))
    assert (model.training, model.config.to_dict()) == (mode, config)
    assert hf.policy_of(model) is None
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", DIFFERENT, ids=lambda f: f.name)
def test_logits_that_are_more_than_query_times_key_are_found_out(family: Family, dtype: torch.dtype) -> None:
    """A position bias in the mask (Swin, BEiT), a mask made of values (Doge), a bias added to the query (Parakeet)."""
    model = family.build().to(dtype)
    assert family.model in refused(model, r"layer 0 of .*more than query times key.*sharpmax\.apply")


def test_a_weight_of_two_modules_is_refused_by_name() -> None:
    model = Family("zamba2", "Zamba2ForCausalLM", "Zamba2Config", ZAMBA2).build()
    refused(model, r"layer 0 of Zamba2ForCausalLM are also model\.layers\.3\.shared_transformer\.self_attn\.q_proj\.w")


@pytest.mark.parametrize("how", ["parameter", "view"])
def test_a_weight_shared_by_hand_is_refused_by_name(how: str) -> None:
    model = FAMILIES["llama"].build()
    first, second = (layer.self_attn.q_proj for layer in model.model.layers)
    second.weight = first.weight if how == "parameter" else nn.Parameter(first.weight.detach()[:])
    refused(model, r"layer 0 .* also model\.layers\.1\.self_attn\.q_proj\.weight")
    only_first = PerHead.of(Constant, value=[[2.0] * 4, [1.0] * 4])
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        hf.fold(model, only_first)


@pytest.mark.parametrize("family", SAME, ids=lambda f: f.name)
def test_what_weights_can_hold_is_folded(family: Family) -> None:
    model = family.build()
    policy = constants(model)
    plain = family.logits(model)
    with hf.applied(model, policy):
        sharp = family.logits(model)
    assert (sharp - plain).abs().max() > 1e-3
    assert (family.logits(hf.fold(model, policy)) - sharp).abs().max() < 1e-5


@pytest.mark.parametrize("family", TOWERS, ids=lambda f: f.name)
def test_inputs_are_made_for_every_part_of_a_model(family: Family) -> None:
    """Where a call of the whole model does not reach all layers, as without an image, its parts are called."""
    model = family.build()
    policy = constants(model)
    twin = hf.fold(model, policy)
    torch.manual_seed(3)
    images, tokens = torch.randn(1, 3, 8, 8), torch.randint(6, 97, (1, 9))
    sound = torch.randn(1, 4000)

    def outputs(one: Any) -> list[torch.Tensor]:
        if family.name == "wav2vec2":
            return [one(sound).last_hidden_state]
        if family.name == "clip":
            out = one(input_ids=tokens, pixel_values=images)
            return [out.image_embeds, out.text_embeds]
        return [one(input_ids=tokens).logits, one.model.vision_tower(images).last_hidden_state]

    with hf.applied(model, policy):
        sharp = outputs(model)
    for found, expected, plain in zip(outputs(twin), sharp, outputs(model), strict=True):
        assert (expected - plain).abs().max() > 1e-3
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    for name in ("llama", "bert", "whisper"):
        model = FAMILIES[name].build().to(dtype)
        assert hf.fold(model, constants(model)).dtype == dtype
    gentle = hf.fold(model, Constant(1.01))
    first = [one.model.encoder.layers[0].self_attn.q_proj.weight for one in (gentle, model)]
    assert not torch.equal(*first)


def test_a_bias_added_to_the_query_is_found_out_wherever_it_is() -> None:
    """Only the second layer has it, behind the projection that holds β."""
    model = FAMILIES["llama"].build()
    attention = model.model.layers[1].self_attn
    attention.q_proj.register_forward_hook(lambda module, args, out: out + 0.5)
    refused(model, "layer 1 of LlamaForCausalLM")
    assert hf.fold(model, PerHead.of(Constant, value=[[2.0] * 4, [1.0] * 4])) is not model


def test_queries_that_something_else_reads_too_are_found_out() -> None:
    """Each layer by itself is right; the model is not."""
    model = FAMILIES["llama"].build()

    def reads_queries(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        embedded = module.get_input_embeddings()(kwargs["input_ids"])
        out.logits = out.logits + 10 * module.model.layers[0].self_attn.q_proj(embedded).mean(-1, keepdim=True)
        return out

    model.register_forward_hook(reads_queries, with_kwargs=True)
    refused(model, "the folded LlamaForCausalLM is not the model with the policy applied")


def test_without_an_example_the_error_says_what_to_give() -> None:
    """A model that no input can be made for is refused, and says what to do."""
    model = FAMILIES["llama"].build()
    forward = model.forward

    def picky(input_ids: torch.Tensor, key: str = "", **kwargs: Any) -> Any:
        if key != "open":
            raise ValueError("no key")
        return forward(input_ids, **kwargs)

    model.forward = model.model.forward = picky
    refused(model, r"no example.*layer 0 of Llama.*one of 2 such layers.*no key.*example_inputs=")
    with pytest.raises(ArgumentError, match=r"example_inputs: got \['input_ids'\].*no key"):
        hf.fold(model, Constant(2.0), example_inputs={"input_ids": torch.arange(3, 20)[None]})


def test_examples_that_are_given_are_used() -> None:
    family = FAMILIES["llama"]
    model, seen = family.build(), []
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: seen.append(args[0]))
    ids = torch.arange(3, 20)[None]
    folded = hf.fold(model, Constant(2.0), example_inputs={"input_ids": ids})
    assert len(seen) == 3
    assert all(torch.equal(one, ids) for one in seen)
    assert (family.logits(folded) - family.logits(hf.apply(model, Constant(2.0)))).abs().max() < 1e-5


def test_nothing_else_changes() -> None:
    """Neither the state of the random generator nor the mode of any module, nor weights of layers left alone."""
    model = FAMILIES["gpt2"].build().train()
    model.transformer.h[0].eval()
    state = torch.get_rng_state()
    folded = hf.fold(model, PerHead.of(Constant, value=[[1.0] * 4, [2.0] * 4]))
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in folded.modules()] == [m.training for m in model.modules()]
    changed = {name for name, value in folded.state_dict().items() if not torch.equal(value, model.state_dict()[name])}
    assert changed == {"transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_attn.bias"}
    assert not any(m._forward_pre_hooks for m in folded.modules())
