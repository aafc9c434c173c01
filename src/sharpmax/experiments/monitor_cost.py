"""What a monitor costs while a model says one token after another."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sharpmax.errors import reject
from sharpmax.experiments.targets import held_to
from sharpmax.lazy import require
from sharpmax.probe.judging import Learned
from sharpmax.probe.monitor import Monitor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CONTEXT", "ROUNDS", "monitor_cost"]

CONTEXT = 2048
"""Tokens that are read before the ones that are timed; what the target is meant for."""

ROUNDS = 12
_EVERY = 8
_TARGET = {"overhead_percent": 3.0}


def monitor_cost(
    model: PreTrainedModel,
    known: Learned,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Milliseconds per token with and without a monitor that looks at every eighth, in turns.

    Ratios are taken within a round, so that noise of the machine hits both alike. A round is eight tokens, one of which
    is looked at; the report at the end of a request is counted apart, for it comes once however long the answer is.
    """
    if rounds < 1:
        reject("repeat", rounds, "1 or more")
    if context < _EVERY:
        reject("length", context, f"{_EVERY} or more")
    # Prompts alone may have been learned from; what a row costs does not depend on its baseline.
    known = replace(known, generated=known.generated or known.prompt)
    cache = require("transformers", "hf", "measuring costs").DynamicCache(config=model.config)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, context), generator=generator).to(model.device)

    def said(tokens: int) -> float:
        _wait(model.device)
        began = time.perf_counter()
        for place in range(tokens):
            model(input_ids=ids[:, place : place + 1], past_key_values=cache, use_cache=True, **last)
        _wait(model.device)
        return 1e3 * (time.perf_counter() - began) / tokens

    plain: list[float] = []
    watched: list[float] = []
    reports: list[float] = []
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, **last)
        said(2)
        for number in range(rounds + 1):
            note(f"cost, round {number} of {rounds}")
            plain.append(said(_EVERY))
            with Monitor(model, known, false_alarms=0.5, every=_EVERY, generated=1) as monitor, ExitStack() as request:
                request.enter_context(monitor.request())
                watched.append(said(_EVERY))
                began = time.perf_counter()
                request.close()
                reports.append(1e3 * (time.perf_counter() - began))
    # The first round warms both up.
    ratios = [one / other for one, other in zip(watched[1:], plain[1:], strict=True)]
    entry = {
        "plain_ms": statistics.median(plain[1:]),
        "watched_ms": statistics.median(watched[1:]),
        "overhead_percent": 100.0 * (statistics.median(ratios) - 1.0),
        "report_ms": statistics.median(reports[1:]),
        "context": context,
        "every": _EVERY,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }
    return {**entry, "targets": held_to(_TARGET, entry, judged=context >= CONTEXT)}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
