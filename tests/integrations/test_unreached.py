"""Modules that attend without transformers' attention interface are named and refused, or left out on request."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sharpmax
from sharpmax.errors import UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.integrations.transformers.support import check_all_reached
from sharpmax.policies.basic import Constant
from sharpmax.policies.per_head import PerHead
from tests.integrations.families import _LLAMA, _SMALL, _VIT, FAMILIES, Family, transformers
from tests.integrations.oracle import by_hand

TOWER = {**_VIT, "hidden_size": 64}  # BridgeTower's heads have 64 features
BRIDGE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "text_config": {**_SMALL, "hidden_size": 64}, "vision_config": {**TOWER, "model_type": "bridgetower_vision_model"},
}  # fmt: skip
GEMMA3 = {
    "text_config": {**_LLAMA, "head_dim": 8}, "vision_config": _VIT, "mm_tokens_per_image": 4, "image_token_index": 5,
}  # fmt: skip
SIGLIP = Family("siglip", "SiglipVisionModel", "SiglipVisionConfig", _VIT, "image")
UNREACHED = [
    (SIGLIP, r"head\.attention \(MultiheadAttention\)"),
    (Family("siglip2", "Siglip2VisionModel", "Siglip2VisionConfig", {**_VIT, "num_patches": 16}), r"head\.attention"),
    (Family("bridgetower", "BridgeTowerModel", "BridgeTowerConfig", BRIDGE), r"vision_model.*\(MultiheadAttention\)"),
    (Family("gemma3", "Gemma3ForConditionalGeneration", "Gemma3Config", GEMMA3), r"vision_tower.*head\.attention"),
]


@pytest.mark.parametrize(("family", "words"), UNREACHED, ids=lambda value: getattr(value, "name", ""))
def test_a_module_of_torch_is_refused_by_name(family: Family, words: str) -> None:
    model = family.build()
    before = {name: vars(part).copy() for name, part in model.named_modules()}
    with pytest.raises(UnsupportedError, match=words) as caught:
        hf.apply(model, Constant(2.0))
    assert "skip_unsupported=True" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert repr({name: vars(part) for name, part in model.named_modules()}) == repr(before)
    hf.apply(model, Constant(2.0), skip_unsupported=True)
    assert hf.policy_of(model) == Constant(2.0)


def test_what_is_left_out_keeps_its_temperature_and_nothing_else_does() -> None:
    model = SIGLIP.build().double()
    inputs = SIGLIP.inputs(model)
    grid = PerHead.of(Constant, value=[[2.0, 1.0, 3.0, 0.5]] * 2)
    for policy in (Constant(2.0), grid):
        with by_hand(model, policy):
            expected = model(**inputs)
        with hf.applied(model, policy, skip_unsupported=True):
            found = model(**inputs)
        assert (found.last_hidden_state - expected.last_hidden_state).abs().max() < 1e-9
        assert (found.pooler_output - expected.pooler_output).abs().max() < 1e-9
        folded = hf.fold(model, policy, skip_unsupported=True)(**inputs)
        assert (folded.pooler_output - expected.pooler_output).abs().max() < 1e-9


def test_leaving_out_is_asked_for_every_time_a_policy_goes_in() -> None:
    model = SIGLIP.build()
    hf.apply(model, Constant(2.0), skip_unsupported=True)
    for again in (lambda: hf.apply(model, Constant(3.0)), lambda: hf.fold(model, Constant(3.0))):
        with pytest.raises(UnsupportedError, match=r"head\.attention"):
            again()
    assert hf.policy_of(model) == Constant(2.0)


def test_what_is_measured_is_refused_or_left_out_likewise() -> None:
    model = SIGLIP.build()
    with pytest.raises(UnsupportedError, match=r"head\.attention.*None"), sharpmax.capture(model):
        pass
    with hf.applied(model, None, skip_unsupported=True), sharpmax.capture(model) as seen:
        model(**SIGLIP.inputs(model))
    assert [call.layer for call in seen.calls] == [0, 1]


class Looks(nn.Module):
    """Attention written out under a name that says nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(-1, -2), dim=-1) @ x


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bij,bjd->bid", self.weigh(torch.einsum("bid,bjd->bij", x, x)), x)


class Fused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def weighted(x: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(x, x.mT).softmax(-1), x)


class Delegates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return weighted(x)


class Inherits(nn.MultiheadAttention):
    pass


class Routes(nn.Module):
    """One product and a softmax: no attention."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.new_ones(x.shape[-1], 3), dim=-1)


BY_HAND: list[Callable[[], nn.Module]] = [
    Looks, Mixes, Fused, Delegates, lambda: Inherits(32, 4), lambda: nn.TransformerEncoderLayer(32, 4, 32),
    lambda: nn.Sequential(nn.Linear(32, 32), nn.TransformerDecoderLayer(32, 4, 32)),
]  # fmt: skip


@pytest.mark.parametrize("make", BY_HAND)
def test_attention_written_out_is_refused_under_any_name(make: Callable[[], nn.Module]) -> None:
    model = FAMILIES["llama"].build()
    model.model.layers[1].mlp.extra = make()
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1\.mlp\.extra"):
        hf.apply(model, "paper")
    assert len(modules_of(hf.apply(model, "paper", skip_unsupported=True))) == 2


def test_many_modules_are_counted() -> None:
    model = FAMILIES["llama"].build()
    model.model.extra = nn.ModuleList(Looks() for _ in range(7))
    with pytest.raises(UnsupportedError, match=r"model\.extra\.0 \(Looks\).*model\.extra\.3 \(Looks\) and 3 more"):
        check_all_reached(model)


def test_a_softmax_alone_is_no_attention() -> None:
    model = FAMILIES["llama"].build()
    model.model.extra = Routes()
    assert len(modules_of(model)) == 2
    moe = transformers.MixtralForCausalLM(transformers.MixtralConfig(**_LLAMA, num_local_experts=2))
    assert len(modules_of(moe)) == 2


def test_a_model_with_nothing_within_reach_is_refused_all_the_same() -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(UnsupportedError, match=r"Bloom.*no attention layer"):
        hf.apply(transformers.BloomForCausalLM(config), "paper", skip_unsupported=True)
