"""Costs on the CPU: importing, row statistics and attention (`cpu_tables`), capturing rows (`probe_tables`).

Results that disagree with the float64 reference are not timed. Every round runs each case once and ratios are taken
within a round, so that noise of the machine affects all cases alike.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.benchmarks.measuring import (
    Note,
    distance,
    in_rounds,
    median_ratio,
    peak_mib,
    random_tokens,
    reset_peak,
    resident_bytes,
    run_python,
    silent,
    targets,
)
from sharpmax.integrations.transformers.interface import observed
from sharpmax.models.language import load_language_model
from sharpmax.ops.attention import attention
from sharpmax.ops.softmax import softmax
from sharpmax.policies.polynomial import PAPER
from sharpmax.probing.capture import capture, check_choice, places
from sharpmax.provenance import check_amounts, check_seed
from sharpmax.stats.dispatch import measure, row_stats
from sharpmax.stats.statistics import RowStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.stats.call import AttentionCall

FULL_LENGTH, PROBE_LENGTH = 16_384, 8192
"""The lengths that targets are meant for."""

ROUNDS, PROBE_ROUNDS = 5, 3

HEAVY = ("transformers", "jax", "triton", "altair", "ray")
"""Packages that using the core must not import."""

_HEADS, _WIDTH = 8, 64
_SAMPLED_ROWS = 32
_STOCK = "attention/stock"
_STREAMING = "row-stats/streaming"
_STATISTICS = ("count", "max", "lse", "mean", "var", "entropy")

_TARGETS: dict[str, dict[str, float]] = {
    _STREAMING: {"ratio": 1.8, "extra_mb": 300.0},
    "row-stats/stock": {"ratio": 1.1},
    "import/sharpmax": {"ratio": 1.2, "heavy_modules": 0},
    "import/row-stats": {"ratio": 1.2, "heavy_modules": 0},
}
_CAPTURE_TARGETS = {"ratio": 2.5, "peak_ratio": 1.3}

_STATEMENTS = {
    "torch": "import torch",
    "import/sharpmax": "import sharpmax",
    "import/row-stats": "import sharpmax; sharpmax.row_stats",
}

_TIMED = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps([seconds, [name for name in {heavy!r} if name in sys.modules]]))
"""


