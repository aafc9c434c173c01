"""The GPU benchmark: statistics, attention, training step and decode."""

from __future__ import annotations

import gc
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.experiments.benchmarks.gpu_inputs import (
    FULL_LENGTH,
    Gradients,
    Heads,
    Inputs,
    Shape,
    chosen_heads,
    decode_shapes,
    distance,
    drawn,
    in_pages,
    prefill_shapes,
    rows_in_float64,
    sampled_rows,
    spread,
)
from sharpmax.experiments.benchmarks.gpu_timing import BACKENDS, Runner, attend, contest, entry, times, with_backend
from sharpmax.experiments.benchmarks.measuring import Note, silent
from sharpmax.files import write_text
from sharpmax.provenance import check_amounts, check_seed, provenance
from sharpmax.stats.statistics import RowStats

_OF_STATISTICS = 1e-4  # error that a statistic may have, relative where it exceeds 1
TIMES = 2.0
"""Error that an output may have, in errors of PyTorch's kernel."""


def prefill(shape: Shape, *, seed: int, device: torch.device, rounds: int, note: Note = silent) -> list[dict[str, Any]]:
    """The entries of a shape, of the kinds `stats` and `attention`."""
    x = drawn(shape, seed=seed, device=device)
    q, k, v, causal, grouped = x.q, x.k, x.v, shape.causal, shape.group > 1
    rows = sampled_rows(shape, device)
    note("computing the float64 reference")
    truth = rows_in_float64(x, rows)

    def stats_errors(found: RowStats) -> dict[str, float]:
        there = ["entropy", *(name for name in ("lse", "mean", "var") if name in found.measured)]
        return {name: distance(getattr(found, name)[..., rows], truth.stats[name]) for name in there}

    def sharp_errors(out: Tensor) -> dict[str, float]:
        return spread("output", out[:, :, rows], truth.sharp)

    def plain_errors(out: Tensor) -> dict[str, float]:
        return spread("output", out[:, :, rows], truth.plain)

    # What PyTorch's kernel makes of the exact β·q in the dtype of q is what rounding costs anybody. Rows are
    # independent, so only the sampled ones need it.
    exact = q.clone()
    exact[:, :, rows] = (truth.beta[..., None] * q[:, :, rows].double()).to(q.dtype)
    yardstick = sharp_errors(attend(exact, k, v, causal))
    plain = plain_errors(attend(q, k, v, causal))
    del exact
    ours = {
        "stats": Runner(
            lambda: sm.row_stats(q, k, is_causal=causal, enable_gqa=grouped, fields={"entropy"}),
            stats_errors,
            dict.fromkeys(truth.stats, _OF_STATISTICS),
        ),
        "attention": Runner(
            lambda: sm.attention(q, k, v, is_causal=causal, enable_gqa=grouped, policy="paper"),
            sharp_errors,
            times(TIMES, yardstick),
        ),
    }
    limits = times(TIMES, plain)
    stock = {
        name: Runner(with_backend(name, lambda: attend(q, k, v, causal)), plain_errors, limits) for name in BACKENDS
    }
    found, rivals = contest(ours, stock, device=device, rounds=rounds, note=note)
    return [
        entry(kind, x, outcome, rivals, rounds=rounds, allowed=ours[kind].allowed, yardstick=yardstick, plain=plain)
        for kind, outcome in found.items()
    ]


def can_decode() -> bool:
    """Whether this sharpmax decodes with a kernel of its own."""
    return hasattr(sm, "decode")


def decoding(shape: Shape, *, seed: int, device: torch.device, rounds: int, note: Note = silent) -> dict[str, Any]:
    """The entry of a shape, of the kind `decode`.

    PyTorch's kernels read no pages: they get the same keys in one piece.
    """
    x = drawn(shape, seed=seed, device=device)
    note("computing the float64 reference")
    truth = rows_in_float64(x, sampled_rows(shape, device))
    exact = (truth.beta[..., None] * x.q.double()).to(x.q.dtype)
    yardstick = spread("output", attend(exact, x.k, x.v), truth.sharp)
    plain = spread("output", attend(x.q, x.k, x.v), truth.plain)
    allowed = times(TIMES, yardstick)
    ours = {"decode": Runner(_ours(x, seed), lambda out: spread("output", out, truth.sharp), allowed)}
    limits = times(TIMES, plain)

    def rival(name: str, run: Callable[[], Tensor]) -> Runner:
        return Runner(with_backend(name, run), lambda out: spread("output", out.view_as(x.q), truth.plain), limits)

    # Query heads that share their keys can also be passed as query rows of one head, which suits some kernels better.
    folded = x.q.view(shape.batch, shape.kv_heads, shape.group, shape.width)
    stock = {name: rival(name, lambda: attend(x.q, x.k, x.v)) for name in BACKENDS}
    stock |= {f"{name}, folded": rival(name, lambda: attend(folded, x.k, x.v)) for name in BACKENDS}
    found, rivals = contest(ours, stock, device=device, rounds=rounds, note=note)
    outcome = found["decode"]
    return entry("decode", x, outcome, rivals, rounds=rounds, allowed=allowed, yardstick=yardstick, plain=plain)


