"""A replicated key weighs as much as so many keys of a longer list."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import sharpmax.integrations.transformers as hf
from sharpmax.calibration.data import judge_replicated, replicate_keys, replicated
from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.attention import Repeated, sharp_attention
from sharpmax.integrations.transformers.interface import installed, repeating
from sharpmax.models.scoring import Reply, encode, judge, reply_losses
from sharpmax.policies.basic import Constant
from sharpmax.policies.log_linear import LogLinear
from sharpmax.tasks.prompt import Prompt
from tests.experiments.evaluate import tiny

POLICIES = [None, Constant(1.7), LogLinear(level=0.3, length=0.2, entropy=0.4, top=-0.3, var=0.2, reference=4.0)]


def prompt(items: int, asked: int) -> Prompt:
    lines = [f"k{i}: {i % 10}" for i in range(items)]
    return Prompt("\n".join(["Here.", *lines, f"What is k{asked}?"]), f"k{asked}:", f" {asked % 10}")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_repeated_key_weighs_as_so_many_keys(policy: Any, attention: str) -> None:
    model = tiny.model()
    model.set_attn_implementation(attention)
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    places = torch.tensor([[0, 0, 0, 1, 2, 2]])
    with hf.applied(model, policy):
        state = installed(model)
        assert state is not None
        module = state.modules[0].module
        with repeating(model, lambda layer: Repeated(places)):
            out, _ = sharp_attention(module, q, k, v, None, scaling=0.5)
        rows = torch.arange(3)[:, None]
        visible = (places <= rows)[None, None]
        mask = visible if attention == "sdpa" else torch.zeros(1, 1, 3, 6).masked_fill(~visible, -3e38)
        expected, _ = sharp_attention(module, q, k[:, :, places[0]], v[:, :, places[0]], mask, scaling=0.5)
    assert torch.allclose(out, expected, atol=1e-6)


def test_other_items_alone_are_replicated_and_followed_by_a_gap() -> None:
    """A line of six letters that counts four times is followed by a gap for three more."""
    found = replicated_reply(prompt(5, 3), 4)
    text = tiny.tokenizer().decode(list(found.ids))
    assert found.times is not None
    assert found.positions is not None
    assert set(found.times) == {1, 4}
    many = "".join(letter for letter, times in zip(text, found.times, strict=True) if times == 4)
    once = "".join(letter for letter, times in zip(text, found.times, strict=True) if times == 1)
    assert many == "k0: 0\nk1: 1\nk2: 2\nk4: 4\n"
    assert once == "Here.\nk3: 3\nWhat is k3?\nk3: 3"
    starts = [found.positions[text.index(line)] for line in ("Here", "k0", "k1", "k2", "k3: 3\n", "k4", "What")]
    assert starts == [0, 6, 30, 54, 78, 84, 108]
    for line in ("k0: 0\n", "k3: 3\n", "What is k3?"):
        at = text.index(line)
        run = found.positions[at : at + len(line)]
        assert list(run) == list(range(run[0], run[0] + len(line)))
    assert found.positions[-1] == sum(found.times) - 1


def test_consecutive_positions_and_a_replication_of_one_change_nothing() -> None:
    language = tiny.language()
    replies = [encode(language.tokenizer, prompt(6, 2)), encode(language.tokenizer, prompt(9, 8))]
    once = [replace(r, times=(1,) * len(r.ids)) for r in replies]
    placed = [replace(r, positions=tuple(range(len(r.ids)))) for r in replies]
    apart = [replace(r, positions=tuple(range(0, 3 * len(r.ids), 3))) for r in replies]
    with hf.applied(language.model, POLICIES[2]), torch.no_grad():
        plain = reply_losses(language.model, replies)[0]
        with replicated(language.model, once):
            assert torch.allclose(plain, reply_losses(language.model, once)[0], atol=1e-5)
        assert torch.allclose(plain, reply_losses(language.model, placed)[0], atol=1e-5)
        assert torch.allclose(plain[1], reply_losses(language.model, [replies[0], placed[1]])[0][1], atol=1e-5)
        far = reply_losses(language.model, apart)[0]
        assert not torch.allclose(plain, far, atol=1e-4)
        # A gap is not the end of a text: what is said in the end still depends on how it began.
        others = [Reply((r.ids[1], *r.ids[1:]), r.start, positions=r.positions) for r in apart]
        assert not torch.allclose(far, reply_losses(language.model, others)[0], atol=1e-5)


def replicated_reply(asked: Prompt, times: int) -> Reply:
    return replicate_keys(tiny.tokenizer(), asked, encode(tiny.tokenizer(), asked), times)


def test_a_prompt_without_lines_is_not_replicated() -> None:
    assert set(replicated_reply(tiny.make(4, random.Random(0)), 8).times or ()) == {1}


def test_batches_of_unequal_lengths_equal_one_by_one() -> None:
    model = tiny.model()
    replies = [replicated_reply(*one) for one in ((prompt(5, 3), 2), (prompt(12, 7), 8), (prompt(8, 0), 3))]
    with hf.applied(model, POLICIES[2]), torch.no_grad():
        with replicated(model, replies):
            together = reply_losses(model, replies)[0].sum(-1)
        alone = judge_replicated(model, replies)
    assert torch.allclose(together, torch.tensor([one.nll for one in alone]), atol=1e-5)


def test_plain_and_replicated_replies_keep_their_order() -> None:
    model, plain, many = tiny.model(), encode(tiny.tokenizer(), prompt(6, 1)), replicated_reply(prompt(6, 1), 6)
    with hf.applied(model, None):
        first, second, third = judge_replicated(model, [plain, many, plain])
        expected = judge(model, [plain])[0]
    assert first == third
    assert first.nll == pytest.approx(expected.nll, abs=1e-5)
    assert second.nll != pytest.approx(first.nll, abs=1e-4)


def test_nothing_stays_installed_after_an_exception_and_plain_replies_need_no_rules() -> None:
    model = tiny.model()
    many = [Reply((1, 2, 3), 1, times=(1, 2, 1))]
    with pytest.raises(UnsupportedError, match="no rules installed"), replicated(model, many):
        pass
    with replicated(model, [Reply((1, 2), 1)]):
        pass
    with hf.applied(model, None):
        with pytest.raises(KeyError), replicated(model, many):
            raise KeyError
        state = installed(model)
        assert state is not None
        assert all(layer.repeated is None for layer in state.layers)