def import_costs(rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of `import sharpmax`, and of that with `sharpmax.row_stats`, against `import torch` in the same round."""
    if rounds > 1:
        _timed_import(_STATEMENTS["torch"])  # brings its files into the disk cache
    found = in_rounds({name: partial(_timed_import, one) for name, one in _STATEMENTS.items()}, rounds)
    seconds = {name: [spent for spent, _ in timed] for name, timed in found.items()}
    torch_seconds = seconds.pop("torch")
    return {
        name: {
            "what": _STATEMENTS[name],
            "median_s": statistics.median(spent),
            "min_s": min(spent),
            "torch_median_s": statistics.median(torch_seconds),
            "ratio": median_ratio(spent, torch_seconds),
            "rounds": rounds,
            "heavy_modules": found[name][-1][1],
        }
        for name, spent in seconds.items()
    }


def _timed_import(statement: str) -> tuple[float, list[str]]:
    spent, heavy = run_python(["-c", _TIMED.format(statement=statement, heavy=HEAVY)])
    return spent, heavy


def peak_extra_bytes(length: int, heads: int, width: int) -> int | None:
    """How far `row_stats(impl="streaming")` raises memory, in a fresh interpreter; None where it is unknown."""
    code = f"from {__name__} import print_extra_bytes; print_extra_bytes()"
    extra: int | None = run_python(["-c", code, str(length), str(heads), str(width)])
    return extra


def print_extra_bytes() -> None:
    """In a fresh interpreter: print how far `row_stats(impl="streaming")` lifts the memory of its process, in bytes."""
    length, heads, width = (int(word) for word in sys.argv[1:4])
    with torch.no_grad():
        q, k = torch.randn(2, 1, heads, length, width).unbind()
        # Libraries and thread pools start with the first call; they are not the cost of a longer input.
        row_stats(q[:, :, :64], k[:, :, :64], is_causal=True, impl="streaming")
        before = resident_bytes()
        stats = row_stats(q, k, is_causal=True, impl="streaming")
        after = resident_bytes()
    # The level now against the peak later errs on the high side if the start-up peaked above its own level.
    print(json.dumps(after[1] - before[0] if before and after and stats else None))


@dataclass(frozen=True)
class _CpuCase:
    """Something to time, and the errors of its result against the reference."""

    what: str
    run: Callable[[], Any]
    errors: Callable[[Any], dict[str, float]]
    tolerance: float = 1e-5


def _cases(length: int, seed: int, rows: Tensor) -> dict[str, _CpuCase]:
    """Attention of random float32 inputs `[1, H, L, D]`; the given rows are checked against dense float64 logits."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, _HEADS, length, _WIDTH, generator=generator).unbind()
    visible = torch.arange(length) <= rows[:, None]
    exact_q, exact_k, exact_v = q[:, :, rows].double(), k.double(), v.double()
    logits = exact_q @ exact_k.transpose(-1, -2) / math.sqrt(_WIDTH)
    stats = row_stats(exact_q, exact_k, attn_mask=visible, impl="reference")
    plain = softmax(logits, policy=None, mask=visible) @ exact_v
    sharp = softmax(logits, policy=PAPER, mask=visible) @ exact_v

    def stats_errors(found: RowStats) -> dict[str, float]:
        return {name: distance(getattr(found, name)[..., rows], getattr(stats, name)) for name in _STATISTICS}

    return {
        _STOCK: _CpuCase(
            "torch's scaled_dot_product_attention",
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda out: {"output": distance(out[..., rows, :], plain)},
        ),
        _STREAMING: _CpuCase(
            "row_stats, every statistic", lambda: row_stats(q, k, is_causal=True, impl="streaming"), stats_errors
        ),
        "row-stats/stock": _CpuCase(
            "row_stats, entropy from torch's kernel",
            lambda: row_stats(q, k, is_causal=True, impl="sdpa", fields=("entropy",)).entropy,
            lambda entropy: {"entropy": distance(entropy[..., rows], stats.entropy)},
        ),
        "attention/paper": _CpuCase(
            'attention(policy="paper")',
            lambda: attention(q, k, v, is_causal=True, policy="paper"),
            lambda out: {"output": distance(out[..., rows, :], sharp)},
            # β turns an error of the entropy into one of the logits, several times as large.
            tolerance=1e-4,
        ),
    }


def cpu_tables(length: int = FULL_LENGTH, repeat: int = ROUNDS, seed: int = 0, note: Note = silent) -> dict[str, Any]:
    """The tables `bench` (one entry per case, with targets) and `setting`; `note` is called with progress."""
    check_amounts(length, repeat)
    check_seed(seed)
    note("importing in fresh interpreters")
    imports = import_costs(repeat)
    note("measuring memory in a fresh interpreter")
    extra = peak_extra_bytes(length, _HEADS, _WIDTH)
    rows = torch.linspace(0, length - 1, min(length, _SAMPLED_ROWS), dtype=torch.float64).round().long()
    with torch.no_grad(), warnings.catch_warnings():
        # Rows of random logits lie beyond the polynomial's range; only its cost is timed here.
        warnings.simplefilter("ignore", OutOfRangeWarning)
        note("computing the float64 reference")
        bench = _timed(_cases(length, seed, rows), repeat, note)
    bench[_STREAMING]["extra_mb"] = None if extra is None else extra / 1e6
    bench[_STREAMING]["dense_mb"] = _HEADS * length**2 * 4 / 1e6
    bench |= imports
    for name, entry in bench.items():
        judged = length >= FULL_LENGTH or name.startswith("import/")
        entry["targets"] = targets(_TARGETS.get(name, {}), entry, judged)
    setting = {
        "length": length,
        "heads": _HEADS,
        "head_size": _WIDTH,
        "causal": True,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rounds": repeat,
        "checked_rows": len(rows) * _HEADS,
        "targets_are_for_length": FULL_LENGTH,
    }
    return {"bench": bench, "setting": setting}


def _timed(cases: dict[str, _CpuCase], repeat: int, note: Note) -> dict[str, dict[str, Any]]:
    """Errors of each case; seconds and ratios of those that agree, whose check was the warm-up."""
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        note(f"checking {name}")
        errors = case.errors(case.run())
        found[name] = {
            "what": case.what,
            # Written this way round so that NaN does not pass.
            "agrees": all(error <= case.tolerance for error in errors.values()),
            "errors": {field: error if math.isfinite(error) else None for field, error in errors.items()},
            "tolerance": case.tolerance,
        }
    correct = {name: partial(_seconds, cases[name].run) for name, entry in found.items() if entry["agrees"]}
    seconds = in_rounds(correct, repeat, note)
    for name, spent in seconds.items():
        ratio = median_ratio(spent, seconds[_STOCK]) if _STOCK in seconds else None
        found[name] |= {"median_s": statistics.median(spent), "min_s": min(spent), "ratio": ratio, "rounds": repeat}
    return found


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


PLAIN = "plain"

_MODEL = "smollm2"
_WARM_UP = 256  # tokens with which threads and libraries start
_TOLERANCE = 1e-3


def one_pass(model: PreTrainedModel, length: int, rows: str, seed: int) -> dict[str, Any]:
    """Read `length` random tokens, plainly or while `rows` are captured: seconds, peak memory, digest of the output.

    `entropy_error` is how far captured entropies of a shorter input, which is read before, are from float64.
    """
    ids = random_tokens(model, length, seed)
    error = None if rows == PLAIN else entropy_error(model, ids[:, :_WARM_UP], rows)
    _read(model, ids[:, :_WARM_UP], rows)
    known = reset_peak(model.device)
    began, worked = time.perf_counter(), time.process_time()
    out = _read(model, ids, rows)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
        "peak_mib": peak_mib(model.device) if known else None,
        "output": hashlib.sha256(out.float().numpy().tobytes()).hexdigest()[:16],
        "entropy_error": error,
    }


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
    """`one_pass` of a model by name, in a fresh interpreter, so that its memory is its own."""
    code = f"from {__name__} import print_pass; print_pass()"
    found: dict[str, Any] = run_python(["-c", code, model, str(length), rows, str(seed)])
    return found


