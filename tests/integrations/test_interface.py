"""What is installed in a model: observers, copies, shared configurations, and changes by other threads."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax.integrations.transformers as hf
from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.attention import sharp_attention
from sharpmax.integrations.transformers.interface import installed, modules_of, observe, observed
from sharpmax.integrations.transformers.support import NAMES
from sharpmax.policies.base import Policy
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.log_linear import LogLinear
from sharpmax.probing.capture import capture
from sharpmax.stats.call import AttentionCall
from tests.integrations.families import FAMILIES, LLAMA, MIXTURE, transformers

ALL_ATTENTION_FUNCTIONS = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS

ROWS = LogLinear(level=0.4, length=0.1, entropy=0.3, top=-0.2, var=0.1, reference=4.0)


@pytest.mark.parametrize(
    ("name", "attention"),
    [("gemma2", "eager"), ("t5", "sdpa"), ("t5", "eager"), ("whisper", "sdpa")],
)
def test_observed_rows_equal_those_of_eager_attention(name: str, attention: str) -> None:
    """Under a policy, with a cap, a position bias, and attention to an encoder's output."""
    family, found = FAMILIES[name], dict[int, Tensor]()
    model, eager = hf.apply(family.build(attention), ROWS), hf.apply(family.build("eager"), ROWS)
    inputs = family.inputs(model)

    def keep(seen: AttentionCall) -> None:
        found[seen.layer] = seen.logits(torch.arange(seen.queries)).scaled(None).softmax(-1)

    with torch.no_grad(), observed(model, keep):
        model(**inputs)
        out = eager(**inputs, output_attentions=True)
    expected = out.attentions if "attentions" in out else out.encoder_attentions
    if "decoder_attentions" in out:
        both = zip(out.decoder_attentions, out.cross_attentions, strict=True)
        expected = [*expected, *(one for pair in both for one in pair)]
    assert len(found) == len(expected)
    for layer, theirs in enumerate(expected):
        assert torch.allclose(found[layer], theirs.float(), atol=2e-5)


def test_policies_come_and_go_while_several_observe(model: Any) -> None:
    attributes, plain = vars(model).keys(), LLAMA.logits(model)
    seen: list[AttentionCall] = []
    removes = [observe(model, seen.append), observe(model, seen.append)]
    assert torch.equal(LLAMA.logits(model), plain)
    removes[0]()
    with hf.applied(model, ROWS):
        sharp = LLAMA.logits(model)
    assert torch.equal(LLAMA.logits(hf.apply(model, ROWS)), sharp)
    assert torch.equal(LLAMA.logits(hf.restore(model)), plain)
    assert len(seen) == 10
    assert torch.equal(seen[0].query, seen[8].query)
    assert torch.equal(seen[4].query, seen[6].query)
    assert not torch.equal(seen[0].query, seen[4].query)
    hf.apply(model, ROWS)
    removes[1]()
    assert hf.policy_of(model) == ROWS
    hf.restore(model)
    assert vars(model).keys() == attributes


def test_the_last_observer_may_leave_between_lookup_and_call_of_the_attention_function(model: Any) -> None:
    module, (q, k, v) = model.model.layers[0].self_attn, torch.randn(3, 1, 4, 6, 8)
    expected = ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, None, scaling=0.5)[0]
    observe(model, lambda seen: None)()
    assert torch.equal(sharp_attention(module, q, k, v, None, scaling=0.5)[0], expected)


