"""Cost of row statistics and attention on the CPU, next to PyTorch's own attention in the same run.

Results that disagree with the float64 reference are not timed. Every round runs each case once and ratios are taken
within a round, so that noise of the machine affects all cases alike.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.benchmarks.measuring import Note, resident_bytes, run_python, silent, targets
from sharpmax.ops.attention import attention
from sharpmax.ops.softmax import softmax
from sharpmax.policies.polynomial import PAPER
from sharpmax.provenance import check_amounts, check_seed
from sharpmax.stats.dispatch import row_stats
from sharpmax.stats.statistics import RowStats

HEAVY = ("transformers", "jax", "triton", "altair", "ray")
"""Packages that using the core must not import."""

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
    seconds: dict[str, list[float]] = {name: [] for name in _STATEMENTS}
    heavy: dict[str, list[str]] = {}
    if rounds > 1:
        _timed_import(_STATEMENTS["torch"])  # brings its files into the disk cache
    for _ in range(rounds):
        for name, statement in _STATEMENTS.items():
            spent, heavy[name] = _timed_import(statement)
            seconds[name].append(spent)
    torch_seconds = seconds.pop("torch")
    return {
        name: {
            "what": _STATEMENTS[name],
            "median_s": statistics.median(spent),
            "min_s": min(spent),
            "torch_median_s": statistics.median(torch_seconds),
            "ratio": statistics.median(s / t for s, t in zip(spent, torch_seconds, strict=True)),
            "rounds": rounds,
            "heavy_modules": heavy[name],
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


FULL_LENGTH = 16_384
"""The length the targets are meant for."""

_HEADS, _WIDTH = 8, 64
_SAMPLED_ROWS = 32
_STOCK = "attention/stock"
_STREAMING = "row-stats/streaming"

_TARGETS: dict[str, dict[str, float]] = {
    _STREAMING: {"ratio": 1.8, "extra_mb": 300.0},
    "row-stats/stock": {"ratio": 1.1},
    "import/sharpmax": {"ratio": 1.2, "heavy_modules": 0},
    "import/row-stats": {"ratio": 1.2, "heavy_modules": 0},
}


@dataclass(frozen=True)
class _Inputs:
    """Random queries, keys and values `[1, H, L, D]` in float32, and the rows that are checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor

    @classmethod
    def drawn(cls, length: int, seed: int) -> _Inputs:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = torch.randn(3, 1, _HEADS, length, _WIDTH, generator=generator).unbind()
        rows = torch.linspace(0, length - 1, min(length, _SAMPLED_ROWS), dtype=torch.float64).round().long()
        return cls(q, k, v, rows)


@dataclass(frozen=True)
class _Reference:
    """The sampled rows from dense logits in float64."""

    rows: Tensor
    stats: RowStats
    plain: Tensor
    sharp: Tensor

    @classmethod
    def of(cls, x: _Inputs) -> _Reference:
        seen = torch.arange(x.k.shape[-2]) <= x.rows[:, None]
        q, k, v = x.q[:, :, x.rows].double(), x.k.double(), x.v.double()
        logits = q @ k.transpose(-1, -2) / math.sqrt(_WIDTH)
        return cls(
            rows=x.rows,
            stats=row_stats(q, k, attn_mask=seen, impl="reference"),
            plain=softmax(logits, policy=None, mask=seen) @ v,
            sharp=softmax(logits, policy=PAPER, mask=seen) @ v,
        )


@dataclass(frozen=True)
class _Case:
    """Something to time, and its errors against the reference."""

    what: str
    run: Callable[[_Inputs], Any]
    errors: Callable[[Any, _Reference], dict[str, float]]
    tolerance: float


def _stats_errors(fields: tuple[str, ...]) -> Callable[[RowStats, _Reference], dict[str, float]]:
    def errors(stats: RowStats, reference: _Reference) -> dict[str, float]:
        return {
            field: _distance(getattr(stats, field)[..., reference.rows], getattr(reference.stats, field))
            for field in fields
        }

    return errors


def _distance(given: Tensor, wanted: Tensor) -> float:
    """Largest error, relative where the wanted value exceeds 1; NaN, which no tolerance allows, if any is NaN."""
    wanted = wanted.double()
    return float(((given.double() - wanted).abs() / wanted.abs().clamp_min(1.0)).max())