def probe_tables(
    length: int = PROBE_LENGTH,
    rows: Sequence[str] = ("last", "log"),
    repeat: int = PROBE_ROUNDS,
    seed: int = 0,
    note: Note = silent,
) -> dict[str, Any]:
    """The tables `bench` (a plain pass, one per choice of rows) and `setting`; `note` is called with progress."""
    check_amounts(length, repeat)
    check_seed(seed)
    for one in rows:
        check_choice(one)
    choices = {choice: partial(pass_costs, _MODEL, length, choice, seed) for choice in (PLAIN, *rows)}
    passes = in_rounds(choices, repeat, note)
    bench = {f"capture/{choice}": _capture_entry(passes[choice], passes[PLAIN], choice, length) for choice in rows}
    setting = {
        "model": _MODEL,
        "length": length,
        "rows": {choice: len(places(choice, length)) for choice in rows},
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rounds": repeat,
        "targets_are_for_length": PROBE_LENGTH,
    }
    plain = {"what": "a plain forward pass", **_spent(passes[PLAIN])}
    return {"bench": {"forward/plain": plain, **bench}, "setting": setting}


def _capture_entry(
    found: list[dict[str, Any]], plain: list[dict[str, Any]], choice: str, length: int
) -> dict[str, dict[str, Any]]:
    errors = [one["entropy_error"] for one in found]
    same = len({one["output"] for one in (*found, *plain)}) == 1
    entry: dict[str, Any] = {
        "what": f"the same while capture measures its rows: {choice}",
        # Written this way round so that NaN does not pass.
        "agrees": same and all(error <= _TOLERANCE for error in errors),
        "errors": {"entropy": max(errors) if all(map(math.isfinite, errors)) else None},
        "tolerance": _TOLERANCE,
        "same_output": same,
    }
    if entry["agrees"]:
        entry |= _spent(found)
        for name, quantity in (("ratio", "seconds"), ("cpu_ratio", "cpu_seconds"), ("peak_ratio", "peak_mib")):
            values, base = ([one[quantity] for one in passes] for passes in (found, plain))
            entry[name] = None if None in values + base else median_ratio(values, base)
        entry["targets"] = targets(_CAPTURE_TARGETS, entry, judged=length >= PROBE_LENGTH)
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
