"""Every family that is proven against attention written out by hand, and known ways to get it wrong."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sharpmax.errors import MissingExtraError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.attention import sharp_attention
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER
from tests.integrations.families import FAMILIES, LENGTH, LLAMA, Family, transformers
from tests.integrations.oracle import by_hand

pytestmark = pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
EVERY = [
    *((family, family.attentions[0], "constant") for family in FAMILIES.values()),
    *((family, attention, "mixture") for family in FAMILIES.values() for attention in family.attentions),
]


def mixture(model: Any) -> PerHead:
    """Another kind or another number in every head."""
    kinds: list[Policy] = [Constant(1.0), Constant(2.5), LogLength(3.0), PAPER, LogLength(2.0), EntropyTarget(0.7)]
    layers = len(modules_of(model))
    return PerHead(tuple(tuple(kinds[(layer + 3 * head) % 6] for head in range(4)) for layer in range(layers)))


@pytest.mark.parametrize(("family", "attention", "policy"), EVERY, ids=lambda x: getattr(x, "name", x))
def test_a_sharp_policy_is_what_it_says(family: Family, attention: str, policy: str) -> None:
    """A mixture gets padding too, which no row counts; without the policy nothing of it is left."""
    model = family.build(attention)
    if attention == "sdpa":  # eager attention has its softmax in float32 whatever the dtype
        model.double()
    modules, inputs, real = modules_of(model), family.inputs(model), torch.ones(2, LENGTH, dtype=torch.bool)
    assert [one.heads for one in modules] == [4] * (6 if family.kind in ("seq2seq", "speech") else 2)
    if family.kind == "causal":
        assert [one.module.layer_idx for one in modules] == [0, 1]
    chosen = Constant(2.0) if policy == "constant" else mixture(model)
    rows: Any = slice(None)
    if policy == "mixture" and family.kind in ("causal", "encoder"):
        real[1, slice(5) if family.kind == "causal" else slice(7, None)] = False
        inputs, rows = {**inputs, "attention_mask": real.long()}, real
    plain = family.logits(model, **inputs)
    with by_hand(model, chosen):
        expected = family.logits(model, **inputs)
    with hf.applied(model, chosen):
        found = family.logits(model, **inputs)
    assert (expected - plain)[rows].abs().max() > 1e-3
    # A solved target is met to 1e-6 nat.
    tolerance = 1e-4 if attention == "eager" else 1e-5 if policy == "mixture" else 1e-9
    assert (found - expected)[rows].abs().max() < tolerance
    assert torch.equal(family.logits(model, **inputs), plain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_a_missing_mask_means(attention: str) -> None:
    """To sdpa a causal module without a mask is causal; eager attention sees every key then."""
    model = LLAMA.build(attention).double()
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(2, 7, 32, dtype=torch.float64)
    positions = model.model.rotary_emb(hidden, torch.arange(7)[None])
    with by_hand(model, LogLength(3.0)):
        expected = layer(hidden, positions, attention_mask=None)[0]
    hf.apply(model, LogLength(3.0))
    assert (layer(hidden, positions, attention_mask=None)[0] - expected).abs().max() < 1e-6


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt2", "gpt_neox", "mistral", "t5"])
def test_generation(name: str, cache: str) -> None:
    """Decoding token by token has the logits of one pass over the whole sequence."""
    family = FAMILIES[name]
    model = family.build()
    ids = family.inputs(model)["input_ids"]
    options: dict[str, Any] = {
        "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": cache,
        "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, "output_logits": True,
        "disable_compile": True,
    }  # fmt: skip
    hf.apply(model, mixture(model))
    out = model.generate(ids, **options)
    made = out.sequences[:, :-1]
    inputs = {"input_ids": ids, "decoder_input_ids": made} if family.kind == "seq2seq" else {"input_ids": made}
    assert (torch.stack(out.logits, 1) - model(**inputs).logits[:, -6:]).abs().max() < 2e-4


def test_nothing_is_patched() -> None:
    before = (F.softmax, F.scaled_dot_product_attention, dict(vars(transformers.LlamaForCausalLM)))
    functions = dict(transformers.AttentionInterface._global_mapping)
    with hf.applied(LLAMA.build(), PAPER):
        assert (F.softmax, F.scaled_dot_product_attention, dict(vars(transformers.LlamaForCausalLM))) == before
        registered = transformers.AttentionInterface._global_mapping
        assert {name: registered[name] for name in functions} == functions


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'accelerate>=1\.10' .* 'transformers>="):
        hf.apply(object(), "paper")  # type: ignore[type-var]


@pytest.mark.parametrize("beta", [3.0, 1e39])
@pytest.mark.parametrize(
    ("family", "attention"),
    [(FAMILIES[name], attention) for name in ("t5", "gemma2", "whisper") for attention in FAMILIES[name].attentions],
    ids=lambda x: getattr(x, "name", x),
)
def test_float16_has_room_for_every_beta(family: Family, beta: float, attention: str) -> None:
    model = family.build(attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "relative_attention_bias" in name:
                weight.mul_(400.0)  # up to about 300: times 1e4 beyond the range of float16
    # What float32 makes of the same weights; hard attention magnifies rounding, so inputs are rounded alike.
    model = hf.apply(model.half().float(), Constant(beta))
    inputs = family.inputs(model, length=6)
    with torch.no_grad():
        expected = family.logits(model, **inputs)
        halves = {key: x.half() if x.is_floating_point() else x for key, x in inputs.items()}
        found = family.logits(model.half(), **halves)
    assert bool(found.isfinite().all())
    if beta < 10:
        assert torch.allclose(found.float(), expected, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("beta", [1.5, 20.0, 1e39])
def test_float16_bias_is_multiplied_exactly(beta: float, attention: str) -> None:
    """T5's attention itself, against float64 on the same rounded inputs."""
    model = hf.apply(FAMILIES["t5"].build(attention).half(), Constant(beta))
    module = model.encoder.block[0].layer[0].SelfAttention
    rng = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 6, 8, generator=rng).half() for _ in range(3))
    bias = (torch.randn(1, 4, 6, 6, generator=rng) * 4000.0).half()
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 4:] = False
    given = mask if attention == "sdpa" else torch.zeros(mask.shape).half().masked_fill(~mask, -65504.0)
    out, _ = sharp_attention(module, query, key, value, given, scaling=1.0, position_bias=bias)
    s = (query.double() @ key.double().mT + bias.double()).masked_fill(~mask, -torch.inf)
    weights = (beta * (s - s.amax(-1, keepdim=True))).exp()
    expected = (weights / weights.sum(-1, keepdim=True) @ value.double()).transpose(1, 2)
    assert out.dtype == torch.float16
    assert torch.allclose(out.double(), expected, atol=2e-3)