_CASES: dict[str, _Case] = {
    _STOCK: _Case(
        what="torch's scaled_dot_product_attention",
        run=lambda x: F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=True),
        errors=lambda out, ref: {"output": _distance(out[..., ref.rows, :], ref.plain)},
        tolerance=1e-5,
    ),
    _STREAMING: _Case(
        what="row_stats, every statistic",
        run=lambda x: row_stats(x.q, x.k, is_causal=True, impl="streaming"),
        errors=_stats_errors(("count", "max", "lse", "mean", "var", "entropy")),
        tolerance=1e-5,
    ),
    "row-stats/stock": _Case(
        what="row_stats, entropy from torch's kernel",
        run=lambda x: row_stats(x.q, x.k, is_causal=True, impl="sdpa", fields=("entropy",)).entropy,
        errors=lambda entropy, ref: {"entropy": _distance(entropy[..., ref.rows], ref.stats.entropy)},
        tolerance=1e-5,
    ),
    "attention/paper": _Case(
        what='attention(policy="paper")',
        run=lambda x: attention(x.q, x.k, x.v, is_causal=True, policy="paper"),
        errors=lambda out, ref: {"output": _distance(out[..., ref.rows, :], ref.sharp)},
        # β turns an error of the entropy into one of the logits, several times as large.
        tolerance=1e-4,
    ),
}


def cpu_tables(length: int = FULL_LENGTH, repeat: int = 5, seed: int = 0, note: Note = silent) -> dict[str, Any]:
    """The tables `bench` (one entry per case, with targets) and `setting`; `note` is called with progress."""
    check_amounts(length, repeat)
    check_seed(seed)
    note("importing in fresh interpreters")
    bench: dict[str, dict[str, Any]] = import_costs(repeat)
    note("measuring memory in a fresh interpreter")
    extra = peak_extra_bytes(length, _HEADS, _WIDTH)
    with torch.no_grad(), warnings.catch_warnings():
        # Rows of random logits lie beyond the polynomial's range; only its cost is timed here.
        warnings.simplefilter("ignore", OutOfRangeWarning)
        inputs = _Inputs.drawn(length, seed)
        cases = _checked(inputs, note)
        _time(cases, inputs, repeat, note)
    cases[_STREAMING]["extra_mb"] = None if extra is None else extra / 1e6
    cases[_STREAMING]["dense_mb"] = _HEADS * length**2 * 4 / 1e6
    bench = cases | bench
    for name, entry in bench.items():
        judged = length >= FULL_LENGTH or name.startswith("import/")
        entry["targets"] = _targets(name, entry, judged)
    setting = {
        "length": length,
        "heads": _HEADS,
        "head_size": _WIDTH,
        "causal": True,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rounds": repeat,
        "checked_rows": len(inputs.rows) * _HEADS,
        "targets_are_for_length": FULL_LENGTH,
    }
    return {"bench": bench, "setting": setting}


def disagreeing(tables: dict[str, Any]) -> list[str]:
    """The cases that disagree with the reference."""
    return [name for name, entry in tables["bench"].items() if not entry.get("agrees", True)]


def _checked(inputs: _Inputs, note: Note) -> dict[str, dict[str, Any]]:
    note("computing the float64 reference")
    reference = _Reference.of(inputs)
    found = {}
    for name, case in _CASES.items():
        note(f"checking {name}")
        errors = case.errors(case.run(inputs), reference)
        # Written this way round so that NaN does not pass.
        agrees = all(error <= case.tolerance for error in errors.values())
        found[name] = {
            "what": case.what,
            "agrees": agrees,
            "errors": {field: error if math.isfinite(error) else None for field, error in errors.items()},
            "tolerance": case.tolerance,
        }
    return found


def _time(found: dict[str, dict[str, Any]], inputs: _Inputs, repeat: int, note: Note) -> None:
    """Add seconds and ratios to the cases that agree; their check was the warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name, entry in found.items() if entry["agrees"]}
    for done in range(repeat):
        for name, spent in seconds.items():
            note(f"round {done + 1} of {repeat}: {name}")
            start = time.perf_counter()
            _CASES[name].run(inputs)
            spent.append(time.perf_counter() - start)
    stock = seconds.get(_STOCK)
    for name, spent in seconds.items():
        ratio = None if stock is None else statistics.median(s / t for s, t in zip(spent, stock, strict=True))
        found[name] |= {"median_s": statistics.median(spent), "min_s": min(spent), "ratio": ratio, "rounds": repeat}


def _targets(name: str, entry: dict[str, Any], judged: bool) -> dict[str, dict[str, Any]]:
    return targets(_TARGETS.get(name, {}), entry, judged)
