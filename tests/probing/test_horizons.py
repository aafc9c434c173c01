"""Certificates against whatever random texts and gradient ascent can make of tiny models; measured horizons."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import ArgumentError, UnsupportedError
from sharpmax.policies.basic import Constant, Curve, LogLength, PerFrequency
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.probing import horizons
from sharpmax.probing.capture import capture
from sharpmax.probing.horizons import Certificate, beta_ceiling, certify, measure_horizons
from sharpmax.probing.measurement import task_inputs
from sharpmax.stats.statistics import RowStats
from tests.experiments.evaluate import tiny
from tests.integrations.families import FAMILIES

# Float32 rounds the logits that are measured.
ROUNDING = 1 + 1e-5
INPUTS = {"input_ids": torch.randint(3, 97, (32, 40), generator=torch.Generator().manual_seed(0))}


def build(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    return family.build("eager" if "eager" in family.attentions else None, **changes).requires_grad_(False)


def spreads(model: Any) -> Tensor:
    """The largest spread `[layers, heads]` of any row."""
    with torch.no_grad(), capture(model, rows="all") as seen:
        model(**INPUTS)
    return torch.stack([call.statistics["spread"].amax((0, 2)) for call in seen.calls])


def table(certificate: Certificate) -> Tensor:
    """The certified spreads `[layers, heads]`."""
    return torch.tensor([one.spread for one in certificate.heads]).view(2, 4)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"])
def test_no_text_spreads_further(name: str) -> None:
    model = build(name)
    certificate = certify(model)
    seen = spreads(model)
    assert (seen <= table(certificate) * ROUNDING).all()
    assert [(one.layer, one.head) for one in certificate.heads] == list(itertools.product(range(2), range(4)))


def furthest(model: Any, layer: int, length: int = 10, steps: int = 60) -> Tensor:
    """The largest spread `[heads]` that ascent finds in a layer if whatever is normalised before it is free.

    Sequence h of a batch is made for head h; the last row sees all of them. Logits differ as the logarithms of the
    weights do that eager attention returns.
    """
    model, heads = model.double(), model.config.num_attention_heads
    free = torch.randn(heads, length, model.config.hidden_size, generator=torch.Generator().manual_seed(3)).double()
    free.requires_grad_()
    norm = model.model.layers[layer].input_layernorm
    handle = norm.register_forward_pre_hook(lambda module, args: (free,))
    optimiser, best = torch.optim.Adam([free], lr=0.1), torch.zeros(heads).double()
    for _ in range(steps):
        weights = model(torch.full((heads, length), 5), output_attentions=True).attentions[layer]
        rows = torch.stack([weights[head, head, -1] for head in range(heads)]).log()
        spread = rows.amax(-1) - rows.amin(-1)
        best = torch.maximum(best, spread.detach())
        optimiser.zero_grad()
        (-spread.sum()).backward()
        optimiser.step()
    handle.remove()
    return best


@pytest.mark.parametrize(("name", "layer"), [("llama", 0), ("qwen3", 1), ("gemma2", 1)])
def test_no_free_input_spreads_further_and_some_come_close(name: str, layer: int) -> None:
    """Ascent on what goes into the normalisation, past every other layer: the bounds of the ball are about that."""
    model = sm.apply(build(name), Constant(0.5))  # eager attention has no weights under e⁻¹⁰³
    found = furthest(model, layer)
    bound = table(certify(model))[layer]
    assert (found <= bound * ROUNDING).all()
    # The logits of Gemma 2 are capped besides.
    assert (found / bound).median() > 0.5


def test_the_horizon_is_where_no_key_holds_the_mass() -> None:
    """Small weights make a certificate informative; texts made by brute force at that length obey it."""
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(0.05)
    certificate = certify(model, mass=0.4)
    head = min(certificate.heads, key=lambda one: one.log10_tokens)
    assert head.tokens is not None
    assert head.tokens == math.floor(1 + math.exp(head.spread) * 0.6 / 0.4)
    assert 2 < head.tokens < 640
    torch.manual_seed(0)
    ids = torch.randint(3, 97, (64, head.tokens + 1))
    with torch.no_grad(), capture(model) as seen:
        model(input_ids=ids)
    assert seen.calls[head.layer].statistics["top"][:, head.head].max() < 0.4
    assert all(one.tokens is None for one in certificate.heads if not one.informative)


def test_a_horizon_beyond_reach_is_vacuous() -> None:
    model = build("llama")
    certificate = certify(model)
    assert certificate.context == 64
    assert all(one.reach == 640 for one in certificate.heads)
    assert all(one.informative == (one.log10_tokens <= math.log10(640)) for one in certificate.heads)
    assert not all(one.informative for one in certificate.heads)
    # A sliding window shows no more keys than it has.
    assert all(one.reach == 5 for one in certify(build("mistral")).heads)
    assert [one.reach for one in certify(build("gemma3")).heads] == [5] * 4 + [640] * 4
    # The number of tokens may leave float64; its logarithm does not.
    model.model.layers[1].self_attn.q_proj.weight.mul_(1e4)
    worst = max(certify(model).heads, key=lambda one: one.spread)
    assert worst.spread > 1e4
    assert worst.log10_tokens == pytest.approx(worst.spread / math.log(10.0), rel=1e-6)


def test_rotation_that_also_scales_is_counted() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    plain, scaled = build("llama"), build("llama", rope_parameters=yarn)
    factor = scaled.model.rotary_emb.attention_scaling
    assert factor > 1.1
    torch.testing.assert_close(table(certify(scaled)), table(certify(plain)) * factor**2, rtol=1e-6, atol=0.0)
    assert (spreads(scaled) <= table(certify(scaled)) * ROUNDING).all()


def test_a_policy_multiplies_what_is_certain() -> None:
    model = build("llama")
    before = certify(model)
    values = [[0.5 + 0.25 * (i + j) for j in range(4)] for i in range(2)]
    for policy, factor in (
        (PerHead.of(Constant, value=values), torch.tensor(values)),
        (EntropyTarget(0.3, ceiling=3.0), 3.0),
        (LogLinear(entropy=4.0, ceiling=2.0), 2.0),
        (PerFrequency((0.5, 2.5, 1.0, 0.0)), 2.5),
    ):
        with sm.applied(model, policy):
            torch.testing.assert_close(table(certify(model)), table(before) * factor, rtol=1e-6, atol=0.0)
            assert (spreads(model) <= table(certify(model)) * ROUNDING).all()
    with sm.applied(model, LogLength(16)), pytest.raises(UnsupportedError, match=r"^policy: .* has no largest β"):
        certify(model)
    assert certify(model) == before


def test_a_family_or_a_normalisation_without_a_bound_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"^model: horizons of the family 'gpt2' cannot be certified; .*llama"):
        certify(build("gpt2"))
    model = build("llama")
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(32)
    with pytest.raises(UnsupportedError, match="layer 1 of llama has a normalisation LayerNorm, for which"):
        certify(model)


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
        Curve((0.5, 2.0, 4.0), (0.5, 1.0, 1.7)),
        LogLinear(length=0.5, ceiling=4.0),
        Polynomial((0.3, 0.5), (0.5, 4.0)),
        Polynomial((-1.0, 4.0, -2.0), (0.5, 4.0)),
        Polynomial((0.2,), (0.5, 4.0), outside_is="extrapolate"),
    ],
    ids=lambda policy: policy.describe(),
)
def test_no_row_exceeds_the_ceiling_and_some_reach_it(policy: Any) -> None:
    beta = float(policy.beta(many_rows()).max())
    assert beta <= beta_ceiling(policy) * (1 + 1e-12)
    assert beta >= beta_ceiling(policy) * (1 - 1e-3)


def test_a_model_is_measured_as_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spread, the lengths and where the top weight falls under the mass: the last rows captured again by hand."""
    monkeypatch.setattr(horizons, "LONGEST", 300)
    model, tokenizer, steps = tiny.model(), tiny.tokenizer(), list[tuple[int, int]]()
    found = measure_horizons(model, tokenizer, 0.3, seed=4, progress=lambda *one: steps.append(one))
    assert [(one.layer, one.head) for one in found.heads] == [(i, j) for i in range(2) for j in range(4)]
    assert steps[-1][0] == steps[-1][1] == len(steps) == found.prompts
    read = {}
    for size, ones in task_inputs("kv", tokenizer, tiny.ROOM, seed=4).passages.items():
        if ones[0].length > 300:
            break
        with torch.no_grad(), capture(model) as seen:
            for one in ones:
                model(**one.inputs)
        read[size] = {
            name: torch.stack([call.statistics[name][0, :, 0] for call in seen.calls]).double().unflatten(0, (-1, 2))
            for name in ("spread", "top", "count")
        }
    assert found.sizes == tuple(read)
    first, *_, last = read.values()
    assert (found.shortest, found.longest) == (int(first["count"].min()), int(last["count"].max()))
    widest = torch.stack([one["spread"].amax(0) for one in read.values()]).amax(0)
    over = torch.stack([one["top"].mean(0) >= 0.3 for one in read.values()])
    for head in found.heads:
        at = head.layer, head.head
        assert head.spread == pytest.approx(float(last["spread"].mean(0)[at]), rel=1e-4)
        assert head.widest == pytest.approx(float(widest[at]), rel=1e-4)
        assert head.kind == ("beyond" if over[-1][at] else "at" if over.any(0)[at] else "before")
        assert (head.tokens is not None) == (head.kind == "at")
    monkeypatch.setattr(horizons, "LONGEST", 150)
    with pytest.raises(
        ArgumentError, match=r"^model: got kv prompts of .* two sizes that fit, up to 150; .*--certified-only"
    ):
        measure_horizons(model, tokenizer)
