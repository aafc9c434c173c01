"""The GPU benchmark: statistics, attention, a training step and decode, each against PyTorch's own kernels.

Results are checked against float64; incorrect ones are not timed. Every round runs each case once.
"""

from __future__ import annotations

import gc
import json
import re
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.experiments.benchmarks.gpu_inputs import (
    FULL_LENGTH,
    ChosenHeads,
    Inputs,
    Shape,
    decode_shapes,
    drawn,
    in_pages,
    prefill_shapes,
    rows_in_float64,
    sampled_rows,
)
from sharpmax.experiments.benchmarks.measuring import (
    Case,
    Note,
    checked,
    distance,
    finite,
    in_rounds,
    peak_bytes,
    silent,
    spent,
)
from sharpmax.files import write_text
from sharpmax.provenance import check_amounts, check_seed, provenance
from sharpmax.stats.statistics import RowStats

T = TypeVar("T")

KINDS = ("stats", "attention", "train", "decode")
ROUNDS = 20

FLOORS = {"stats": 0.5, "attention": 1.5, "train": None, "decode": 1.03}
"""Lower bounds on the ratio to plain attention, from arithmetic and memory traffic; None where none is known."""

LIMITS: dict[str, dict[str, float]] = {
    "stats": {"mean_ratio": 0.62},
    "attention": {"mean_ratio": 1.62, "ratio": 1.8, "extra_bytes_per_row": 32.0},
    "train": {"mean_ratio": 1.9},
    "decode": {"mean_ratio": 1.12},
}
"""Targets of the mean over the cases that count, and of each of them."""

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""PyTorch's backends without the one that builds the n×n matrix."""

# Matrix products. Plain attention has 2 forward and 5 backward; statistics add 1 and, with recomputed logits, 3.
_PRODUCTS = {"stats": 1, "attention": 3, "train": 11}
_STATISTICS_ERROR = 1e-4  # relative where a statistic exceeds 1
_OUTPUT_FACTOR, _GRADIENT_FACTOR = 2.0, 3.0  # largest error allowed, in multiples of the error of PyTorch's kernel


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Plain attention with the backend that torch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def with_backend(name: str, run: Callable[[], T]) -> Callable[[], T]:
    """`run` with one backend only; it raises `RuntimeError` if that backend does not support the inputs."""

    def alone() -> T:
        with sdpa_kernel([BACKENDS[name]]):
            return run()

    return alone


def _entries(
    x: Inputs,
    ours: Mapping[str, Case],
    theirs: Mapping[str, Case],
    yardstick: Mapping[str, float],
    plain: Mapping[str, float],
    rounds: int,
    note: Note,
) -> list[dict[str, Any]]:
    """Check our cases (by kind) and PyTorch's (by backend), and time those that are correct.

    Times are None where the check failed. `yardstick` holds the errors of PyTorch's kernel on exact inputs, `plain`
    those of plain attention. The check, the memory measurement and an unrecorded round warm up.
    """
    note("checking")
    shape, device, cases = x.shape, x.q.device, {**ours, **theirs}
    checks = {name: checked(case) for name, case in cases.items()}
    correct = {name: partial(spent, cases[name].run, device) for name, one in checks.items() if one.agrees}
    if not any(name in correct for name in theirs):
        raise UnsupportedError(f"--gpu: none of PyTorch's kernels {', '.join(theirs)} takes a case on this device")
    peaks = {name: peak_bytes(cases[name].run, device) for name in correct}
    note("warming up")
    in_rounds(correct, 1)
    times = in_rounds(correct, rounds, note)
    ms, host_ms = ({name: statistics.median(one[at] for one in each) for name, each in times.items()} for at in (0, 1))
    rivals = {name: ms[name] for name in theirs if name in ms}
    best = min(rivals, key=lambda name: rivals[name])
    entries = []
    for kind, case in ours.items():
        entry: dict[str, Any] = {
            "kind": kind, "case": shape.name, "shape": asdict(shape), "counts": shape.counts,
            "agrees": checks[kind].agrees, "problem": checks[kind].problem, "stock_backend": best,
            "floor": FLOORS[kind], "limits": LIMITS[kind], "rounds": rounds,
        }  # fmt: skip
        entry |= dict.fromkeys(("ours_ms", "stock_ms", "ratio", "stock_ms_by_backend", "host_ms", "stock_host_ms"))
        if checks[kind].agrees:
            entry |= {
                "ours_ms": ms[kind], "stock_ms": ms[best], "ratio": ms[kind] / ms[best],
                "stock_ms_by_backend": rivals, "host_ms": host_ms[kind], "stock_host_ms": host_ms[best],
            }  # fmt: skip
            if kind == "decode":
                entry["tb_per_s"] = shape.cache_bytes / ms[kind] / 1e9
            else:
                entry["tflop_per_s"] = _PRODUCTS[kind] * shape.product_flops / ms[kind] / 1e9
            # Row statistics replace nothing, so all their memory is extra.
            here, there = peaks[kind], 0 if kind == "stats" else peaks[best]
            entry["extra_bytes_per_row"] = None if here is None or there is None else (here - there) / shape.rows
        entry["errors"] = {
            field: {
                "ours": finite(error),
                "allowed": case.allowed.get(field),
                "stock": None if kind == "stats" else finite(yardstick[field]),
                "stock_plain": None if kind == "stats" else finite(plain[field]),
            }
            for field, error in checks[kind].errors.items()
        }
        entries.append(entry)
    return entries