def test_a_refused_observer_leaves_no_trace(model: Any) -> None:
    before = dict(vars(model))
    model.config._attn_implementation_internal = "flash_attention_4"
    refused: list[AttentionCall] = []
    for begin in (lambda: observe(model, refused.append), lambda: capture(model).__enter__()):
        with pytest.raises(UnsupportedError, match="flash_attention_4"):
            begin()
        assert vars(model) == before
    model.config._attn_implementation_internal = "sdpa"
    seen: list[AttentionCall] = []
    remove = observe(model, seen.append)
    LLAMA.logits(model)
    remove()
    assert (len(refused), len(seen)) == (0, 2)
    assert installed(model) is None


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("name", "policy"), [("llama", MIXTURE), ("whisper", Constant(2.0))], ids=["llama", "whisper"])
def test_a_copy_of_a_model_keeps_a_policy_of_its_own(name: str, policy: Any, way: Any) -> None:
    family = FAMILIES[name]
    model = family.build()
    plain = family.logits(model)
    sharp = family.logits(hf.apply(model, policy))
    twin = way(model)
    hf.restore(model)
    assert hf.policy_of(twin) == policy
    assert torch.equal(family.logits(twin), sharp)
    assert torch.equal(family.logits(model), plain)
    assert torch.equal(family.logits(hf.restore(twin)), plain)
    assert vars(twin).keys() == vars(model).keys()
    assert torch.equal(family.logits(hf.apply(twin, policy)), sharp)


def test_a_pickle_is_read_where_no_policy_was_applied_before(model: Any) -> None:
    """As in a new process, where transformers does not know our names yet."""
    sharp, data = LLAMA.logits(hf.apply(model, MIXTURE)), pickle.dumps(model)
    for known in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        for name in NAMES.values():
            del known._global_mapping[name]
    model = pickle.loads(data)
    assert torch.equal(LLAMA.logits(model), sharp)
    assert not torch.equal(LLAMA.logits(hf.restore(model)), sharp)


def test_nobody_observes_a_copy(model: Any) -> None:
    plain = LLAMA.logits(model)
    with capture(model) as seen:
        twins = [way(model) for way in WAYS.values()]
        assert all(torch.equal(LLAMA.logits(twin), plain) for twin in twins)
    assert not seen.calls
    assert all(torch.equal(LLAMA.logits(hf.restore(twin)), plain) for twin in twins)


def test_models_that_share_a_configuration_do_not_share_a_policy() -> None:
    first = LLAMA.build()
    plain, config = LLAMA.logits(first), first.config.to_json_string()
    second = transformers.LlamaForCausalLM(first.config).eval()
    second.load_state_dict(first.state_dict())
    sharp = LLAMA.logits(hf.apply(first, MIXTURE))
    assert first.config is second.config
    assert first.config.to_json_string() == config
    assert "sharpmax" not in json.dumps(first.config.to_dict(), default=str) + repr(first.config)
    assert torch.equal(LLAMA.logits(second), plain)
    with hf.applied(second, Constant(2.0)):
        assert torch.equal(LLAMA.logits(first), sharp)
        assert not torch.equal(LLAMA.logits(second), plain)
    hf.restore(first)
    assert torch.equal(LLAMA.logits(hf.apply(second, MIXTURE)), sharp)
    assert torch.equal(LLAMA.logits(first), plain)


TWO, THREE = Constant(2.0), Constant(3.0)
SOON = 60.0
"""Seconds after which a test gives up."""


def expected(policy: Policy | None) -> Tensor:
    """The logits of a new model with a policy."""
    return LLAMA.logits(hf.apply(LLAMA.build(), policy)).detach()


@contextmanager
def paused(model: Any) -> Iterator[Callable[[], Tensor]]:
    """A forward pass in another thread that waits before its second attention module until its logits are asked for."""
    reached, go = threading.Event(), threading.Event()
    main = threading.get_ident()

    def wait(module: Any, args: Any) -> None:
        if threading.get_ident() != main and not go.is_set():
            reached.set()
            assert go.wait(SOON)

    hook = modules_of(model)[1].module.register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: LLAMA.logits(model).detach())
        assert reached.wait(SOON)

        def outcome() -> Tensor:
            go.set()
            return future.result(SOON)

        try:
            yield outcome
        finally:
            go.set()
            future.result(SOON)
            hook.remove()


# A pass has one policy


