"""The GPU benchmark: statistics, attention, training step and decode, next to every PyTorch backend.

Results are checked against float64 and incorrect ones are not timed. Within a round everything runs once.
"""

from __future__ import annotations

import gc
import json
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import sharpmax as sm
from sharpmax.errors import UnsupportedError, reject
from sharpmax.experiments.benchmarks.measuring import Case, Note, checked, distance, finite, in_rounds, silent
from sharpmax.files import write_text
from sharpmax.ops.softmax import softmax
from sharpmax.policies.polynomial import PAPER
from sharpmax.provenance import check_amounts, check_seed, provenance
from sharpmax.stats.statistics import RowStats, dense_stats

T = TypeVar("T")

KINDS = ("stats", "attention", "train", "decode")
ROUNDS = 20
FULL_LENGTH = 16_384
"""The longest of the eight shapes; targets are judged where `length` is this."""

_SMALLEST_LENGTH = 16
_SAMPLED_ROWS = 32
_BLOCK = 1 << 25  # pairs of a query and a key at a time: 256 MiB of logits in float64

FLOORS = {"stats": 0.5, "attention": 1.5, "train": None, "decode": 1.03}
"""Lower bounds from arithmetic and memory traffic, in times of plain attention; None where there is no simple one."""

LIMITS: dict[str, dict[str, float]] = {
    "stats": {"mean_ratio": 0.62},
    "attention": {"mean_ratio": 1.62, "ratio": 1.8, "extra_bytes_per_row": 32.0},
    "train": {"mean_ratio": 1.9},
    "decode": {"mean_ratio": 1.12},
}
"""Targets: for the mean of the cases that count, and for each of them."""

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""The one that builds the n×n matrix is not among them."""

# Matrix products: plain attention has 2 and 5 back; statistics add 1 and, recomputing the logits, 3 back.
_PRODUCTS = {"stats": 1, "attention": 3, "train": 11}
_STATISTICS_ERROR = 1e-4  # relative where a statistic exceeds 1
_OUTPUT_FACTOR, _GRADIENT_FACTOR = 2.0, 3.0  # errors allowed, in errors of PyTorch's kernel
_WAIT = 2_000_000  # cycles, about a millisecond, in which the host queues a call that is to be timed


@dataclass(frozen=True)
class Shape:
    """Queries `[B, H, Lq, D]` against keys and values `[B, Hkv, Lk, D]`, which may lie in pages.

    A shape that `counts` belongs to the mean that its target is about. One that is run `once` is there to show that
    it runs.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    causal: bool = False
    page_size: int | None = None
    counts: bool = True
    once: bool = False

    @property
    def name(self) -> str:
        """What the case is called.

        >>> Shape(1, 32, 8, 16384, 16384, 128, causal=True).name, Shape(8, 32, 8, 1, 32768, 128, page_size=64).name
        ('1 × 32 on 8 heads × 16,384, D 128, causal', '8 × 32,768 keys, D 128, paged')
        """
        if self.queries == 1:
            return f"{self.batch} × {self.keys:,} keys, D {self.width}" + (", paged" if self.page_size else "")
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} on {self.kv_heads} heads"
        return f"{self.batch} × {heads} × {self.queries:,}, D {self.width}, {'causal' if self.causal else 'full'}"

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of all heads."""
        return self.batch * self.heads * self.queries

    @property
    def product_flops(self) -> float:
        """Arithmetic of one matrix product over the pairs that are seen."""
        return 2.0 * self.rows * self.keys * self.width * (0.5 if self.causal else 1.0)

    @property
    def cache_bytes(self) -> int:
        """Keys and values in 16 bits."""
        return 2 * 2 * self.batch * self.kv_heads * self.keys * self.width


def prefill_shapes(length: int = FULL_LENGTH) -> list[Shape]:
    """The eight shapes, and one of 131,072 tokens that shows that it runs."""
    long, short, longest = (_scaled(n, length) for n in (16_384, 4_096, 131_072))
    eight = [
        Shape(batch, 32, kv_heads, n, n, width, causal)
        for batch, kv_heads, n in ((4, 32, short), (1, 8, long))
        for width in (64, 128)
        for causal in (False, True)
    ]
    return [*eight, Shape(1, 8, 2, longest, longest, 128, causal=True, counts=False, once=True)]


def decode_shapes(length: int = FULL_LENGTH) -> list[Shape]:
    """One new token: the caches of 32,768 keys and more count, a million keys show that it runs."""
    many, most, few, million = (_scaled(n, length) for n in (32_768, 131_072, 8_192, 1_048_576))
    return [
        Shape(8, 32, 8, 1, many, 128),
        Shape(1, 32, 8, 1, most, 128),
        Shape(8, 32, 8, 1, many, 128, page_size=64),
        Shape(64, 32, 8, 1, few, 128, counts=False),
        Shape(1, 32, 8, 1, million, 128, counts=False, once=True),
    ]


def _scaled(n: int, length: int) -> int:
    if not _SMALLEST_LENGTH <= length <= FULL_LENGTH:
        reject("length", length, f"{_SMALLEST_LENGTH} … {FULL_LENGTH}")
    return max(2, n * length // FULL_LENGTH)


class Inputs(NamedTuple):
    """q `[B, H, Lq, D]`, k and v `[B, Hkv, Lk, D]`, and the gradient that arrives at the output."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor


