"""Changes of a model's policy by one thread while others are in the middle of something."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.integrations import transformers as hf
from sharpmax.integrations.transformers.interface import installed, modules_of, observe
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from tests.integrations.families import FAMILIES, Family

TWO, THREE = Constant(2.0), Constant(3.0)
SOON = 60.0
"""Seconds after which a test gives up."""


def expected(family: Family, policy: Policy | None, attention: str | None = None) -> Tensor:
    """The outcome with a policy, of a model of its own."""
    return family.logits(hf.apply(family.build(attention), policy)).detach()


@contextmanager
def paused(family: Family, model: Any, at: int = 1) -> Iterator[Callable[[], Tensor]]:
    """A forward pass in another thread that stands before an attention module until its outcome is asked for."""
    there, go = threading.Event(), threading.Event()
    ours: list[int] = []

    def wait(module: Any, args: Any) -> None:
        if threading.get_ident() in ours and not go.is_set():
            there.set()
            assert go.wait(SOON)

    def run() -> Tensor:
        ours.append(threading.get_ident())
        return family.logits(model).detach()

    hook = modules_of(model)[at].module.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        assert there.wait(SOON)

        def outcome() -> Tensor:
            go.set()
            return future.result(SOON)

        try:
            yield outcome
        finally:
            go.set()
            future.result(SOON)
            hook.remove()


# A pass sees one policy


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma2", None), ("t5", None)])
@pytest.mark.parametrize(("first", "second"), [(None, TWO), (TWO, None), (TWO, THREE), (TWO, LogLength(2.0))], ids=str)
def test_a_pass_ends_with_the_policy_it_began_with(
    name: str, attention: str | None, first: Policy | None, second: Policy | None
) -> None:
    family = FAMILIES[name]
    model = family.build(attention)
    plain = model.config._attn_implementation

    def change(policy: Policy | None) -> None:
        hf.restore(model) if policy is None else hf.apply(model, policy)

    change(first)
    for at in (1, len(modules_of(model)) - 1):
        with paused(family, model, at) as outcome:
            change(second)
            assert hf.policy_of(model) == second
            assert torch.equal(family.logits(model), expected(family, second, attention))
            assert torch.equal(outcome(), expected(family, first, attention))
        assert torch.equal(family.logits(model), expected(family, second, attention))
        change(first)
    hf.restore(model)
    assert {one.config._attn_implementation for one in modules_of(model)} == {plain}
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_several_passes_and_several_changes() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    with paused(family, model) as plain:
        hf.apply(model, TWO)
        with paused(family, model) as two:
            with hf.applied(model, THREE), paused(family, model) as three:
                hf.restore(model)
                assert torch.equal(three(), expected(family, THREE))
            hf.restore(model)
            assert torch.equal(family.logits(model), expected(family, None))
            assert torch.equal(two(), expected(family, TWO))
        assert model.config._attn_implementation == "sdpa"
        hf.apply(model, THREE)
        assert torch.equal(plain(), expected(family, None))
        assert torch.equal(family.logits(model), expected(family, THREE))


def test_a_change_inside_a_pass_comes_after_it() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    hf.apply(model, TWO)
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: hf.apply(model, THREE) and None)
    assert torch.equal(family.logits(model), expected(family, TWO))
    hook.remove()
    assert torch.equal(family.logits(model), expected(family, THREE))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_fails_leaves_nothing_behind(error: type[BaseException]) -> None:
    family = FAMILIES["llama"]
    model = hf.apply(family.build(), TWO)
    encoder = model.model

    def fail(module: Any, args: Any) -> None:
        raise error("on purpose")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(error, match="on purpose"):
        family.logits(model)
    hook.remove()
    ids = family.inputs(model)["input_ids"]
    hf.apply(model, THREE)
    assert torch.equal(encoder(ids).last_hidden_state, hf.apply(family.build(), THREE).model(ids).last_hidden_state)
    hf.restore(model)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_hooks
    assert torch.equal(family.logits(model), expected(family, None))


def test_a_part_that_is_called_by_itself_has_the_policy_of_the_moment() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    ids = family.inputs(model)["input_ids"]
    for policy in (TWO, THREE):
        hf.apply(model, policy)
        apart = model.lm_head(model.model(ids).last_hidden_state)
        assert torch.equal(apart, expected(family, policy))
        assert torch.equal(model.forward(ids).logits, expected(family, policy))


def test_saving_in_another_thread_does_not_disturb(tmp_path: Any) -> None:
    family = FAMILIES["llama"]
    model = hf.apply(family.build(), TWO)
    seen: list[Tensor] = []
    save = type(model.config).save_pretrained

    def look(*args: Any, **kwargs: Any) -> None:
        seen.append(family.logits(model))
        save(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.config), "save_pretrained", look)
        model.save_pretrained(tmp_path)
    assert torch.equal(seen[0], expected(family, TWO))


def test_watchers_may_come_and_go_during_a_pass() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    seen: list[Any] = []
    with paused(family, model) as outcome:
        remove = observe(model, seen.append)
        assert torch.equal(outcome(), expected(family, None))
    with paused(family, model) as outcome:
        remove()
        assert installed(model) is None
        assert torch.equal(outcome(), expected(family, None))
    assert model.config._attn_implementation == "sdpa"


# Blocks


def elsewhere(function: Callable[[], Any]) -> Any:
    """What a function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(SOON)