@pytest.mark.parametrize(("first", "change"), [
    (None, lambda model: hf.apply(model, TWO)), (TWO, hf.restore), (TWO, lambda model: hf.apply(model, THREE)),
    (TWO, lambda model: enter(model, THREE)),
], ids=["apply", "restore", "again", "block"])  # fmt: skip
def test_a_policy_cannot_change_while_a_thread_runs_the_model(first: Policy | None, change: Any) -> None:
    model = LLAMA.build() if first is None else hf.apply(LLAMA.build(), first)
    with paused(model) as outcome:
        with pytest.raises(UnsupportedError, match=r"a forward pass is running in the thread 'Thread.*copy\.deepcopy"):
            change(model)
        assert hf.policy_of(model) == first
        assert torch.equal(outcome(), expected(first))
    change(model)
    hf.restore(model)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_a_block_that_ends_while_a_thread_runs_the_model_says_so() -> None:
    model = LLAMA.build()
    running = pytest.raises(UnsupportedError, match="a forward pass is running")
    with running, ExitStack() as later, hf.applied(model, TWO):
        later.enter_context(paused(model))
    assert hf.policy_of(model) is None
    assert torch.equal(LLAMA.logits(model), expected(None))


def test_a_pass_cannot_change_its_own_policy() -> None:
    model = hf.apply(LLAMA.build(), TWO)
    hook = model.model.layers[1].register_forward_pre_hook(lambda module, args: hf.apply(model, THREE) and None)
    with pytest.raises(UnsupportedError, match="running in the thread 'MainThread'"):
        LLAMA.logits(model)
    hook.remove()
    assert torch.equal(LLAMA.logits(model), expected(TWO))


def test_observers_may_come_and_go_during_a_pass(model: Any) -> None:
    seen: list[Any] = []
    with paused(model) as outcome:
        remove = observe(model, seen.append)
        assert torch.equal(outcome(), expected(None))
    with paused(model) as outcome:
        remove()
        assert installed(model) is None
        assert torch.equal(outcome(), expected(None))
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
    model = hf.apply(LLAMA.build(), LogLength(2.0))
    with hf.applied(model, TWO):
        for change in (lambda: enter(model, THREE), lambda: hf.apply(model, THREE), lambda: hf.restore(model)):
            with pytest.raises(UnsupportedError, match=r"another thread.*'MainThread'.*copy"):
                elsewhere(change)
        assert hf.policy_of(model) == TWO
        assert torch.equal(elsewhere(lambda: LLAMA.logits(model)), expected(TWO))
        twin = copy.deepcopy(model)
        assert elsewhere(lambda: enter(twin, THREE)) == THREE
        with hf.applied(model, THREE):
            hf.apply(model, LogLength(3.0))
        assert hf.policy_of(model) == TWO
    assert hf.policy_of(model) == LogLength(2.0)
    assert elsewhere(lambda: enter(model, THREE)) == THREE
    elsewhere(lambda: hf.restore(model))
    assert installed(model) is None


def test_tasks_that_interleave_are_refused(model: Any) -> None:
    refused: list[UnsupportedError] = []

    async def nested() -> None:
        """A task that a block starts is inside of it."""
        assert enter(model, LogLength(4.0)) == LogLength(4.0)

    async def one(policy: Policy) -> None:
        try:
            with hf.applied(model, policy):
                await asyncio.sleep(0)
                await asyncio.create_task(nested())
                assert hf.policy_of(model) == policy
        except UnsupportedError as error:
            refused.append(error)

    async def both() -> None:
        await asyncio.gather(one(TWO), one(THREE))

    elsewhere(lambda: asyncio.run(both()))  # browser and notebook tests may have left a running loop in this thread
    assert len(refused) == 1
    assert installed(model) is None


def test_blocks_that_end_out_of_order_are_told_so_and_leave_nothing() -> None:
    model = hf.apply(LLAMA.build(), LogLength(2.0))
    first, second = ExitStack(), ExitStack()
    first.enter_context(hf.applied(model, TWO))
    second.enter_context(hf.applied(model, THREE))
    with pytest.raises(UnsupportedError, match="ended before one that was opened inside"):
        first.close()
    assert hf.policy_of(model) == THREE
    second.close()
    assert hf.policy_of(model) == LogLength(2.0)


def test_a_block_that_cannot_begin_leaves_the_model_free() -> None:
    model = LLAMA.build()
    with pytest.raises(ValueError, match="no such policy"), hf.applied(model, "no such policy"):
        pass
    assert elsewhere(lambda: enter(model, TWO)) == TWO
