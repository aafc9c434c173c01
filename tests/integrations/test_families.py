"""Every family that is proven: a policy of 1 changes nothing, a sharp one is what it says, row by row."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from sharpmax.errors import OutOfRangeWarning
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import install, modules_of, put
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER
from tests.integrations.families import FAMILIES, Family
from tests.integrations.oracle import by_hand

every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
decoders = pytest.mark.parametrize(
    "family", [f for f in FAMILIES.values() if f.kind in ("causal", "seq2seq")], ids=lambda f: f.name
)
CAUSAL = [(f, attention) for f in FAMILIES.values() if f.kind == "causal" for attention in f.attentions]


class One:
    """β = 1 by way of the statistics: no shortcut is taken."""

    heads = None

    def __init__(self, *needs: str) -> None:
        self.needs = frozenset(needs)

    def beta(self, stats: Any, remeasure: Any) -> torch.Tensor:
        values = [getattr(stats, name) for name in self.needs] or [stats.count]
        return torch.ones_like(values[0], dtype=torch.float32)


def mixture(model: Any) -> PerHead:
    """Another kind or another number in every head."""
    kinds: list[Policy] = [Constant(1.0), Constant(2.5), LogLength(3.0), PAPER, LogLength(2.0), EntropyTarget(0.7)]
    layers = len(modules_of(model))
    return PerHead(tuple(tuple(kinds[(layer + 3 * head) % 6] for head in range(4)) for layer in range(layers)))


@every_family
@pytest.mark.parametrize("needs", [(), ("count",), ("entropy",), ("entropy", "var")], ids=str)
def test_a_policy_of_one_changes_nothing(family: Family, needs: tuple[str, ...]) -> None:
    for attention in family.attentions:
        model = family.build(attention)
        plain = family.logits(model)
        install(model, lambda layer: [One(*needs)])
        assert (family.logits(model) - plain).abs().max() < 1e-5
        put(model, None)
        assert torch.equal(family.logits(model), plain)


@every_family
@pytest.mark.parametrize("policy", ["constant", "paper", "mixture"])
def test_a_sharp_policy_is_what_it_says(family: Family, policy: str) -> None:
    model = family.build().double()
    chosen = {"constant": Constant(2.0), "paper": PAPER, "mixture": mixture(model)}[policy]
    plain = family.logits(model)
    with by_hand(model, chosen):
        expected = family.logits(model)
    with hf.applied(model, chosen), warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRangeWarning)
        found = family.logits(model)
    assert (expected - plain).abs().max() > 1e-3
    # Gemma 2 has its softmax in float32 whatever the dtype; a solved target is met to 1e-6 nat.
    tolerance = 1e-5 if family.name == "gemma2" or policy == "mixture" else 1e-9
    assert (found - expected).abs().max() < tolerance


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_a_missing_mask_means(attention: str) -> None:
    """To sdpa a causal module without a mask is causal; eager attention sees every key then."""
    model = FAMILIES["llama"].build(attention).double()
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(2, 7, 32, dtype=torch.float64)
    positions = model.model.rotary_emb(hidden, torch.arange(7)[None])
    with by_hand(model, LogLength(3.0)):
        expected = layer(hidden, positions, attention_mask=None)[0]
    hf.apply(model, LogLength(3.0))
    assert (layer(hidden, positions, attention_mask=None)[0] - expected).abs().max() < 1e-6


@decoders
@pytest.mark.parametrize("policy", ["one", "mixture"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(family: Family, policy: str, cache: str) -> None:
    """Token by token what the whole sequence gives at once; with β = 1 what the model does as it comes."""
    model = family.build()
    inputs = family.inputs(model)
    ids = inputs["input_ids"]
    options: dict[str, Any] = {
        "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": cache,
        "attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, "output_logits": True,
        "disable_compile": True,
    }  # fmt: skip
    if policy == "one":
        plain = model.generate(ids, **options)
        install(model, lambda layer: [One("entropy")])
        out = model.generate(ids, **options)
        assert torch.equal(out.sequences, plain.sequences)
        assert (torch.stack(out.logits) - torch.stack(plain.logits)).abs().max() < 1e-5
        return
    hf.apply(model, mixture(model))
    out = model.generate(ids, **options)
    if family.kind == "seq2seq":
        whole = model(input_ids=ids, decoder_input_ids=out.sequences[:, :-1]).logits
    else:
        whole = model(input_ids=out.sequences[:, :-1]).logits
    assert (torch.stack(out.logits, 1) - whole[:, -6:]).abs().max() < 2e-4


@pytest.mark.parametrize(("family", "attention"), CAUSAL, ids=lambda x: getattr(x, "name", x))
def test_left_padding_is_not_seen(family: Family, attention: str) -> None:
    """n counts visible keys alone, so a padded prompt is what it is by itself."""
    model = family.build(attention)
    hf.apply(model, mixture(model))
    ids = family.inputs(model)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    # From absolute positions the model itself would tell a shifted prompt apart.
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    extra = {} if family.name == "opt" else {"position_ids": positions}
    both = model(input_ids=ids, attention_mask=mask, **extra).logits
    alone = model(input_ids=ids[1:, 5:]).logits
    assert (both[1:, 5:] - alone).abs().max() < 1e-4
    assert (both[:1] - model(input_ids=ids[:1]).logits).abs().max() < 1e-4


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.kind == "encoder"], ids=lambda f: f.name)
def test_padding_of_an_encoder_is_not_seen(family: Family) -> None:
    model = family.build()
    hf.apply(model, mixture(model))
    ids = family.inputs(model)["input_ids"]
    ids[1, 7:] = 0
    both = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
    alone = model(input_ids=ids[1:, :7]).logits
    assert (both[1:, :7] - alone).abs().max() < 1e-4


@every_family
def test_layers_are_numbered_in_their_order(family: Family) -> None:
    """A decoder's layers by their own index; all of an encoder–decoder model's attention modules one after another."""
    modules = modules_of(family.build())
    assert [one.heads for one in modules] == [4] * len(modules)
    if family.kind == "causal":
        assert [one.module.layer_idx for one in modules] == [0, 1]
    else:
        assert len(modules) == (6 if family.kind in ("seq2seq", "speech") else 2)
