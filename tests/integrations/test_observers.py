"""Whoever watches sees exactly what the softmax of each layer gets, and changes nothing."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax.integrations.transformers as hf
from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.interface import installed, observe
from sharpmax.policies.base import Policy
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.polynomial import PAPER
from sharpmax.probing.capture import capture
from sharpmax.stats.call import AttentionCall
from tests.integrations.families import FAMILIES, Family, transformers

ROWS = LogLinear(level=0.4, length=0.1, entropy=0.3, top=-0.2, var=0.1, reference=4.0)


def attentions(out: Any) -> list[Tensor]:
    """The weights that eager attention returns, in the order of the modules."""
    if "attentions" in out:
        return list(out.attentions)
    both = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    return [*out.encoder_attentions, *(one for pair in both for one in pair)]


def observed(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    found: dict[int, Tensor] = {}

    def keep(seen: AttentionCall) -> None:
        found[seen.layer] = seen.logits(torch.arange(seen.queries)).scaled(None).softmax(-1)

    remove = observe(model, keep)
    with torch.no_grad():
        model(**inputs)
    remove()
    return [found[layer] for layer in sorted(found)]


@pytest.mark.parametrize("policy", [None, PAPER, ROWS], ids=["none", "paper", "rows"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [(one, a) for one in FAMILIES.values() for a in one.attentions],
    ids=lambda x: getattr(x, "name", x),
)
@pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning")
def test_what_is_seen_is_what_eager_attention_returns(family: Family, attention: str, policy: Policy | None) -> None:
    model, eager = family.build(attention), family.build("eager")
    inputs = family.inputs(model)
    if "input_ids" in inputs and family.kind in ("causal", "encoder"):
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, : 4 if family.kind == "causal" else 0] = 0  # on the left, as before generating
        mask[1, 9:] = int(family.kind == "causal")
        inputs["attention_mask"] = mask
    if policy is not None:
        hf.apply(model, policy)
        hf.apply(eager, policy)
    with torch.no_grad():
        expected = attentions(eager(**inputs, output_attentions=True))
    found = observed(model, inputs)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        real = theirs.sum(-1) > 0.5
        if "attention_mask" in inputs:  # rows of padding say nothing
            real &= (
                inputs["attention_mask"].bool()[:, None].expand_as(real) if real.shape[-1] == mask.shape[1] else True
            )
        assert torch.allclose(ours[real], theirs[real].float(), atol=2e-5)


@pytest.mark.parametrize("policy", [None, ROWS], ids=["none", "rows"])
def test_watching_changes_nothing_and_leaves_nothing(policy: Policy | None) -> None:
    family = FAMILIES["llama"]
    model = hf.apply(family.build(), policy) if policy is not None else family.build()
    attributes, implementation = dict(vars(model)), model.config._attn_implementation
    before = family.logits(model)
    remove = observe(model, lambda seen: None)
    assert torch.equal(family.logits(model), before)
    remove()
    remove()
    if policy is None:
        assert vars(model).keys() == attributes.keys()
        assert model.config._attn_implementation == implementation
    assert torch.equal(family.logits(model), before)


def test_generating_with_a_cache_shows_one_row_at_a_time() -> None:
    model = FAMILIES["llama"].build()
    shapes = []
    remove = observe(
        model, lambda seen: shapes.append((seen.layer, seen.queries, seen.logits(torch.tensor([-1])).values.shape[-1]))
    )
    ids = torch.randint(3, 97, (1, 7))
    model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    remove()
    assert shapes == [(layer, 7 if i == 0 else 1, 7 + i) for i in range(4) for layer in range(2)]


def test_policies_come_and_go_while_someone_watches() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    seen: list[AttentionCall] = []
    remove = observe(model, seen.append)
    family.logits(model)
    with hf.applied(model, ROWS):
        family.logits(model)
    hf.apply(model, ROWS)
    family.logits(model)
    hf.restore(model)
    family.logits(model)
    assert len(seen) == 8
    assert torch.equal(seen[0].query, seen[6].query)
    assert torch.equal(seen[2].query, seen[4].query)
    assert not torch.equal(seen[0].query, seen[2].query)
    hf.apply(model, ROWS)
    remove()
    assert isinstance(hf.policy_of(model), LogLinear)
    hf.restore(model)
    assert installed(model) is None


def test_several_watch_at_once_and_nobody_watches_a_copy() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    first: list[AttentionCall] = []
    second: list[AttentionCall] = []
    remove_first, remove_second = observe(model, first.append), observe(model, second.append)
    family.logits(copy.deepcopy(model))
    assert not first
    family.logits(model)
    remove_first()
    family.logits(model)
    remove_second()
    family.logits(model)
    assert (len(first), len(second)) == (2, 4)


def test_each_thread_sees_its_own_calls() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    by_thread: dict[int, set[int]] = {}
    remove = observe(model, lambda seen: by_thread.setdefault(threading.get_ident(), set()).add(seen.queries))
    both = threading.Barrier(2)  # the number of a thread that has ended may be given to the next

    def read(n: int) -> None:
        both.wait(1200)
        for _ in range(20):
            family.logits(model, input_ids=torch.ones(1, n).long())
        both.wait(1200)

    threads = [threading.Thread(target=read, args=(n,)) for n in (5, 9)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    remove()
    assert sorted(map(sorted, by_thread.values())) == [[5], [9]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_last_watcher_may_leave_while_a_thread_is_about_to_call_its_attention(attention: str) -> None:
    """A thread looks up its attention, another takes everything out, and then the first one calls what it found."""
    family = FAMILIES["llama"]
    model = family.build(attention)
    expected = family.logits(model)
    remove = observe(model, lambda seen: None)
    looked_up = model.config._attn_implementation
    remove()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.config, "_attn_implementation_internal", looked_up)
        found = family.logits(model)
    assert torch.equal(found, expected)


def refused_model() -> Any:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    return transformers.BloomForCausalLM(config).eval()


@pytest.mark.parametrize("begin", [observe, lambda model, see: capture(model).__enter__()], ids=["observe", "capture"])
def test_a_model_that_cannot_be_watched_is_left_as_it_was(begin: Any) -> None:
    model = refused_model()
    before = dict(vars(model))
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="Bloom"):
            begin(model, lambda seen: None)
        assert vars(model) == before
        hf.restore(model)
    assert vars(model) == before


def test_a_model_that_is_refused_for_a_while_can_be_watched_afterwards() -> None:
    """Nobody who was refused sees anything, and nothing of them stays."""
    family = FAMILIES["llama"]
    model = family.build()
    model.config._attn_implementation_internal = "flash_attention_4"
    refused: list[AttentionCall] = []
    with pytest.raises(UnsupportedError, match="flash_attention_4"):
        observe(model, refused.append)
    model.config._attn_implementation_internal = "sdpa"
    seen: list[AttentionCall] = []
    remove = observe(model, seen.append)
    family.logits(model)
    remove()
    assert (len(refused), len(seen)) == (0, 2)
    assert installed(model) is None
    hf.restore(hf.apply(model, ROWS))
    assert installed(model) is None
    assert model.config._attn_implementation == "sdpa"