def enter(model: Any, policy: Policy) -> Any:
    with hf.applied(model, policy):
        return hf.policy_of(model)


def test_another_thread_cannot_change_a_policy_inside_a_block() -> None:
    family = FAMILIES["llama"]
    model = hf.apply(family.build(), LogLength(2.0))
    with hf.applied(model, TWO):
        for change in (
            lambda: enter(model, THREE),
            lambda: hf.apply(model, THREE),
            lambda: hf.restore(model),
        ):
            with pytest.raises(UnsupportedError, match=r"another thread.*'MainThread'.*copy"):
                elsewhere(change)
        assert hf.policy_of(model) == TWO
        assert torch.equal(elsewhere(lambda: family.logits(model)), expected(family, TWO))
        twin = copy.deepcopy(model)
        assert elsewhere(lambda: enter(twin, THREE)) == THREE
        with hf.applied(model, THREE):
            hf.apply(model, LogLength(3.0))
        assert hf.policy_of(model) == TWO
    assert hf.policy_of(model) == LogLength(2.0)
    assert elsewhere(lambda: enter(model, THREE)) == THREE
    elsewhere(lambda: hf.restore(model))
    assert installed(model) is None


def test_tasks_that_interleave_are_refused() -> None:
    family = FAMILIES["llama"]
    model = family.build()
    refused: list[UnsupportedError] = []

    async def one(policy: Policy) -> None:
        try:
            with hf.applied(model, policy):
                await asyncio.sleep(0)
                await asyncio.create_task(nested(policy))
                assert hf.policy_of(model) == policy
        except UnsupportedError as error:
            refused.append(error)

    async def nested(outer: Policy) -> None:
        """A task that a block starts is inside of it."""
        assert hf.policy_of(model) == outer
        assert enter(model, LogLength(4.0)) == LogLength(4.0)

    async def both() -> None:
        await asyncio.gather(one(TWO), one(THREE))

    # In a thread of its own: browser and notebook tests may have left a running loop in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(both())).result()
    assert len(refused) == 1
    assert installed(model) is None


def test_blocks_that_end_out_of_order_are_told_so_and_leave_nothing() -> None:
    family = FAMILIES["llama"]
    model = hf.apply(family.build(), LogLength(2.0))
    first, second = ExitStack(), ExitStack()
    first.enter_context(hf.applied(model, TWO))
    second.enter_context(hf.applied(model, THREE))
    with pytest.raises(UnsupportedError, match="ended before one that was opened inside"):
        first.close()
    assert hf.policy_of(model) == THREE
    second.close()
    assert hf.policy_of(model) == LogLength(2.0)


def test_a_block_that_cannot_begin_leaves_the_model_free() -> None:
    model = FAMILIES["llama"].build()
    with pytest.raises(ValueError, match="no such policy"), hf.applied(model, "no such policy"):
        pass
    assert elsewhere(lambda: enter(model, TWO)) == TWO
