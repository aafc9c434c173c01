"""Costs on the CPU: importing, row statistics and attention (`cpu_tables`), capturing rows (`probe_tables`).

Results that disagree with the float64 reference are not timed. Every round runs each case once, and ratios are taken
in a round, so that noise of the machine affects all cases alike.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.errors import OutOfRangeWarning
from sharpmax.experiments.benchmarks.measuring import (
    Case,
    Note,
    checked,
    distance,
    extra_bytes,
    finite,
    in_fresh_interpreter,
    in_rounds,
    milliseconds,
    random_tokens,
    run_python,
    silent,
    summary,
    targets,
)
from sharpmax.integrations.transformers.interface import observed
from sharpmax.models.language import load_language_model
from sharpmax.ops.attention import attention
from sharpmax.ops.softmax import softmax
from sharpmax.policies.base import Policy
from sharpmax.policies.polynomial import PAPER
from sharpmax.probing.capture import capture, places
from sharpmax.provenance import check_amounts, check_seed
from sharpmax.stats.dispatch import measure, row_stats
from sharpmax.stats.statistics import RowStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sharpmax.stats.call import AttentionCall

FULL_LENGTH, PROBE_LENGTH = 16_384, 8192
"""The lengths for which targets are judged."""

ROUNDS, PROBE_ROUNDS = 5, 3

HEAVY = ("transformers", "jax", "triton", "altair", "ray")
"""Packages that the core must not import."""

_HEADS, _WIDTH = 8, 64
_SAMPLED_ROWS = 32
_STREAMING = "row-stats/streaming"
_STATISTICS = ("count", "max", "lse", "mean", "var", "entropy")

_TARGETS: dict[str, dict[str, float]] = {
    _STREAMING: {"ratio": 1.8, "extra_mb": 300.0},
    "row-stats/stock": {"ratio": 1.1},
    "import/sharpmax": {"ratio": 1.2, "heavy_modules": 0},
    "import/row-stats": {"ratio": 1.2, "heavy_modules": 0},
}
_CAPTURE_TARGETS = {"ratio": 2.5}

_IMPORTS = {"import/sharpmax": "import sharpmax", "import/row-stats": "import sharpmax; sharpmax.row_stats"}

_TIMED = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps([seconds, [name for name in {heavy!r} if name in sys.modules]]))
"""


def import_costs(rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of `import sharpmax`, without and with `sharpmax.row_stats`, against `import torch` in the same round."""

    def timed(statement: str) -> tuple[float, list[str]]:
        seconds, heavy = run_python(_TIMED.format(statement=statement, heavy=HEAVY))
        return seconds, heavy

    if rounds > 1:
        timed("import torch")  # loads files into the disk cache
    found = in_rounds({what: partial(timed, what) for what in ("import torch", *_IMPORTS.values())}, rounds)
    seconds = {what: [spent for spent, _ in each] for what, each in found.items()}
    base = seconds["import torch"]
    return {
        name: {
            "what": what, **summary(seconds[what], "s", base, {}, True), "torch_median_s": statistics.median(base),
            "heavy_modules": found[what][-1][1],
        }
        for name, what in _IMPORTS.items()
    }  # fmt: skip


def _cases(length: int, seed: int, rows: Tensor) -> dict[str, tuple[str, Case]]:
    """Attention over random float32 inputs `[1, H, L, D]`, checked at the given rows against dense float64 logits."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, _HEADS, length, _WIDTH, generator=generator).unbind()
    visible = torch.arange(length) <= rows[:, None]
    exact_q, exact_k, exact_v = q[:, :, rows].double(), k.double(), v.double()
    logits = exact_q @ exact_k.transpose(-1, -2) / math.sqrt(_WIDTH)
    stats = row_stats(exact_q, exact_k, attn_mask=visible, impl="reference")

    def stats_errors(found: RowStats) -> dict[str, float]:
        return {name: distance(getattr(found, name)[..., rows], getattr(stats, name)) for name in _STATISTICS}

    def output_errors(policy: Policy | None) -> Callable[[Tensor], dict[str, float]]:
        exact = softmax(logits, policy=policy, mask=visible) @ exact_v
        return lambda out: {"output": distance(out[..., rows, :], exact)}

    small = dict.fromkeys((*_STATISTICS, "output"), 1e-5)
    return {
        "attention/stock": (
            "torch's scaled_dot_product_attention",
            Case(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True), output_errors(None), small),
        ),
        _STREAMING: (
            "row_stats, every statistic",
            Case(partial(row_stats, q, k, is_causal=True, impl="streaming"), stats_errors, small),
        ),
        "row-stats/stock": (
            "row_stats, entropy from torch's kernel",
            Case(
                lambda: row_stats(q, k, is_causal=True, impl="sdpa", fields=("entropy",)).entropy,
                lambda entropy: {"entropy": distance(entropy[..., rows], stats.entropy)},
                small,
            ),
        ),
        "attention/paper": (
            'attention(policy="paper")',
            # Through β, an error of the entropy becomes an error of the logits that is several times as large.
            Case(partial(attention, q, k, v, is_causal=True, policy="paper"), output_errors(PAPER), {"output": 1e-4}),
        ),
    }


