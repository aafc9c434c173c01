"""What is captured of a transformers model is what its softmax gets, in every family, with padding and caches."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import ArgumentError
from sharpmax.policies.polynomial import PAPER
from sharpmax.probing.capture import STATISTICS, Capture
from tests.integrations.families import FAMILIES, Family
from tests.probing import oracle

LENGTH = 40


def inputs_of(family: Family, model: Any) -> dict[str, Tensor]:
    """Two sequences, the shorter one padded: on the left for a model that generates."""
    inputs = family.inputs(model, length=LENGTH)
    if family.kind in ("causal", "encoder"):
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, slice(13) if family.kind == "causal" else slice(27, None)] = 0
        inputs["attention_mask"] = mask
    return inputs


def check(found: Capture, expected: list[tuple[int, oracle.Rows]], tolerance: float = 1e-4) -> None:
    """`tolerance` in nats; the issue allows 1e-3."""
    assert [call.layer for call in found.calls] == [layer for layer, _ in expected]
    for call, (_, rows) in zip(found.calls, expected, strict=True):
        for name in STATISTICS:
            theirs = rows[name][..., call.places.numpy()]
            assert np.allclose(call.statistics[name].numpy(), theirs, atol=tolerance, rtol=1e-5), name


CASES = [(name, FAMILIES[name].attentions[0], torch.float32) for name in (
    "llama", "mistral", "gpt2", "t5", "bert", "modernbert", "vit", "whisper",
)]  # fmt: skip
CASES += [("llama", "eager", torch.float32), ("llama", "sdpa", torch.bfloat16), ("gemma2", "eager", torch.bfloat16)]


@pytest.mark.parametrize(("name", "attention", "dtype"), CASES, ids=str)
def test_every_row_of_every_layer_equals_the_float64_oracle(name: str, attention: str, dtype: torch.dtype) -> None:
    """And the model computes the same and is as before."""
    family = FAMILIES[name]
    model = family.build(attention).to(dtype)
    inputs = inputs_of(family, model)
    state, implementation = [vars(one).keys() for one in model.modules()], model.config._attn_implementation
    with torch.no_grad():
        with oracle.recorded(model) as expected:
            plain = family.logits(model, **inputs)
        with sm.capture(model, rows="all") as found:
            seen = family.logits(model, **inputs)
    assert torch.equal(seen, plain)
    assert len(expected) >= 2
    check(found, expected)
    assert [vars(one).keys() for one in model.modules()] == state
    assert model.config._attn_implementation == implementation


def test_under_autocast_and_with_gradients_nothing_changes() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    inputs = family.inputs(model, length=LENGTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with oracle.recorded(model) as expected:
            family.logits(model, **inputs).square().sum().backward()
        plain = [weight.grad for weight in model.parameters()]
        model.zero_grad()
        with sm.capture(model, "all") as found:
            family.logits(model, **inputs).square().sum().backward()
    check(found, expected)
    assert all(torch.equal(w.grad, g) for w, g in zip(model.parameters(), plain, strict=True))
    assert not any(value.requires_grad for call in found.calls for value in call.statistics.values())


@pytest.mark.parametrize(("name", "cache"), [("llama", "dynamic"), ("gemma2", "static")])
def test_generating_gives_the_rows_of_one_long_pass(name: str, cache: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    prompt = family.inputs(model, length=21)["input_ids"]
    mask = torch.ones_like(prompt)
    mask[0, :6] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    plain = model.generate(prompt, attention_mask=mask, **options)
    with sm.capture(model) as steps:
        ids = model.generate(prompt, attention_mask=mask, **options)
    assert torch.equal(ids, plain)
    mask = torch.nn.functional.pad(mask, (0, 7), value=1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad(), oracle.recorded(model) as expected:
        model(ids[:, :-1], attention_mask=mask, position_ids=positions)
    for layer, rows in expected:
        calls = [call for call in steps.calls if call.layer == layer]
        assert [call.places.tolist() for call in calls] == [[20]] + [[0]] * 7
        for statistic in STATISTICS:
            found = torch.cat([call.statistics[statistic] for call in calls], dim=-1).numpy()
            assert np.allclose(found, rows[statistic][..., 20:28], atol=2e-4, rtol=1e-4), statistic


@pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
def test_sharpened_rows_are_those_whose_weights_eager_attention_returns() -> None:
    family = FAMILIES["llama"]
    model, eager = family.build(), sm.apply(family.build("eager"), PAPER)
    ids = family.inputs(model, length=LENGTH)
    with torch.no_grad():
        weights = eager(**ids, output_attentions=True).attentions
        with sm.applied(model, PAPER), sm.capture(model, "all") as inside:
            model(**ids)
        with sm.capture(model, "all") as outside, sm.applied(model, PAPER):
            model(**ids)
    entropy = torch.stack([torch.special.entr(w.double()).sum(-1) for w in weights])
    for found in (inside, outside):
        assert (found.stack("entropy") - entropy).abs().max() < 1e-4
        assert (found.stack("top") - torch.stack([w.amax(-1) for w in weights])).abs().max() < 1e-5


def test_calls_of_another_thread_are_not_seen() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    lengths: dict[int, set[int]] = {5: set(), 9: set()}
    both = threading.Barrier(2)

    def read(n: int) -> None:
        with sm.capture(model) as found:
            both.wait(1200)
            for _ in range(10):
                family.logits(model, input_ids=torch.ones(1, n).long())
            both.wait(1200)
        lengths[n] = {call.keys for call in found.calls}
        assert len(found.calls) == 20

    with sm.capture(model) as here:
        threads = [threading.Thread(target=read, args=(n,)) for n in lengths]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert lengths == {5: {5}, 9: {9}}
    assert here.calls == []


def test_what_a_capture_gives_back() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    with sm.capture(model, "log") as found:
        family.logits(model)
        family.logits(model)
    rows = len(found.calls[0].places)
    assert found.stack("top").shape == (2, 2, 4, rows)
    with pytest.raises(ArgumentError, match="name: got 'mean'; allowed: one of"):
        found.stack("mean")
    t5 = FAMILIES["t5"].build()
    with sm.capture(t5, "all") as mixed:
        FAMILIES["t5"].logits(t5)
    with pytest.raises(ArgumentError, match=r"layers whose rows differ in shape.*read each of \.calls instead"):
        mixed.stack("top")


def test_an_error_leaves_the_model_as_it_was() -> None:
    model = FAMILIES["llama"].build()
    with pytest.raises(IndexError), sm.capture(model):
        model(torch.tensor([[10_000]]))
    assert model.config._attn_implementation == "sdpa"
    assert not any(name.startswith("_sharpmax") for name in vars(model))
