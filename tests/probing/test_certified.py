"""Certificates against whatever random texts, gradient ascent and whole vocabularies can make of tiny models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import ArgumentError, UnsupportedError
from sharpmax.integrations.transformers import interface, projections
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.probing.capture import capture
from sharpmax.probing.certified import FAMILIES as CERTIFIED
from sharpmax.probing.certified import Certificate, beta_ceiling, certify
from sharpmax.stats.statistics import RowStats
from tests.integrations.families import FAMILIES
from tests.probing.ascent import furthest

NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "gpt_neox", "gpt2", "opt", "t5", "bert",
    "roberta",
)  # fmt: skip
# Float32 rounds the logits that are measured.
ROUNDING = 1 + 1e-5


def build(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    return family.build("eager" if "eager" in family.attentions else None, **changes).requires_grad_(False)


def spreads(model: Any, inputs: Any) -> Tensor:
    """The largest spread `[layers, heads]` of any row."""
    with torch.no_grad(), capture(model, rows="all") as seen:
        model(**inputs)
    layers = sorted({call.layer for call in seen.calls})
    return torch.stack([seen.of_layer(n)[-1].statistics["spread"].amax((0, 2)) for n in layers])


def table(certificate: Certificate, name: str | None = None) -> Tensor:
    """What a certificate says `[layers, heads]`, or what one of its arguments does."""
    rows = [certificate.of_layer(n) for n in range(certificate.layers)]
    return torch.tensor([[one.spread if name is None else one.bounds[name] for one in row] for row in rows])


def test_every_family_is_tried() -> None:
    assert {build(name).config.model_type for name in NAMES} == set(CERTIFIED)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_spreads_further(name: str) -> None:
    family, model = FAMILIES[name], build(name)
    certificate = certify(model)
    torch.manual_seed(0)
    seen = spreads(model, {key: torch.randint(3, 97, (64, 40)) for key in family.inputs(model)})
    assert (seen <= table(certificate) * ROUNDING).all()
    assert [(one.layer, one.head) for one in certificate.heads] == list(_places(seen))


def _places(seen: Tensor) -> Any:
    return ((layer, head) for layer in range(len(seen)) for head in range(seen.shape[1]))


@pytest.mark.parametrize(
    ("name", "layer"),
    [("llama", 0), ("qwen3", 1), ("gemma2", 1), ("phi", 1), ("gpt2", 1), ("opt", 0), ("t5", 1), ("bert", 0)],
)
def test_no_free_input_spreads_further_and_some_come_close(name: str, layer: int) -> None:
    """Ascent on what goes into the normalisation, past every other layer: the bounds of the ball are about that."""
    model = build(name)
    found = furthest(FAMILIES[name], model, layer)
    certificate = certify(model)
    for argument in ("norms", "blocks"):
        assert (found <= table(certificate, argument)[layer] * ROUNDING).all()
    # Ten neighbouring positions turn queries and keys by a few angles only.
    smallest = table(certificate, "cap" if "cap" in certificate.heads[0].bounds else "blocks")[layer]
    assert (found / smallest).median() > 0.6
    assert (found / smallest).max() > (0.9 if name in ("gpt2", "opt", "t5", "bert", "roberta", "gemma2") else 0.7)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "t5"])
def test_the_whole_vocabulary(name: str) -> None:
    """Every token asks every other, in the first layer: nothing passes the certificate, and most of it is used."""
    family, model = FAMILIES[name], build(name, **({"sliding_window": None} if name == "mistral" else {}))
    certificate = certify(model)
    tokens = torch.arange(97)
    # The positions at which the others stand are those of a text, so that angles are few.
    ids = torch.cat((tokens.expand(97, -1), tokens[:, None]), 1)
    inputs = {"input_ids": ids}
    if family.kind == "seq2seq":
        inputs["decoder_input_ids"] = ids[:, -2:]
    found, bound = spreads(model, inputs)[0], table(certificate)[0]
    assert (found <= bound * ROUNDING).all()
    assert (found / bound).median() > (0.95 if name == "t5" else 0.3)
    assert {one.by for one in certificate.of_layer(0)} == ({"cap"} if name == "gemma2" else {"vocabulary"})


def test_the_horizon_is_where_no_key_holds_the_mass() -> None:
    """Small weights make a certificate informative; texts made by brute force at that length obey it."""
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(0.05)
    certificate = certify(model, mass=0.4)
    informative = certificate.informative
    assert informative
    head = min(informative, key=lambda one: one.log10_tokens)
    assert head.tokens is not None
    assert head.tokens == math.floor(1 + math.exp(head.spread) * 0.6 / 0.4)
    assert 2 < head.tokens < 640
    torch.manual_seed(0)
    ids = torch.randint(3, 97, (64, head.tokens + 1))
    with torch.no_grad(), capture(model) as seen:
        model(input_ids=ids)
    assert seen.of_layer(head.layer)[-1].statistics["top"][:, head.head].max() < 0.4
    assert all(one.tokens is None for one in certificate.heads if not one.informative)


def test_a_horizon_beyond_reach_is_vacuous() -> None:
    certificate = certify(build("llama"))
    assert certificate.context == 64
    assert all(one.reach == 640 for one in certificate.heads)
    assert all(one.informative == (one.log10_tokens <= math.log10(640)) for one in certificate.heads)
    assert not all(one.informative for one in certificate.heads)
    # A sliding window shows no more keys than it has; learned positions end where their table does.
    assert all(one.reach == 5 for one in certify(build("mistral")).heads)
    gemma = certify(build("gemma3"))
    assert [one.reach for one in gemma.heads] == [5] * 4 + [640] * 4
    assert all(one.reach == 64 for one in certify(build("gpt2")).heads)
    # The number of tokens may leave float64; its logarithm does not.
    model = build("llama")
    model.model.layers[1].self_attn.q_proj.weight.mul_(1e4)
    worst = max(certify(model).heads, key=lambda one: one.spread)
    assert worst.spread > 1e4
    assert worst.log10_tokens == pytest.approx(worst.spread / math.log(10.0), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "bert"])
def test_factors_that_cancel_do_not_count(name: str) -> None:
    """Twice the queries and half the keys give the same logits."""
    model = build(name)
    before = table(certify(model))
    for one in interface.modules_of(model):
        for part, factor in zip(projections.projections(one, ""), (2.0, 0.5), strict=True):
            columns = not isinstance(part.layer, torch.nn.Linear)
            for tensor in (part.layer.weight.T if columns else part.layer.weight, part.layer.bias):
                if tensor is not None:
                    tensor[part.rows.flatten()] *= factor
    torch.testing.assert_close(table(certify(model)), before, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("name", ["qwen2", "phi"])
def test_what_all_keys_share_counts_where_positions_turn_it(name: str) -> None:
    model = build(name)
    before = table(certify(model), "blocks")
    for one in interface.modules_of(model):
        keys = projections.projections(one, "")[1]
        keys.layer.bias[keys.rows.flatten()] += 10.0 * torch.randn(keys.rows.numel())
    after = certify(model)
    found = furthest(FAMILIES[name], model, 1)
    assert (found > before[1]).any()
    assert (found <= table(after, "blocks")[1] * ROUNDING).all()
    ids = torch.randint(3, 97, (32, 40))
    assert (spreads(model, {"input_ids": ids}) <= table(after) * ROUNDING).all()


def test_rotation_that_also_scales_is_counted() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    plain, scaled = build("llama"), build("llama", rope_parameters=yarn)
    factor = scaled.model.rotary_emb.attention_scaling
    assert factor > 1.1
    torch.testing.assert_close(table(certify(scaled)), table(certify(plain)) * factor**2, rtol=1e-6, atol=0.0)
    inputs = {"input_ids": torch.randint(3, 97, (16, 40))}
    assert (spreads(scaled, inputs) <= table(certify(scaled)) * ROUNDING).all()


def test_a_cap_is_counted_where_it_is_applied() -> None:
    """Eager attention caps the logits of Gemma 2 at 5; any other attention would leave that out."""
    capped = certify(build("gemma2"))
    assert all(one.by == "cap" and one.spread <= 10.0 * ROUNDING for one in capped.heads)
    model = build("gemma2")
    model.config._attn_implementation_internal = "sdpa"
    free = certify(model)
    assert all("cap" not in one.bounds for one in free.heads)
    assert (table(free) > 10.0).any()


def test_biases_by_distance_are_added() -> None:
    model = build("t5")
    before = certify(model)
    for stack in (model.encoder, model.decoder):
        stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight[3, 1] += 40.0
    after = certify(model)
    rise = table(after) - table(before)
    # Encoder layers, then self- and cross-attention of each decoder layer: the last has no bias.
    assert (rise[[0, 1, 2, 4], 1] > 30.0).all()
    assert rise[[3, 5]].abs().max() == 0.0
    assert rise[:, [0, 2, 3]].abs().max() == 0.0
    ids = torch.randint(3, 97, (16, 30))
    assert (spreads(model, {"input_ids": ids, "decoder_input_ids": ids}) <= table(after) * ROUNDING).all()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_policy_multiplies_what_is_certain(name: str) -> None:
    model = build(name)
    before = certify(model)
    layers = before.layers
    values = [[0.5 + 0.25 * (i + j) for j in range(4)] for i in range(layers)]
    ids = torch.randint(3, 97, (16, 30))
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if name == "t5" else {})
    with sm.applied(model, PerHead.of(Constant, value=values)):
        after = certify(model)
        torch.testing.assert_close(table(after), table(before) * torch.tensor(values), rtol=1e-6, atol=0.0)
        assert (spreads(model, inputs) <= table(after) * ROUNDING).all()
        assert after.policy is not None
    for policy, factor in ((EntropyTarget(0.3, ceiling=3.0), 3.0), (LogLinear(entropy=4.0, ceiling=2.0), 2.0)):
        with sm.applied(model, policy):
            torch.testing.assert_close(table(certify(model)), table(before) * factor, rtol=1e-6, atol=0.0)
            assert (spreads(model, inputs) <= table(certify(model)) * ROUNDING).all()
    with sm.applied(model, LogLength(16)), pytest.raises(UnsupportedError, match=r"^policy: .* has no largest β"):
        certify(model)
    assert certify(model) == before


@pytest.mark.parametrize(
    ("name", "changes", "mass", "says"),
    [
        ("modernbert", {}, 0.5, "^model: no certificate is known for the family 'modernbert'; allowed: .*llama"),
        ("vit", {}, 0.5, "^model: no certificate is known for the family 'vit'"),
        ("opt", {"do_layer_norm_before": False}, 0.5, "^model: this opt normalises after attention"),
        (
            "gpt2",
            {"add_cross_attention": True},
            0.5,
            "^model: where the keys of layer 1 of gpt2 come from is not known",
        ),
        *(("llama", {}, mass, "^mass: got") for mass in (0.0, 1.0, math.nan, "half")),
    ],
)
def test_what_is_refused_by_name(name: str, changes: dict[str, Any], mass: Any, says: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=says):
        certify(build(name, **changes), mass)


def test_the_model_is_unchanged_and_progress_reported() -> None:
    model = build("gemma3")
    before = [weight.clone() for weight in model.parameters()]
    steps: list[tuple[int, int]] = []
    certify(model, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(0, 2), (1, 2)]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.config._attn_implementation == "eager"


def many_rows() -> RowStats:
    """Rows of every entropy between 0 and ln n, for n up to a billion."""
    n = torch.logspace(1, 9, 40, dtype=torch.float64)[:, None].expand(40, 400)
    entropy = torch.linspace(1e-6, 1.0, 400, dtype=torch.float64) * n.log()
    top = torch.exp(-entropy)
    lse = -top.log()
    return RowStats(n, torch.zeros_like(n), lse, lse - entropy, torch.ones_like(n))


@pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
@pytest.mark.parametrize(
    "policy",
    [
        PAPER,
        Constant(0.7),
        Constant(3.0),
        Curve((0.5, 2.0, 4.0), (0.5, 1.0, 1.7)),
        Curve((0.5, 2.0), (1.5, 0.2)),
        LogLinear(level=-0.4),
        LogLinear(level=9.0),
        LogLinear(length=0.5, ceiling=4.0),
        Polynomial((0.3, 0.5), (0.5, 4.0)),
        Polynomial((-1.0, 4.0, -2.0), (0.5, 4.0)),
        Polynomial((-1.0, 4.0, -2.0), (0.5, 1.5)),
        Polynomial((0.2,), (0.5, 4.0), outside_is="extrapolate"),
    ],
    ids=lambda policy: policy.describe(),
)
def test_no_row_exceeds_the_ceiling_and_some_reach_it(policy: Any) -> None:
    beta = float(policy.beta(many_rows()).max())
    assert beta <= beta_ceiling(policy) * (1 + 1e-12)
    assert beta >= beta_ceiling(policy) * (1 - 1e-3)


@pytest.mark.parametrize(
    "policy", [LogLength(16), Polynomial((0.1, 1.0), (0.5, 4.0), outside_is="extrapolate")], ids=lambda one: one.kind
)
def test_a_policy_without_a_ceiling_is_refused(policy: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"^policy: β = .* certified; allowed: policies with a ceiling"):
        beta_ceiling(policy)
