"""Shapes, random inputs and float64 references of the GPU benchmark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sharpmax.errors import reject
from sharpmax.ops.softmax import softmax
from sharpmax.policies.polynomial import PAPER
from sharpmax.stats.dense import dense_stats

FULL_LENGTH = 16_384
"""The longest of the eight shapes; targets are judged where `length` is this."""

_SMALLEST_LENGTH = 16
_PAGE = 64
_SAMPLED_ROWS = 32
_GAINS = (1.0, 5.0)
"""Standard deviations of a row's logits: entropies from nearly ln n down to nearly 0, so that β acts."""

_BLOCK = 1 << 25  # pairs of a query and a key at a time: 256 MiB of logits in float64


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
        Shape(8, 32, 8, 1, many, 128, page_size=_PAGE),
        Shape(64, 32, 8, 1, few, 128, counts=False),
        Shape(1, 32, 8, 1, million, 128, counts=False, once=True),
    ]


def _scaled(n: int, length: int) -> int:
    if not _SMALLEST_LENGTH <= length <= FULL_LENGTH:
        reject("length", length, f"{_SMALLEST_LENGTH} … {FULL_LENGTH}")
    return max(2, n * length // FULL_LENGTH)


@dataclass(frozen=True)
class Pages:
    """Keys and values in pages `[P, page, Hkv, D]`; sequence b reads the pages `table[b]`, up to `lengths[b]` keys."""

    k: Tensor
    v: Tensor
    table: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Inputs:
    """q `[B, H, Lq, D]`, k and v `[B, Hkv, Lk, D]`, and the gradient that arrives at the output."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor

    @property
    def bytes(self) -> int:
        """Memory of queries, keys, values and output."""
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v, self.upstream))


def drawn(shape: Shape, *, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Inputs of a shape; the same seed gives the same on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    low, high = _GAINS
    rows = (shape.batch, shape.heads, shape.queries)
    gain = low + (high - low) * torch.rand((*rows, 1), generator=generator, device=device)
    kept = (shape.batch, shape.kv_heads, shape.keys, shape.width)
    q = (normal(*rows, shape.width) * gain).to(dtype)
    return Inputs(shape, q, normal(*kept), normal(*kept), normal(*rows, shape.width))


def in_pages(x: Inputs, page: int, seed: int) -> Pages:
    """The keys and values of `x` in pages that lie in no order; what a last page has too much is NaN."""
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
    return Pages(paged(x.k), paged(x.v), table, lengths)


def sampled_rows(shape: Shape, device: torch.device) -> Tensor:
    """The query rows that are checked, evenly spaced."""
    count = min(shape.queries, _SAMPLED_ROWS)
    return torch.linspace(0, shape.queries - 1, count, dtype=torch.float64, device=device).round().long()


@dataclass(frozen=True)
class ReferenceRows:
    """Sampled rows of every head: their statistics `[B, H, S]`, and plain and sharp outputs `[B, H, S, D]`."""

    stats: dict[str, Tensor]
    beta: Tensor
    plain: Tensor
    sharp: Tensor


def rows_in_float64(x: Inputs, rows: Tensor) -> ReferenceRows:
    """Dense attention of the rows, one sequence at a time."""
    each = [_sequence(x, rows, b) for b in range(x.shape.batch)]
    found = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    beta, plain, sharp = (found.pop(name) for name in ("beta", "plain", "sharp"))
    return ReferenceRows(found, beta, plain, sharp)


def _sequence(x: Inputs, rows: Tensor, b: int) -> dict[str, Tensor]:
    shape = x.shape
    q = x.q[b][:, rows].double().view(shape.kv_heads, shape.group * len(rows), shape.width)
    logits = (q @ x.k[b].double().transpose(-1, -2) / math.sqrt(shape.width)).view(shape.heads, len(rows), shape.keys)
    seen = torch.ones(len(rows), shape.keys, dtype=torch.bool, device=rows.device)
    if shape.causal:
        seen = torch.arange(shape.keys, device=rows.device) <= rows[:, None]
    visible = seen.expand_as(logits)
    stats = dense_stats(logits, visible)
    v = x.v[b].double()

    def output(policy: str | None) -> Tensor:
        weights = softmax(logits, policy=policy, mask=visible)
        return (weights.view(shape.kv_heads, -1, shape.keys) @ v).view(shape.heads, len(rows), shape.width)

    found = {name: getattr(stats, name) for name in ("entropy", "lse", "mean", "var")}
    return {**found, "beta": PAPER.beta(stats), "plain": output(None), "sharp": output("paper")}


class HeadGradients(NamedTuple):
    """HeadGradients of q `[N, G, L, D]`, and of k and v `[N, L, D]`, of N key heads."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class ChosenHeads:
    """N key heads and the G query heads of each, with the gradient that arrives at their outputs."""

    where: tuple[tuple[int, int], ...]
    group: int
    causal: bool
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> HeadGradients:
        """The part of whole gradients that belongs to these heads."""
        return HeadGradients(_queries(q, self.where, self.group), _keys(k, self.where), _keys(v, self.where))

    def exact(self, policy: str | None) -> HeadGradients:
        """HeadGradients of dense attention in float64."""
        return self._summed(lambda logits, v, seen: softmax(logits, policy=policy, mask=seen) @ v, self.upstream)

    def beta(self) -> Tensor:
        """β of every row `[N, G, L]`, in float64."""
        found = torch.empty(self.q.shape[:-1], dtype=torch.float64, device=self.q.device)
        for n, rows in self._blocks():
            found[n, :, rows] = PAPER.beta(dense_stats(*self._logits(self.q[n][:, rows].double(), self.k[n], rows)))
        return found

    def through_beta(self, weight: Tensor) -> HeadGradients:
        """HeadGradients of Σ weight·β in float64, with weights `[N, G, L]`."""
        return self._summed(lambda logits, v, visible: PAPER.beta(dense_stats(logits, visible)), weight)

    def _summed(self, function: Callable[[Tensor, Tensor, Tensor], Tensor], upstream: Tensor) -> HeadGradients:
        q, k, v = (torch.zeros_like(x, dtype=torch.float64) for x in (self.q, self.k, self.v))
        with torch.enable_grad():
            for n, rows in self._blocks():
                inputs = [x.double().requires_grad_() for x in (self.q[n][:, rows], self.k[n], self.v[n])]
                logits, visible = self._logits(inputs[0], inputs[1], rows)
                value = function(logits, inputs[2], visible)
                arriving = upstream[n][:, rows].double()
                into_q, into_k, into_v = torch.autograd.grad(value, inputs, arriving, materialize_grads=True)
                q[n, :, rows] = into_q
                k[n] += into_k
                v[n] += into_v
        return HeadGradients(q, k, v)

    def _logits(self, q: Tensor, k: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = q @ k.double().transpose(-1, -2) / math.sqrt(q.shape[-1])
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device)
        if self.causal:
            visible = visible.tril(rows.start)
        return logits, visible.expand_as(logits)

    def _blocks(self) -> Iterator[tuple[int, slice]]:
        length = self.q.shape[-2]
        step = max(1, _BLOCK // (self.group * self.k.shape[-2]))
        for n in range(len(self.where)):
            for start in range(0, length, step):
                yield n, slice(start, min(length, start + step))


def chosen_heads(x: Inputs) -> ChosenHeads:
    """The first key head of the first sequence and the last of the last."""
    shape = x.shape
    where = tuple(dict.fromkeys(((0, 0), (shape.batch - 1, shape.kv_heads - 1))))
    q, k, v, upstream = (y.detach() for y in (x.q, x.k, x.v, x.upstream))
    queries = (_queries(y, where, shape.group) for y in (q, upstream))
    return ChosenHeads(where, shape.group, shape.causal, next(queries), _keys(k, where), _keys(v, where), next(queries))


def _queries(x: Tensor, where: tuple[tuple[int, int], ...], group: int) -> Tensor:
    return torch.stack([x[b, h * group : (h + 1) * group] for b, h in where])


def _keys(x: Tensor, where: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.stack([x[b, h] for b, h in where])
