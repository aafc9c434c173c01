"""A constant per head in the weights: the same model as with the policy applied, without sharpmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sharpmax.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import modules_of
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER
from tests.integrations.families import _LLAMA, FAMILIES, Family, transformers

PHI3 = Family("phi3", "Phi3ForCausalLM", "Phi3Config", _LLAMA)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _LLAMA)
SHARED_GAIN = ("qwen3", "gemma3")
NOT_FOLDABLE = ("gemma2", "t5")
PER_HEAD = [f for f in (*FAMILIES.values(), PHI3, OLMO2) if f.name not in (*SHARED_GAIN, *NOT_FOLDABLE)]


def constants(model: Any) -> PerHead:
    """Another β in every head of every layer, one of them 1."""
    layers = len(modules_of(model))
    return PerHead.of(Constant, value=[[0.5 + 0.5 * ((layer + h) % 5) for h in range(4)] for layer in range(layers)])


def weights(model: Any) -> list[torch.Tensor]:
    return [p.clone() for p in model.parameters()]


@pytest.mark.parametrize("family", PER_HEAD, ids=lambda f: f.name)
def test_a_folded_model_is_the_applied_one(family: Family) -> None:
    model = family.build()
    before, plain = weights(model), family.logits(model)
    policy = constants(model)
    with hf.applied(model, policy):
        sharp = family.logits(model)
    folded = hf.fold(model, policy)
    assert (sharp - plain).abs().max() > 1e-2
    assert (family.logits(folded) - sharp).abs().max() < 1e-5
    assert type(folded) is type(model)
    assert hf.policy_of(folded) is None
    assert folded.config._attn_implementation == model.config._attn_implementation
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


@pytest.mark.parametrize("options", [{"qk_layernorm": True}, {}], ids=str)
@pytest.mark.parametrize("name", [*SHARED_GAIN, "phi"])
def test_one_constant_per_layer_goes_into_the_gain(name: str, options: dict[str, Any]) -> None:
    family = FAMILIES[name]
    model = family.build(**options if name == "phi" else {})
    policy = PerHead.of(Constant, value=[[1.7] * 4, [0.6] * 4])
    sharp = family.logits(hf.apply(model, policy))
    folded = hf.fold(model, policy)
    assert hf.policy_of(model) == policy
    assert (family.logits(folded) - sharp).abs().max() < 1e-5
    assert (family.logits(hf.restore(model)) - sharp).abs().max() > 1e-2


@pytest.mark.parametrize("name", SHARED_GAIN)
def test_heads_that_share_a_gain_need_one_constant(name: str) -> None:
    model = FAMILIES[name].build()
    before = weights(model)
    with pytest.raises(UnsupportedError, match=r"one β per layer, β = 2 here") as caught:
        hf.fold(model, PerHead.of(Constant, value=[[1.0] * 4, [1.0, 4.0, 1.0, 4.0]]))
    assert "layer 1" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


@pytest.mark.parametrize(("name", "words"), [("gemma2", "softcap"), ("t5", "position bias")])
def test_logits_that_are_more_than_query_times_key_are_refused(name: str, words: str) -> None:
    model = FAMILIES[name].build()
    with pytest.raises(UnsupportedError, match=words):
        hf.fold(model, Constant(2.0))
    unchanged = hf.fold(model, Constant(1.0))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(unchanged), strict=True))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (LogLength(8.0), r"row \(count\).*nearest_constant.*β = 2 at length 64"),
        (PerHead.of(LogLength, reference=[[8.0, 8.0, 64.0, 64.0]] * 2), "β = 1 … 2 at length 64"),
        (PAPER, r"row \(entropy\).*--foldable"),
        (PerHead(((Constant(2.0), PAPER, LogLength(8.0), Constant(1.0)),) * 2), "--foldable"),
    ],
)
def test_a_policy_that_depends_on_the_row_is_refused_with_the_nearest(policy: Policy, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        hf.fold(FAMILIES["llama"].build(), policy)
    assert "\n" not in str(caught.value)


def test_any_policy_that_reads_nothing_of_the_row_is_a_constant() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    policy = PerHead.of(LogLinear, level=[[0.5, 0.0, -0.3, 1.0], [0.0] * 4])
    folded = hf.fold(model, policy)
    assert (family.logits(folded) - family.logits(hf.apply(model, policy))).abs().max() < 1e-5


def test_the_nearest_constant_is_the_policy_at_that_length() -> None:
    assert hf.nearest_constant(LogLength(8.0), 64) == Constant(2.0)
    grid = PerHead.of(LogLength, reference=[[8.0, 64.0]])
    assert hf.nearest_constant(grid, 64) == PerHead.of(Constant, value=[[2.0, 1.0]])
    assert hf.nearest_constant(Constant(3.0), 5) == Constant(3.0)
    with pytest.raises(UnsupportedError, match=r"entropy.*--foldable"):
        hf.nearest_constant(PAPER, 64)
    with pytest.raises(ArgumentError, match="length"):
        hf.nearest_constant(PAPER, 0)
    with pytest.raises(ArgumentTypeError, match="length"):
        hf.nearest_constant(PAPER, 1.5)  # type: ignore[arg-type]


def test_queries_that_come_from_elsewhere_are_refused() -> None:
    model = FAMILIES["llama"].build()
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Linear(32, 64, bias=False)  # as where a gate is made along with the queries
    with pytest.raises(UnsupportedError, match="layer 0 of LlamaForCausalLM"):
        hf.fold(model, Constant(2.0))
    attention.q_proj = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(UnsupportedError, match=r"Sequential.*without adapters"):
        hf.fold(model, Constant(2.0))
    attention.q_proj, attention.some_norm = torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)
    with pytest.raises(UnsupportedError, match="some_norm"):
        hf.fold(model, Constant(2.0))


def test_a_folded_model_is_marked(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    model = family.build()
    folded = hf.fold(model, constants(model))
    folded.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(family.logits(again), family.logits(folded))
    for twice in (folded, again):
        with pytest.raises(ArgumentError, match="already holds a policy: 2 layers × 4 heads"):
            hf.fold(twice, Constant(2.0))