def drawn(shape: Shape, *, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Inputs of a shape; the same seed gives the same on the same kind of device.

    Rows of logits have standard deviations of 1 to 5: entropies from nearly ln n down to nearly 0, so that β acts.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    rows = (shape.batch, shape.heads, shape.queries)
    gain = 1.0 + 4.0 * torch.rand((*rows, 1), generator=generator, device=device)
    kept = (shape.batch, shape.kv_heads, shape.keys, shape.width)
    q = (normal(*rows, shape.width) * gain).to(dtype)
    return Inputs(shape, q, normal(*kept), normal(*kept), normal(*rows, shape.width))


def in_pages(x: Inputs, page: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values of `x` in pages `[P, page, Hkv, D]` in no order, the table of pages, and the lengths.

    Sequence b reads the pages `table[b]`, up to `lengths[b]` keys; what a last page has too much is NaN.
    """
    shape = x.shape
    each = -(-shape.keys // page)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(shape.batch * each, generator=generator).to(x.k.device)

    def paged(cache: Tensor) -> Tensor:
        padded = cache.new_full((shape.batch, each * page, shape.kv_heads, shape.width), torch.nan)
        padded[:, : shape.keys] = cache.transpose(1, 2)
        pages = torch.empty_like(padded).view(-1, page, shape.kv_heads, shape.width)
        pages[order] = padded.view_as(pages)
        return pages

    table = order.view(shape.batch, each).to(torch.int32)
    lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=x.k.device)
    return paged(x.k), paged(x.v), table, lengths


def sampled_rows(shape: Shape, device: torch.device) -> Tensor:
    """The query rows that are checked, evenly spaced."""
    count = min(shape.queries, _SAMPLED_ROWS)
    return torch.linspace(0, shape.queries - 1, count, dtype=torch.float64, device=device).round().long()


def by_key_head(shape: Shape, q: Tensor, *kept: Tensor) -> list[Tensor]:
    """Queries `[N, G, L, D]` of all N key heads, and their keys and values `[N, L, D]`."""
    return [q.reshape(-1, shape.group, *q.shape[2:]), *(one.flatten(0, 1) for one in kept)]


def _logits(q: Tensor, k: Tensor, rows: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Dense logits `[N, G, S, L]` of queries `[N, G, S, D]` in the given rows, and which of them are visible."""
    logits = (q.flatten(1, 2) @ k.mT / math.sqrt(q.shape[-1])).view(*q.shape[:-1], -1)
    keys = torch.arange(k.shape[1], device=k.device)
    seen = keys <= (rows if causal else rows.new_full(rows.shape, len(keys)))[:, None]
    return logits, seen.expand_as(logits)


def _attended(logits: Tensor, visible: Tensor, v: Tensor, policy: str | None) -> Tensor:
    weights = softmax(logits, policy=policy, mask=visible)
    return (weights.flatten(1, 2) @ v).view(*logits.shape[:-1], -1)


class ReferenceRows(NamedTuple):
    """Sampled rows of every head: their statistics `[B, H, S]`, and plain and sharp outputs `[B, H, S, D]`."""

    stats: dict[str, Tensor]
    beta: Tensor
    plain: Tensor
    sharp: Tensor


def rows_in_float64(x: Inputs, rows: Tensor) -> ReferenceRows:
    """Dense attention of the rows."""
    q, k, v = (part.double() for part in by_key_head(x.shape, x.q[:, :, rows], x.k, x.v))
    logits, visible = _logits(q, k, rows, x.shape.causal)
    stats = dense_stats(logits, visible)

    def by_head(values: Tensor) -> Tensor:
        return values.view(x.shape.batch, x.shape.heads, *values.shape[2:])

    return ReferenceRows(
        {name: by_head(getattr(stats, name)) for name in ("entropy", "lse", "mean", "var")},
        by_head(PAPER.beta(stats)),
        by_head(_attended(logits, visible, v, None)),
        by_head(_attended(logits, visible, v, "paper")),
    )


@dataclass(frozen=True)
class ChosenHeads:
    """Key heads `[N, L, D]` and their query heads `[N, G, L, D]`, with the gradient that arrives at the outputs.

    They are the first key head of the first sequence and the last of the last. Gradients are those of q, k and v.
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor

    @classmethod
    def of(cls, x: Inputs) -> ChosenHeads:
        """The chosen heads of these inputs."""
        q, k, v = cls.part(x.shape, x.q, x.k, x.v)
        return cls(x.shape, q, k, v, cls.part(x.shape, x.upstream, x.k, x.v)[0])

    @staticmethod
    def part(shape: Shape, *whole: Tensor) -> list[Tensor]:
        """The part of whole q, k and v that belongs to the chosen heads."""
        return [each[[0, -1] if len(each) > 1 else [0]] for each in by_key_head(shape, *whole)]

    def exact(self, policy: str | None) -> list[Tensor]:
        """Gradients of dense attention in float64."""
        return self._summed(lambda logits, seen, v: _attended(logits, seen, v, policy), self.upstream)

    def beta(self) -> Tensor:
        """β of every row `[N, G, L]`, in float64."""
        k, causal = self.k.double(), self.shape.causal
        blocks = (_logits(self.q[:, :, rows].double(), k, rows, causal) for rows in self._rows())
        return torch.cat([PAPER.beta(dense_stats(*block)) for block in blocks], dim=-1)

    def through_beta(self, weight: Tensor) -> list[Tensor]:
        """Gradients of Σ weight·β in float64, with weights `[N, G, L]`."""
        return self._summed(lambda logits, seen, v: PAPER.beta(dense_stats(logits, seen)), weight)

    def _summed(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], upstream: Tensor) -> list[Tensor]:
        q, k, v = total = [torch.zeros_like(x, dtype=torch.float64) for x in (self.q, self.k, self.v)]
        for rows in self._rows():
            with torch.enable_grad():
                inputs = [x.double().requires_grad_() for x in (self.q[:, :, rows], self.k, self.v)]
                value = function(*_logits(inputs[0], inputs[1], rows, self.shape.causal), inputs[2])
                arriving = upstream[:, :, rows].double()
                found = torch.autograd.grad(value, inputs, arriving, materialize_grads=True)
            q[:, :, rows] = found[0]
            k += found[1]
            v += found[2]
        return total

    def _rows(self) -> Sequence[Tensor]:
        n, group, length, _ = self.q.shape
        step = max(1, _BLOCK // (n * group * self.k.shape[1]))
        return torch.split(torch.arange(length, device=self.q.device), step)


class Spent(NamedTuple):
    """Milliseconds of the device, and of the host to launch."""

    device_ms: float
    host_ms: float


def spent(run: Callable[[], Any], device: torch.device, wait: int = _WAIT) -> Spent:
    """Time of one call.

    On a GPU the call is queued behind a wait of so many cycles, so what is timed is the device's work and not Python's.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        taken = 1e3 * (time.perf_counter() - start)
        return Spent(taken, taken)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call, unused-ignore]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(wait)  # type: ignore[no-untyped-call, unused-ignore]
    begin.record()
    start = time.perf_counter()
    run()
    launched = 1e3 * (time.perf_counter() - start)
    end.record()
    end.synchronize()
    return Spent(begin.elapsed_time(end), launched)


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int | None:
    """The most memory that a call holds at a time, its outputs included and its inputs not; None off a GPU."""
    if device.type != "cuda":
        run()
        return None
    torch.cuda.synchronize(device)
    # A cached block may be larger than requested, and would be counted as a whole.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Plain attention by torch's own choice of backend."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def with_backend(name: str, run: Callable[[], T]) -> Callable[[], T]:
    """The same with one backend and no other; it raises `RuntimeError` where that one refuses."""

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
    """Check ours by kind and PyTorch's backends, and time what is correct; times are None where the check failed.

    `yardstick` are the errors of PyTorch's kernel with everything else exact, `plain` those of plain attention. The
    check, the measuring of memory and an unrecorded round are the warm-up.
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
    """The entries of a shape, of the kinds `stats` and `attention`; of one query, of the kind `decode`.

    PyTorch's kernels read no pages: they get the same keys in one piece.
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

    # What PyTorch's kernel makes of the exact β·q in the dtype of q is what rounding costs anybody. Rows are
    # independent, so only the sampled ones need it.
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
        # Query heads that share their keys can also be passed as rows of one head, which suits some kernels better.
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
    """The entry of a shape, of the kind `train`."""
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
    """PyTorch's gradients with everything else exact: β, its gradient, and the sums of the parts."""
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
    """The entries of every case, in the order of `KINDS`, each with command and provenance."""
    check_amounts(length, repeat)
    check_seed(seed)
    long, one = prefill_shapes(length), decode_shapes(length)
    table = [("attention", prefill, shape) for shape in long]
    table += [("train", training, shape) for shape in long if shape.counts]
    table += [("decode", prefill, shape) for shape in one]
    found: list[dict[str, Any]] = []
    with torch.no_grad(), warnings.catch_warnings():
        # Flat rows lie beyond the polynomial's range on purpose, and PyTorch's kernels warn about slow inputs.
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
    """A device as the name of a file.

    >>> slug("NVIDIA H200"), slug("NVIDIA GeForce RTX 4090")
    ('h200', 'geforce-rtx-4090')
    """
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    return "-".join(word for word in words if word not in ("nvidia", "amd")) or "gpu"


def save(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    """Write entries as a JSON list."""
    return write_text(path, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
