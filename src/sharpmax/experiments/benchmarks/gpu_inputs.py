"""Shapes and random inputs of the GPU benchmark, and what attention over them gives in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sharpmax.errors import reject
from sharpmax.ops.softmax import softmax
from sharpmax.policies.polynomial import PAPER
from sharpmax.stats.statistics import dense_stats

FULL_LENGTH = 16_384
"""The longest of the eight shapes. Targets are judged only where `length` is this."""

_SMALLEST_LENGTH = 16
_SAMPLED_ROWS = 32
_BLOCK = 1 << 25  # logits computed at a time: 256 MiB in float64


@dataclass(frozen=True)
class Shape:
    """Queries `[B, H, Lq, D]` against keys and values `[B, Hkv, Lk, D]`, contiguous or in pages.

    Shapes with `counts` are averaged into the mean that its target is about. Shapes with `once` are run in a single
    round, to show that they run.
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
        """The name of the case.

        >>> Shape(1, 32, 8, 16384, 16384, 128, causal=True).name, Shape(8, 32, 8, 1, 32768, 128, page_size=64).name
        ('1 × 32 on 8 heads × 16,384, D 128, causal', '8 × 32,768 keys, D 128, paged')
        """
        if self.queries == 1:
            return f"{self.batch} × {self.keys:,} keys, D {self.width}" + (", paged" if self.page_size else "")
        heads = f"{self.heads} heads" if self.heads == self.kv_heads else f"{self.heads} on {self.kv_heads} heads"
        return f"{self.batch} × {heads} × {self.queries:,}, D {self.width}, {'causal' if self.causal else 'full'}"

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of all heads."""
        return self.batch * self.heads * self.queries

    @property
    def product_flops(self) -> float:
        """Floating-point operations of one matrix product over the visible pairs."""
        return 2.0 * self.rows * self.keys * self.width * (0.5 if self.causal else 1.0)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values in 16 bits."""
        return 2 * 2 * self.batch * self.kv_heads * self.keys * self.width


def prefill_shapes(length: int = FULL_LENGTH) -> list[Shape]:
    """Eight shapes, and one of 131,072 tokens that runs once."""
    long, short, longest = (_scaled(n, length) for n in (16_384, 4_096, 131_072))
    eight = [
        Shape(batch, 32, kv_heads, n, n, width, causal)
        for batch, kv_heads, n in ((4, 32, short), (1, 8, long))
        for width in (64, 128)
        for causal in (False, True)
    ]
    return [*eight, Shape(1, 8, 2, longest, longest, 128, causal=True, counts=False, once=True)]


def decode_shapes(length: int = FULL_LENGTH) -> list[Shape]:
    """Shapes with one query. Caches of 32,768 keys and more count; one of a million keys runs once."""
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
    """q `[B, H, Lq, D]`, k and v `[B, Hkv, Lk, D]`, and the gradient of the output."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor


def drawn(shape: Shape, *, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Random inputs of a shape; a seed gives the same inputs on every device of a kind.

    Rows of logits have standard deviations of 1 to 5: entropies range from nearly ln n to nearly 0, so that β acts.
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
    """Keys and values of `x` in shuffled pages `[P, page, Hkv, D]`, the block table, and the lengths.

    Sequence b reads the pages `table[b]`, up to `lengths[b]` keys. Unused slots of its last page are NaN.
    """
    shape = x.shape
    pages_each = -(-shape.keys // page)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(shape.batch * pages_each, generator=generator).to(x.k.device)

    def paged(cache: Tensor) -> Tensor:
        padded = cache.new_full((shape.batch, pages_each * page, shape.kv_heads, shape.width), torch.nan)
        padded[:, : shape.keys] = cache.transpose(1, 2)
        pages = torch.empty_like(padded).view(-1, page, shape.kv_heads, shape.width)
        pages[order] = padded.view_as(pages)
        return pages

    table = order.view(shape.batch, pages_each).to(torch.int32)
    lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=x.k.device)
    return paged(x.k), paged(x.v), table, lengths


def sampled_rows(shape: Shape, device: torch.device) -> Tensor:
    """The query rows that are checked, evenly spaced."""
    count = min(shape.queries, _SAMPLED_ROWS)
    return torch.linspace(0, shape.queries - 1, count, dtype=torch.float64, device=device).round().long()


def _by_key_head(shape: Shape, q: Tensor, *kept: Tensor) -> list[Tensor]:
    """Queries `[N, G, L, D]` of all N key heads, and their keys and values `[N, L, D]`."""
    return [q.reshape(-1, shape.group, *q.shape[2:]), *(one.flatten(0, 1) for one in kept)]


def _logits(q: Tensor, k: Tensor, rows: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Dense logits `[N, G, S, L]` of the queries `[N, G, S, D]` of these rows, and which of them are visible."""
    logits = (q.flatten(1, 2) @ k.mT / math.sqrt(q.shape[-1])).view(*q.shape[:-1], -1)
    keys = torch.arange(k.shape[1], device=k.device)
    visible = keys <= (rows if causal else rows.new_full(rows.shape, len(keys)))[:, None]
    return logits, visible.expand_as(logits)


def _attended(logits: Tensor, visible: Tensor, v: Tensor, policy: str | None) -> Tensor:
    weights = softmax(logits, policy=policy, mask=visible)
    return (weights.flatten(1, 2) @ v).view(*logits.shape[:-1], -1)


class ReferenceRows(NamedTuple):
    """Sampled rows of every head: statistics and β `[B, H, S]`, outputs without and with a policy `[B, H, S, D]`."""

    stats: dict[str, Tensor]
    beta: Tensor
    plain: Tensor
    sharp: Tensor


def rows_in_float64(x: Inputs, rows: Tensor) -> ReferenceRows:
    """Dense attention of the rows."""
    q, k, v = (part.double() for part in _by_key_head(x.shape, x.q[:, :, rows], x.k, x.v))
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


class ChosenHeads(Inputs):
    """k and v `[N, L, D]` of two key heads, with q and upstream `[N, G, L, D]` of their query heads.

    They are the first key head of the first sequence and the last of the last. Gradients are those of q, k and v.
    """

    @classmethod
    def of(cls, x: Inputs) -> ChosenHeads:
        """The chosen heads of these inputs."""
        return cls(x.shape, *cls.part(x.shape, x.q, x.k, x.v), *cls.part(x.shape, x.upstream))

    @staticmethod
    def part(shape: Shape, *whole: Tensor) -> list[Tensor]:
        """The chosen heads of q, k and v, or of q alone."""
        return [each[[0, -1] if len(each) > 1 else [0]] for each in _by_key_head(shape, *whole)]

    def exact(self, policy: str | None) -> list[Tensor]:
        """Gradients of dense attention in float64."""
        return self._summed(lambda logits, visible, v: _attended(logits, visible, v, policy), self.upstream)

    def beta(self) -> Tensor:
        """β of every row `[N, G, L]`, in float64."""
        k, causal = self.k.double(), self.shape.causal
        blocks = (_logits(self.q[:, :, rows].double(), k, rows, causal) for rows in self._rows())
        return torch.cat([PAPER.beta(dense_stats(*block)) for block in blocks], dim=-1)

    def through_beta(self, weight: Tensor) -> list[Tensor]:
        """Gradients of Σ weight·β in float64, with weights `[N, G, L]`."""
        return self._summed(lambda logits, visible, v: PAPER.beta(dense_stats(logits, visible)), weight)

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
