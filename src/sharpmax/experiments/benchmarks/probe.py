"""Cost of capturing attention rows of a language model on the CPU, next to a plain forward pass.

There is no timing where a captured entropy is not that of float64 or the output changes by a bit. Every pass runs in an
interpreter of its own, which reports its memory; ratios are taken within a round.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sharpmax.experiments.benchmarks.measuring import (
    Note,
    peak_mib,
    random_tokens,
    reset_peak,
    run_python,
    silent,
    targets,
)
from sharpmax.integrations.transformers.interface import observed
from sharpmax.models.language import load_language_model
from sharpmax.probing.capture import capture, check_choice, places
from sharpmax.provenance import check_amounts, check_seed
from sharpmax.stats.dispatch import measure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.stats.call import AttentionCall

PLAIN = "plain"

_SHORT = 256


def one_pass(model: PreTrainedModel, length: int, rows: str, seed: int) -> dict[str, Any]:
    """Read `length` random tokens, plainly or while `rows` are captured: seconds, peak memory, digest of the output.

    A short input is read before, with which threads and libraries start. `entropy_error` is how far captured entropies
    of that input are from float64.
    """
    ids = random_tokens(model, length, seed)
    error = None if rows == PLAIN else entropy_error(model, ids[:, :_SHORT], rows)
    _read(model, ids[:, :_SHORT], rows)
    known = reset_peak(model.device)
    began, worked = time.perf_counter(), time.process_time()
    out = _read(model, ids, rows)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - worked
    digest = hashlib.sha256(out.float().numpy().tobytes()).hexdigest()[:16]
    peak = peak_mib(model.device) if known else None
    return {
        "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": peak, "output": digest, "entropy_error": error,
    }  # fmt: skip


def entropy_error(model: PreTrainedModel, ids: Tensor, rows: str) -> float:
    """The largest distance of a captured entropy, in nats, from that of the dense logits in float64."""
    expected: list[Tensor] = []

    def by_definition(call: AttentionCall) -> None:
        expected.append(measure(call, "reference", frozenset({"entropy"})).entropy)

    with observed(model, by_definition), capture(model, rows) as found:
        _read(model, ids, PLAIN)
    pairs = zip(found.calls, expected, strict=True)
    errors = [(call.statistics["entropy"].double() - every[..., call.places]).abs().max() for call, every in pairs]
    return float(torch.stack(errors).max())


def _read(model: PreTrainedModel, ids: Tensor, rows: str) -> Tensor:
    """The last token's logits, without a cache."""
    with torch.no_grad(), nullcontext() if rows == PLAIN else capture(model, rows):
        out: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return out


def print_pass() -> None:
    """In a fresh interpreter: measure one pass, print it as JSON."""
    name, length, rows, seed = sys.argv[1:5]
    print(json.dumps(one_pass(load_language_model(name).model, int(length), rows, int(seed))))


def pass_costs(model: str, length: int, rows: str, seed: int) -> dict[str, Any]:
    """`one_pass` of a model by name, in a fresh interpreter."""
    code = f"from {__name__} import print_pass; print_pass()"
    found: dict[str, Any] = run_python(["-c", code, model, str(length), rows, str(seed)])
    return found


FULL_LENGTH = 8192
"""The length the targets are meant for."""

ROUNDS = 3

_MODEL = "smollm2"
_TARGETS = {"ratio": 2.5, "peak_ratio": 1.3}
_TOLERANCE = 1e-3


def probe_tables(
    length: int = FULL_LENGTH,
    rows: Sequence[str] = ("last", "log"),
    repeat: int = ROUNDS,
    seed: int = 0,
    note: Note = silent,
) -> dict[str, Any]:
    """The tables `bench` (a plain pass, one per choice of rows) and `setting`; `note` is called with progress."""
    check_amounts(length, repeat)
    check_seed(seed)
    for one in rows:
        check_choice(one)
    passes: dict[str, list[dict[str, Any]]] = {choice: [] for choice in (PLAIN, *rows)}
    for done in range(repeat):
        for choice, found in passes.items():
            note(f"round {done + 1} of {repeat}: {choice}")
            found.append(pass_costs(_MODEL, length, choice, seed))
    bench = {f"capture/{choice}": _entry(passes[choice], passes[PLAIN], choice, length) for choice in rows}
    setting = {
        "model": _MODEL,
        "length": length,
        "rows": {choice: len(places(choice, length)) for choice in rows},
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rounds": repeat,
        "targets_are_for_length": FULL_LENGTH,
    }
    plain = {"what": "a plain forward pass", **_spent(passes[PLAIN])}
    return {"bench": {"forward/plain": plain, **bench}, "setting": setting}


def _entry(
    found: list[dict[str, Any]], plain: list[dict[str, Any]], choice: str, length: int
) -> dict[str, dict[str, Any]]:
    errors = [one["entropy_error"] for one in found]
    same = {one["output"] for one in (*found, *plain)}
    entry: dict[str, Any] = {
        "what": f"the same while capture measures its rows: {choice}",
        # Written this way round so that NaN does not pass.
        "agrees": len(same) == 1 and all(error <= _TOLERANCE for error in errors),
        "errors": {"entropy": max(errors) if all(map(math.isfinite, errors)) else None},
        "tolerance": _TOLERANCE,
        "same_output": len(same) == 1,
    }
    if entry["agrees"]:
        entry |= _spent(found)
        entry["ratio"] = _ratio("seconds", found, plain)
        entry["cpu_ratio"] = _ratio("cpu_seconds", found, plain)
        entry["peak_ratio"] = _ratio("peak_mib", found, plain)
        entry["targets"] = targets(_TARGETS, entry, judged=length >= FULL_LENGTH)
    return entry


def _spent(found: list[dict[str, Any]]) -> dict[str, Any]:
    seconds, cpu, peaks = ([one[quantity] for one in found] for quantity in ("seconds", "cpu_seconds", "peak_mib"))
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "cpu_s": statistics.median(cpu),
        "peak_mib": None if None in peaks else statistics.median(peaks),
        "rounds": len(found),
    }


def _ratio(quantity: str, found: list[dict[str, Any]], plain: list[dict[str, Any]]) -> float | None:
    pairs = [(one[quantity], other[quantity]) for one, other in zip(found, plain, strict=True)]
    return None if None in sum(pairs, ()) else statistics.median(one / other for one, other in pairs)
