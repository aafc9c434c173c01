"""What a monitor costs while a model says one token after another."""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.experiments.targets import held_to
from sharpmax.lazy import require
from sharpmax.monitoring.monitor import Monitor
from sharpmax.monitoring.scores import Learned
from sharpmax.provenance import check_amounts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = 2048
"""Tokens that are read before the ones that are timed; what the target is meant for."""

ROUNDS = 12
_EVERY = 16
_TARGET = {"overhead_percent": 3.0}


def check_cost(context: int, rounds: int) -> None:
    """Refuse what cannot be measured."""
    check_amounts(context, rounds, least=_EVERY)


def monitor_cost(
    model: PreTrainedModel,
    known: Learned,
    *,
    context: int = CONTEXT,
    rounds: int = ROUNDS,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Milliseconds per token with and without a monitor that looks at every sixteenth.

    The model and a twin of it, which shares its weights and is not watched, take turns at every token, so that noise of
    the machine hits both alike. A round is sixteen tokens of each, one of which is looked at; ratios are taken within a
    round. The report at the end of a request is counted apart: it comes once, however long the answer is.
    """
    check_cost(context, rounds)
    # Prompts alone may have been learned from; what a row costs does not depend on its baseline.
    known = replace(known, generated=known.generated or known.prompt)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, context), generator=generator).to(model.device)
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    plain: list[float] = []
    watched: list[float] = []
    reports: list[float] = []
    with torch.no_grad(), Monitor(model, known, false_alarms=0.5, every=_EVERY, generated=1) as monitor:
        monitor.pause()
        one, other = (_Reader(this, ids) for this in (model, twin))
        monitor.resume()
        for number in range(rounds + 1):
            note(f"cost, round {number} of {rounds}")
            with ExitStack() as request:
                request.enter_context(monitor.request())
                turns = [_in_turn(other, one, number % 2 == 0) for number in range(_EVERY)]
                began = time.perf_counter()
                request.close()
                reports.append(1e3 * (time.perf_counter() - began))
            plain.append(sum(turn[0] for turn in turns) / _EVERY)
            watched.append(sum(turn[1] for turn in turns) / _EVERY)
    # The first round warms both up.
    ratios = [with_it / without for with_it, without in zip(watched[1:], plain[1:], strict=True)]
    entry = {
        "plain_ms": statistics.median(plain[1:]),
        "watched_ms": statistics.median(watched[1:]),
        "overhead_percent": 100.0 * (statistics.median(ratios) - 1.0),
        "quickest_percent": 100.0 * (min(watched[1:]) / min(plain[1:]) - 1.0),
        "report_ms": statistics.median(reports[1:]),
        "context": context,
        "every": _EVERY,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
    }
    return {**entry, "targets": held_to(_TARGET, entry, judged=context >= CONTEXT)}


def _in_turn(plain: _Reader, watched: _Reader, plain_first: bool) -> tuple[float, float]:
    """One more token from both; whoever comes second finds the machine as the first left it."""
    if plain_first:
        return plain.say(), watched.say()
    second = watched.say()
    return plain.say(), second


class _Reader:
    """A model that has read some tokens and says one after the other."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self._model, self._token = model, ids[:, :1]
        self._cache = require("transformers", "hf", "measuring costs").DynamicCache(config=model.config)
        known = inspect.signature(model.forward).parameters
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._read(ids)

    def _read(self, ids: Tensor) -> None:
        self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, **self._last)

    def say(self) -> float:
        """One more token; how many milliseconds it took."""
        _wait(self._token.device)
        began = time.perf_counter()
        self._read(self._token)
        _wait(self._token.device)
        return 1e3 * (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
