"""Random inputs whose rows are of every kind: some see all keys alike, some a few, some one alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sharpmax.experiments.gpu_bench.shapes import Shape

__all__ = ["Inputs", "Pages", "drawn", "in_pages", "sampled_rows"]

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