def _errors(name: str, given: Tensor, wanted: Tensor) -> dict[str, float]:
    """Largest and root mean square error of a tensor, under its name."""
    error = given.double() - wanted
    return {name: float(error.abs().max()), f"{name} rms": float(error.square().mean().sqrt())}


def _gradient_errors(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    parts = zip(("dq", "dk", "dv"), given, wanted, strict=True)
    return {key: error for name, a, b in parts for key, error in _errors(name, a, b).items()}


def _times(factor: float, errors: Mapping[str, float]) -> dict[str, float]:
    return {name: factor * error for name, error in errors.items()}


def prefill(shape: Shape, *, seed: int, device: torch.device, rounds: int, note: Note = silent) -> list[dict[str, Any]]:
    """The entries of a shape: kinds `stats` and `attention`, or `decode` for a single query.

    PyTorch's kernels cannot read pages, so they get contiguous keys.
    """
    x = drawn(shape, seed=seed, device=device)
    q, k, v = x.q, x.k, x.v
    rows = sampled_rows(shape, device)
    note("computing the float64 reference")
    truth = rows_in_float64(x, rows)

    def stats_errors(found: RowStats) -> dict[str, float]:
        there = ["entropy", *(name for name in ("lse", "mean", "var") if name in found.measured)]
        return {name: distance(getattr(found, name)[..., rows], truth.stats[name]) for name in there}

    def sharp_errors(out: Tensor) -> dict[str, float]:
        return _errors("output", out[:, :, rows], truth.sharp)

    def plain_errors(out: Tensor) -> dict[str, float]:
        return _errors("output", out.view_as(q)[:, :, rows], truth.plain)

    # The error of PyTorch's kernel on the exact β·q, rounded to the dtype of q, is that of rounding alone. Only the
    # sampled rows need it, since rows are independent.
    exact = q.clone()
    exact[:, :, rows] = (truth.beta[..., None] * q[:, :, rows].double()).to(q.dtype)
    yardstick = sharp_errors(attend(exact, k, v, shape.causal))
    plain = plain_errors(attend(q, k, v, shape.causal))
    del exact
    options: dict[str, Any] = {"is_causal": shape.causal, "enable_gqa": shape.group > 1}
    allowed, limits = _times(_OUTPUT_FACTOR, yardstick), _times(_OUTPUT_FACTOR, plain)
    queries = {"": q}
    if shape.queries == 1:
        keys, values, table, lengths = (k, v, None, None)
        if shape.page_size is not None:
            keys, values, table, lengths = in_pages(x, shape.page_size, seed)
        decode = partial(sm.decode, q, keys, values, block_table=table, lengths=lengths, policy="paper")
        ours = {"decode": Case(decode, sharp_errors, allowed)}
        # Query heads that share keys can also be passed as rows of one head, which is faster in some kernels.
        queries[", folded"] = q.view(shape.batch, shape.kv_heads, shape.group, shape.width)
    else:
        statistics_allowed = dict.fromkeys(truth.stats, _STATISTICS_ERROR)
        ours = {
            "stats": Case(partial(sm.row_stats, q, k, fields={"entropy"}, **options), stats_errors, statistics_allowed),
            "attention": Case(partial(sm.attention, q, k, v, policy="paper", **options), sharp_errors, allowed),
        }
    theirs = {
        name + how: Case(with_backend(name, partial(attend, query, k, v, shape.causal)), plain_errors, limits)
        for how, query in queries.items()
        for name in BACKENDS
    }
    return _entries(x, ours, theirs, yardstick, plain, rounds, note)


def training(
    shape: Shape, *, seed: int, device: torch.device, rounds: int, note: Note = silent
) -> list[dict[str, Any]]:
    """The entry of a shape, of kind `train`."""
    x = drawn(shape, seed=seed, device=device)
    note("computing the float64 reference")
    heads = ChosenHeads.of(x)
    plain_truth, sharp_truth = heads.exact(None), heads.exact("paper")

    def step(attention: Callable[..., Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        inputs = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]

        def gradients() -> tuple[Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(attention(*inputs), inputs, x.upstream)

        return gradients

    def plain_errors(found: tuple[Tensor, ...]) -> dict[str, float]:
        return _gradient_errors(heads.part(shape, *found), plain_truth)

    def sharp_errors(found: tuple[Tensor, ...]) -> dict[str, float]:
        return _gradient_errors(heads.part(shape, *found), sharp_truth)

    sharp = step(partial(sm.attention, is_causal=shape.causal, enable_gqa=shape.group > 1, policy="paper"))
    plain_step = step(partial(attend, causal=shape.causal))
    plain = plain_errors(plain_step())
    yardstick = _gradient_errors(_rounded(heads), sharp_truth)
    ours = {"train": Case(sharp, sharp_errors, _times(_GRADIENT_FACTOR, yardstick))}
    limits = _times(_GRADIENT_FACTOR, plain)
    theirs = {name: Case(with_backend(name, plain_step), plain_errors, limits) for name in BACKENDS}
    return _entries(x, ours, theirs, yardstick, plain, rounds, note)


def _rounded(heads: ChosenHeads) -> list[Tensor]:
    """PyTorch's gradients where β, its gradient and the sums of the parts are exact."""
    beta, dtype = heads.beta()[..., None], heads.q.dtype
    exact = (beta * heads.q.double()).to(dtype)
    inputs = [y.requires_grad_() for y in (exact, heads.k[:, None].clone(), heads.v[:, None].clone())]
    with torch.enable_grad():
        out = attend(inputs[0], inputs[1], inputs[2], heads.shape.causal)
        into_q, into_k, into_v = torch.autograd.grad(out, inputs, heads.upstream)
    through_q, through_k, _ = heads.through_beta((heads.q.double() * into_q.double()).sum(-1))
    into_q, into_k = beta * into_q.double() + through_q, into_k[:, 0].double() + through_k
    return [into_q.to(dtype), into_k.to(dtype), into_v[:, 0]]


def gpu_entries(
    device: torch.device, *, length: int = FULL_LENGTH, repeat: int = ROUNDS, seed: int = 0, command: str = "",
    note: Note = silent,
) -> list[dict[str, Any]]:  # fmt: skip
    """The entries of every case, in the order of `KINDS`, with command and provenance."""
    check_amounts(length, repeat)
    check_seed(seed)
    long, one = prefill_shapes(length), decode_shapes(length)
    table = [("attention", prefill, shape) for shape in long]
    table += [("train", training, shape) for shape in long if shape.counts]
    table += [("decode", prefill, shape) for shape in one]
    found: list[dict[str, Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        # Flat rows are outside the polynomial's range on purpose, and PyTorch's kernels warn about slow inputs.
        warnings.simplefilter("ignore", UserWarning)
        for kind, measure, shape in table:

            def tell(text: str, title: str = f"{kind}, {shape.name}") -> None:
                note(f"{title}: {text}")

            found += measure(shape, seed=seed, device=device, rounds=1 if shape.once else repeat, note=tell)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    origin = {"full_size": length == FULL_LENGTH, "command": command, "provenance": provenance(seed)}
    return sorted((one | origin for one in found), key=lambda one: KINDS.index(one["kind"]))


def slug(gpu: str) -> str:
    """The file name for a device.

    >>> slug("NVIDIA H200"), slug("NVIDIA GeForce RTX 4090")
    ('h200', 'geforce-rtx-4090')
    """
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd")) or "gpu"


def save(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Write entries as a JSON list."""
    return write_text(path, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
