"""Shapes and random inputs of the GPU benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import reject

FULL_LENGTH = 16_384
"""The longest of the eight shapes; targets are judged where `length` is this."""

SMALLEST_LENGTH = 16

_PAGE = 64


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

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain JSON values."""
        return asdict(self)


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
    if not SMALLEST_LENGTH <= length <= FULL_LENGTH:
        reject("length", length, f"{SMALLEST_LENGTH} … {FULL_LENGTH}")
    return max(2, n * length // FULL_LENGTH)


_SAMPLED_ROWS = 32
_GAINS = (1.0, 5.0)
"""Standard deviations of a row's logits: entropies from nearly ln n down to nearly 0, so that β acts."""


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
    """The query rows that are checked, of every head: from the first to the last, evenly."""
    count = min(shape.queries, _SAMPLED_ROWS)
    return torch.linspace(0, shape.queries - 1, count, dtype=torch.float64, device=device).round().long()
