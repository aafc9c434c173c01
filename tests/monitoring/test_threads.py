"""Threads that use a monitored model at the same time get scores of their own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from sharpmax.integrations.transformers.interface import installed
from sharpmax.monitoring.scores import Report
from tests.integrations.test_interface import expected as logits_of
from tests.integrations.test_interface import paused
from tests.monitoring.monitored import model, monitored, padded, prompts


def generate(one: Any, ids: list[int], new: int = 8) -> Any:
    return one.generate(**padded([ids], "left"), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)


def test_requests_without_a_block_are_kept_apart() -> None:
    """Both threads are inside `generate` at the same time and wait for each other in every pass."""
    one, lists = model(), prompts(2, seed=2)
    turns = threading.Barrier(2)
    by_thread: dict[int, Report] = {}
    with monitored(one, callback=lambda report: by_thread.__setitem__(threading.get_ident(), report)):
        expected = []
        for ids in lists:
            generate(one, ids)
            expected.append(by_thread.pop(threading.get_ident()))
        meet = one.model.layers[0].register_forward_pre_hook(lambda module, args: (turns.wait(1200), None)[1])
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(partial(generate, one), lists))
        meet.remove()
    assert sorted(map(repr, by_thread.values())) == sorted(map(repr, expected))
    assert len(by_thread) == 2


def test_tasks_of_one_thread_have_requests_of_their_own() -> None:
    one, lists = model(), prompts(2, seed=3)

    async def scored(monitor: Any, ids: list[int]) -> list[float | None]:
        with monitor.request() as r:
            await asyncio.sleep(0)
            await asyncio.to_thread(generate, one, ids)
            await asyncio.sleep(0)
        found: list[float | None] = r.report.scores
        return found

    async def together(monitor: Any) -> list[list[float | None]]:
        return await asyncio.gather(*(scored(monitor, ids) for ids in lists))

    # In a thread of their own: a browser that another test has opened keeps an event loop running in this one.
    with monitored(one) as monitor, ThreadPoolExecutor(1) as thread:
        found = thread.submit(asyncio.run, together(monitor)).result()
        alone = [thread.submit(asyncio.run, scored(monitor, ids)).result() for ids in lists]
    assert found == alone
    assert all(len(scores) == 1 for scores in found)


def test_closing_while_another_thread_runs_the_model_changes_nothing_there() -> None:
    one = model()
    monitor = monitored(one)
    with paused(one) as outcome:
        monitor.close()
        assert torch.equal(outcome(), logits_of(None))
    assert installed(one) is None
    assert "generate" not in vars(one)