def _ours(x: Inputs, seed: int) -> Callable[[], Tensor]:
    decode: Callable[..., Tensor] = sm.decode  # type: ignore[attr-defined, unused-ignore]
    if x.shape.page_size is None:
        return lambda: decode(x.q, x.k, x.v, policy="paper")
    pages = in_pages(x, x.shape.page_size, seed)
    return lambda: decode(x.q, pages.k, pages.v, block_table=pages.table, lengths=pages.lengths, policy="paper")


_TIMES = 3.0  # error that a gradient may have, in errors of PyTorch's kernel


def training(shape: Shape, *, seed: int, device: torch.device, rounds: int, note: Note = silent) -> dict[str, Any]:
    """The entry of a shape, of the kind `train`."""
    x = drawn(shape, seed=seed, device=device)
    note("computing the float64 reference")
    heads = chosen_heads(x)
    plain_truth, sharp_truth = heads.exact(None), heads.exact("paper")

    def sharp_errors(found: tuple[Tensor, ...]) -> dict[str, float]:
        return _errors(heads.of(*found), sharp_truth)

    def plain_errors(found: tuple[Tensor, ...]) -> dict[str, float]:
        return _errors(heads.of(*found), plain_truth)

    def sharp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sm.attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.group > 1, policy="paper")

    def stock_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, shape.causal)

    plain_step = _step(x, stock_attention)
    plain = plain_errors(plain_step())
    yardstick = _errors(_rounded(heads), sharp_truth)
    ours = {"train": Runner(_step(x, sharp), sharp_errors, times(_TIMES, yardstick))}
    limits = times(_TIMES, plain)
    stock = {name: Runner(with_backend(name, plain_step), plain_errors, limits) for name in BACKENDS}
    found, rivals = contest(ours, stock, device=device, rounds=rounds, note=note)
    outcome, allowed = found["train"], ours["train"].allowed
    return entry("train", x, outcome, rivals, rounds=rounds, allowed=allowed, yardstick=yardstick, plain=plain)


def _step(x: Inputs, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    inputs = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]

    def step() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(attention(*inputs), inputs, x.upstream)

    return step


def _rounded(heads: Heads) -> Gradients:
    """PyTorch's gradients with everything else exact: β, its gradient, and the sums of the parts."""
    beta = heads.beta()
    exact = (beta[..., None] * heads.q.double()).to(heads.q.dtype)
    inputs = [y.requires_grad_() for y in (exact, heads.k[:, None].clone(), heads.v[:, None].clone())]
    with torch.enable_grad():
        out = attend(inputs[0], inputs[1], inputs[2], heads.causal)
        into_q, into_k, into_v = torch.autograd.grad(out, inputs, heads.upstream)
    through = heads.through_beta((heads.q.double() * into_q.double()).sum(-1))
    return Gradients(
        (beta[..., None] * into_q.double() + through.q).to(heads.q.dtype),
        (into_k[:, 0].double() + through.k).to(heads.k.dtype),
        into_v[:, 0],
    )


def _errors(given: Gradients, wanted: Gradients) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in Gradients._fields:
        found |= spread(f"d{name}", getattr(given, name), getattr(wanted, name))
    return found


KINDS = ("stats", "attention", "train", "decode")
ROUNDS = 20


def gpu_entries(
    device: torch.device, *, length: int = FULL_LENGTH, repeat: int = ROUNDS, seed: int = 0, note: Note = silent
) -> list[dict[str, Any]]:
    """The entries of every case, in the order of `KINDS`; without a kernel for decode there are none of it."""
    check_amounts(length, repeat)
    check_seed(seed)
    found: list[dict[str, Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        # Flat rows lie beyond the polynomial's range on purpose, and PyTorch's kernels warn about slow inputs.
        warnings.simplefilter("ignore", UserWarning)
        for made in _all(device, length, repeat, seed, note):
            found += made
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    full = {"full_size": length == FULL_LENGTH}
    return sorted((one | full for one in found), key=lambda one: KINDS.index(one["kind"]))


def _all(device: torch.device, length: int, repeat: int, seed: int, note: Note) -> Iterator[list[dict[str, Any]]]:
    def options(shape: Shape, kind: str) -> dict[str, Any]:
        def tell(text: str) -> None:
            note(f"{kind}, {shape.name}: {text}")

        return {"seed": seed, "device": device, "rounds": 1 if shape.once else repeat, "note": tell}

    for shape in prefill_shapes(length):
        yield prefill(shape, **options(shape, "attention"))
    for shape in prefill_shapes(length):
        if shape.counts:
            yield [training(shape, **options(shape, "train"))]
    if can_decode():
        for shape in decode_shapes(length):
            yield [decoding(shape, **options(shape, "decode"))]


def disagreeing(entries: Sequence[dict[str, Any]]) -> list[str]:
    """The cases whose results are wrong."""
    return [f"{one['kind']} {one['case']}" for one in entries if not one["agrees"]]


def slug(gpu: str) -> str:
    """A device as the name of a file.

    >>> slug("NVIDIA H200"), slug("NVIDIA GeForce RTX 4090")
    ('h200', 'geforce-rtx-4090')
    """
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd")) or "gpu"


def with_origin(entries: Sequence[dict[str, Any]], *, command: str, seed: int) -> list[dict[str, Any]]:
    """The entries with command and provenance."""
    origin = {"command": command, "provenance": provenance(seed)}
    return [one | origin for one in entries]


def save(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Write entries as a JSON list."""
    return write_text(path, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