def cpu_tables(length: int = FULL_LENGTH, repeat: int = ROUNDS, seed: int = 0, note: Note = silent) -> dict[str, Any]:
    """The tables `bench` (an entry per case, with targets) and `setting`; `note` is called with progress."""
    check_amounts(length, repeat)
    check_seed(seed)
    note("importing in fresh interpreters")
    imports = import_costs(repeat)
    note("measuring memory in a fresh interpreter")
    extra = in_fresh_interpreter(extra_bytes, length, _HEADS, _WIDTH)
    rows = torch.linspace(0, length - 1, min(length, _SAMPLED_ROWS), dtype=torch.float64).round().long()
    with torch.no_grad(), warnings.catch_warnings():
        # Rows of random logits are outside the polynomial's range, but only its cost matters here.
        warnings.simplefilter("ignore", OutOfRangeWarning)
        note("computing the float64 reference")
        bench = _timed(_cases(length, seed, rows), repeat, note)
    bench[_STREAMING]["extra_mb"] = None if extra is None else extra / 1e6
    bench[_STREAMING]["dense_mb"] = _HEADS * length**2 * 4 / 1e6
    bench |= imports
    for name, entry in bench.items():
        entry["targets"] = targets(_TARGETS.get(name, {}), entry, length >= FULL_LENGTH or name.startswith("import/"))
    setting = {"length": length, "heads": _HEADS, "head_size": _WIDTH, "causal": True, "dtype": "float32"}
    setting |= {"threads": torch.get_num_threads(), "rounds": repeat, "checked_rows": len(rows) * _HEADS}
    return {"bench": bench, "setting": setting | {"targets_are_for_length": FULL_LENGTH}}


def _timed(cases: Mapping[str, tuple[str, Case]], repeat: int, note: Note) -> dict[str, dict[str, Any]]:
    """Errors of each case. For those that agree, also seconds and ratios to the first; the check is the warm-up."""
    found: dict[str, dict[str, Any]] = {}
    for name, (what, case) in cases.items():
        note(f"checking {name}")
        check = checked(case)
        errors = {field: finite(error) for field, error in check.errors.items()}
        found[name] = {"what": what, "agrees": check.agrees, "errors": errors, "tolerance": max(case.allowed.values())}
    correct = {
        name: partial(milliseconds, cases[name][1].run, torch.device("cpu"))
        for name, entry in found.items() if entry["agrees"]
    }  # fmt: skip
    times = in_rounds(correct, repeat, note)
    seconds = {name: [1e-3 * one for one in each] for name, each in times.items()}
    for name, each in seconds.items():
        found[name] |= {"ratio": None} | summary(each, "s", seconds.get(next(iter(cases))), {}, True)
    return found


_MODEL = "smollm2"
_CHECKED_TOKENS = 256


def probe_tables(
    length: int = PROBE_LENGTH, repeat: int = PROBE_ROUNDS, seed: int = 0, note: Note = silent
) -> dict[str, Any]:
    """The tables `bench` (a plain pass, and one per choice of rows) and `setting`; `note` is called with progress."""
    check_amounts(length, repeat)
    check_seed(seed)
    note(f"loading {_MODEL}")
    model = load_language_model(_MODEL).model
    ids, choices = random_tokens(model, length, seed), ("last", "log")

    def read(rows: str | None = None) -> Tensor:
        """The last token's logits, without a cache; rows are captured unless None."""
        with nullcontext() if rows is None else capture(model, rows):
            out: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return out

    with torch.no_grad():
        plain = read()
        cases = {"forward/plain": ("a plain forward pass", Case(read, lambda out: {}, {"output": 0.0}))}
        for rows in choices:

            def errors(out: Tensor, rows: str = rows) -> dict[str, float]:
                changed = float((out - plain).abs().max())
                return {"output": changed, "entropy": entropy_error(model, ids[:, :_CHECKED_TOKENS], rows)}

            case = Case(partial(read, rows), errors, {"output": 0.0, "entropy": 1e-3})
            cases[f"capture/{rows}"] = f"the same while capture measures its rows: {rows}", case
        bench = _timed(cases, repeat, note)
    for rows in choices:
        entry = bench[f"capture/{rows}"]
        entry["targets"] = targets(_CAPTURE_TARGETS, entry, judged=length >= PROBE_LENGTH)
    setting = {"model": _MODEL, "length": length, "rows": {rows: len(places(rows, length)) for rows in choices}}
    setting |= {"dtype": "float32", "threads": torch.get_num_threads(), "rounds": repeat}
    return {"bench": bench, "setting": setting | {"targets_are_for_length": PROBE_LENGTH}}


def entropy_error(model: PreTrainedModel, ids: Tensor, rows: str) -> float:
    """The largest error of a captured entropy in nats, against dense float64 logits."""
    expected: list[Tensor] = []

    def by_definition(call: AttentionCall) -> None:
        expected.append(measure(call, "reference", frozenset({"entropy"})).entropy)

    with observed(model, by_definition), capture(model, rows) as found:
        model(input_ids=ids, use_cache=False)
    pairs = zip(found.calls, expected, strict=True)
    errors = [(call.statistics["entropy"].double() - every[..., call.places]).abs().max() for call, every in pairs]
    return float(torch.stack(errors).max())
