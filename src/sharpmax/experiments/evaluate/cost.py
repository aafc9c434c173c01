"""Time and memory of each variant, measured side by side."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.experiments.benchmarks.subprocess import resident_bytes
from sharpmax.experiments.evaluate.variants import BASE, under
from sharpmax.lazy import require
from sharpmax.policies.base import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RESET = Path("/proc/self/clear_refs")


def start_peak(device: torch.device) -> bool:
    """Forget earlier peaks; whether this machine can do so."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _RESET.write_text("5")  # what Linux reads as: the peak of this process begins anew
    except OSError:
        return False
    return device.type == "cpu" and resident_bytes() is not None


def peak_mib(device: torch.device) -> float | None:
    """The most memory in MiB since `start_peak`: of tensors on a GPU, of the whole process elsewhere."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**20
    held = resident_bytes()
    return None if held is None else held[1] / 2**20


CONTEXT = 2048
"""Tokens that are read before one more is said."""

ROUNDS = 5
_TOKENS_SAID = 24


def cost(
    model: PreTrainedModel,
    arms: Mapping[str, Policy],
    context: int,
    rounds: int = ROUNDS,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Milliseconds and MiB of every arm, and times as ratios to the model as it comes.

    Every round measures each arm once and ratios are taken within a round, so that noise of the machine hits all
    arms alike. Each arm has run once before the first round.
    """
    every: dict[str, Policy | None] = {BASE: None, **arms}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, context), generator=generator).to(model.device)
    found: dict[str, list[dict[str, float | None]]] = {arm: [] for arm in every}
    for number in range(rounds + 1):
        for arm, policy in every.items():
            note(f"cost, round {number} of {rounds}: {arm}")
            with torch.no_grad(), under(model, policy):
                measured = _measured(model, ids)
            if number:
                found[arm].append(measured)
    return {arm: _summary(rows, found[BASE]) for arm, rows in found.items()}


def _measured(model: PreTrainedModel, ids: Tensor) -> dict[str, float | None]:
    cache = require("transformers", "hf", "measuring costs").DynamicCache(config=model.config)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def read(tokens: Tensor) -> float:
        _wait(model.device)
        began = time.perf_counter()
        model(input_ids=tokens, past_key_values=cache, use_cache=True, **last)
        _wait(model.device)
        return 1e3 * (time.perf_counter() - began)

    known = start_peak(model.device)
    prefill = read(ids)
    decode = statistics.median(read(ids[:, place : place + 1]) for place in range(_TOKENS_SAID))
    return {"prefill_ms": prefill, "decode_ms": decode, "peak_mib": peak_mib(model.device) if known else None}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _summary(rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name in ("prefill_ms", "decode_ms", "peak_mib"):
        known = [row[name] for row in rows]
        summary[name] = None if None in known else statistics.median(known)
    for name in ("prefill", "decode"):
        pairs = zip(rows, base, strict=True)
        summary[f"{name}_ratio"] = statistics.median(row[f"{name}_ms"] / other[f"{name}_ms"] for row, other in pairs)
    return summary
