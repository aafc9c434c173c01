"""Row statistics and their gradient in plain torch, one tile of logits at a time. Memory is linear in length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sharpmax.stats.call import AttentionCall, Parts, floats_at_least_32, hidden_by

# Small enough for the cache of a CPU core, or large enough to keep a GPU busy.
_TILE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 25}
_KEYS_PER_TILE = 512


class Gradients(NamedTuple):
    """Gradients of the inputs of a call; `mask` is None if it was not asked for."""

    q: Tensor
    k: Tensor
    mask: Tensor | None


class Incoming(NamedTuple):
    """Gradients of the parts of the rows, None for zero. The anchor is a constant."""

    log_mass: Tensor | None
    shortfall: Tensor | None
    var: Tensor | None


@dataclass(frozen=True)
class _Tile:
    """One rectangle of logits: slices of batch, key heads, query rows and keys."""

    b: slice
    h: slice
    i: slice
    j: slice


class _Tiles:
    """The tiles of a call that hold visible keys, and the logits in them."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.batch, self.heads, self.group, self.rows, self.width = call.q.shape
        self.keys = call.keys
        self.dtype = floats_at_least_32(call.q.dtype)
        # Smaller than any logit but finite, as 0 · (−inf) would be NaN.
        self.hidden = torch.finfo(torch.float32).min / 8
        budget = _TILE_ELEMENTS["cpu" if call.q.device.type == "cpu" else "cuda"]
        self.bj = min(self.keys, _KEYS_PER_TILE)
        lines = max(1, budget // (self.bj * self.group))
        self.bi = min(self.rows, max(32, lines // max(1, self.batch * self.heads)))
        planes = max(1, lines // self.bi)
        self.bh = min(self.heads, planes)
        self.bb = min(self.batch, max(1, planes // self.bh))
        self._buffers = [torch.empty(0, dtype=self.dtype, device=call.q.device) for _ in range(3)]

    def planes(self) -> Iterator[tuple[slice, slice]]:
        return itertools.product(_slices(self.batch, self.bb), _slices(self.heads, self.bh))

    def row_blocks(self) -> Iterator[slice]:
        return _slices(self.rows, self.bi)

    def key_blocks(self, i: slice) -> Iterator[slice]:
        offset = self.call.offset
        return _slices(self.keys if offset is None else min(self.keys, max(0, i.stop + offset)), self.bj)

    def queries(self, b: slice, h: slice, i: slice) -> Tensor:
        """Scaled queries of a block as `[planes, G·rows, D]`, in the dtype of the statistics."""
        block = self.call.q[b, h, :, i].to(self.dtype) * self.call.scale
        return block.reshape(-1, self.group * (i.stop - i.start), self.width)

    def key_plane(self, b: slice, h: slice) -> Tensor:
        """All keys of some planes as `[planes, D, Lk]`, in the dtype of the statistics."""
        plane = self.call.k[b, h].reshape(-1, self.keys, self.width).to(self.dtype)
        # In this layout the products are a third faster, and every key is used by many blocks of rows.
        return plane.transpose(1, 2).contiguous()

    def buffer(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """Scratch memory, reused for every tile: allocating would take longer than the arithmetic."""
        size = math.prod(shape)
        if self._buffers[index].numel() < size:
            self._buffers[index] = self._buffers[index].new_empty(size)
        return self._buffers[index][:size].view(shape)

    def logits(self, q: Tensor, k: Tensor, tile: _Tile) -> Tensor:
        """The logits of a tile as `[planes, G·rows, keys]` in scratch memory, hidden ones at `self.hidden`."""
        s = self.buffer(0, (q.shape[0], q.shape[1], tile.j.stop - tile.j.start))
        torch.bmm(q, k[..., tile.j], out=s)
        hide = self._hide(s, tile)
        if hide is not None:
            self.square(s, tile).masked_fill_(hide, self.hidden)
        return s

    def square(self, s: Tensor, tile: _Tile) -> Tensor:
        """A view of a tile as `[B, Hkv, G, rows, keys]`, to which masks broadcast."""
        return s.view(
            tile.b.stop - tile.b.start, tile.h.stop - tile.h.start, self.group, tile.i.stop - tile.i.start, -1
        )

    def _hide(self, s: Tensor, tile: _Tile) -> Tensor | None:
        hide = None
        if self.call.mask is not None:
            mask = self.block_of(self.call.mask, tile)
            hide = hidden_by(mask)
            if mask.is_floating_point():
                bias = mask.to(self.dtype)
                gain = self.gain_block(tile)
                if gain is not None:
                    bias = bias * gain
                self.square(s, tile).add_(bias)
        offset = self.call.offset
        if offset is not None and tile.j.stop - 1 > tile.i.start + offset:
            i = torch.arange(tile.i.start, tile.i.stop, device=s.device)[:, None]
            late = torch.arange(tile.j.start, tile.j.stop, device=s.device) > i + offset
            hide = late if hide is None else hide | late
        if self.call.spans is not None:
            spans = self.call.spans[tile.b if len(self.call.spans) > 1 else slice(None)]
            low, high = spans[:, None, None, :, tile.i, None].unbind(3)
            j = torch.arange(tile.j.start, tile.j.stop, device=s.device)
            outside = (j < low) | (j >= high)
            hide = outside if hide is None else hide | outside
        return hide

    def block_of(self, mask: Tensor, tile: _Tile) -> Tensor:
        """The part of a mask for a tile. Dimensions of size 1 are kept, as they broadcast."""
        everything = slice(None)
        where = (tile.b, tile.h, everything, tile.i, tile.j)
        return mask[tuple(w if n > 1 else everything for w, n in zip(where, mask.shape, strict=True))]

    def gain_block(self, tile: _Tile) -> Tensor | None:
        if self.call.gain is None:
            return None
        return self.call.gain[tile.b, tile.h, :, tile.i, None].to(self.dtype)


def _slices(end: int, step: int) -> Iterator[slice]:
    return (slice(i, min(i + step, end)) for i in range(0, end, step))


def streaming_parts(call: AttentionCall) -> Parts:
    """All statistics of all rows in one pass over the keys."""
    tiles = _Tiles(call)
    shape = call.q.shape[:-1]
    out = Parts(*(torch.zeros(shape, dtype=tiles.dtype, device=call.q.device) for _ in range(4)))
    for b, h in tiles.planes():
        keys = tiles.key_plane(b, h)
        for i in tiles.row_blocks():
            q = tiles.queries(b, h, i)
            seen: list[Tensor] = []
            for j in tiles.key_blocks(i):
                x = tiles.logits(q, keys, _Tile(b, h, i, j))
                weight = tiles.buffer(1, x.shape)
                # The mean of the first tile is the centre for the sums of the other tiles.
                seen.append(_sums(x, weight, seen[0][1]) if seen else _first_sums(x, weight, tiles.buffer(2, x.shape)))
            if seen:
                for whole, part in zip(out, _merge(seen), strict=True):
                    block = whole[b, h, :, i]
                    block.copy_(part.view(block.shape))
    empty = (call.counts() == 0).view(shape)
    out.anchor.masked_fill_(empty, -torch.inf)
    for part in out[1:]:
        part.masked_fill_(empty, 0.0)
    return out


def streaming_backward(call: AttentionCall, parts: Parts, grads: Incoming, *, into_mask: bool) -> Gradients:
    """Gradients of the rows' parts with respect to q, k and a float mask, again one tile at a time.

    With y = s − mean, the derivatives by a logit are p for log_mass, −p·(1 + y) for shortfall (the anchor is a
    constant) and p·(y² + 2y − var) for var.
    """
    tiles = _Tiles(call)
    rows = call.q.shape[:-1]
    dq = torch.zeros_like(call.q, dtype=tiles.dtype)
    dk = torch.zeros_like(call.k, dtype=tiles.dtype)
    dmask = None
    if into_mask and call.mask is not None:
        dmask = torch.zeros(call.mask.shape, dtype=tiles.dtype, device=call.mask.device)
    empty = (call.counts() == 0).view(rows)
    lse = torch.where(empty, 0.0, parts.anchor + parts.log_mass)
    mean = torch.where(empty, 0.0, parts.anchor - parts.shortfall)
    g_log_mass, g_shortfall, g_var = (torch.zeros_like(lse) if g is None else g for g in grads)
    constant = g_log_mass - g_shortfall - g_var * parts.var
    linear = 2.0 * g_var - g_shortfall
    for b, h in tiles.planes():
        keys = tiles.key_plane(b, h)
        # A hidden pair has derivative 0, which the products below must not multiply by NaN. The derivative of a visible
        # NaN is NaN anyway.
        clean_keys = keys.nan_to_num(0.0, 0.0, 0.0)
        for i in tiles.row_blocks():
            q = tiles.queries(b, h, i)
            clean_q = q.nan_to_num(0.0, 0.0, 0.0)
            column = (q.shape[0], q.shape[1], 1)
            c0, c1, c2, shift, norm = (t[b, h, :, i].reshape(column) for t in (constant, linear, g_var, mean, lse))
            into_q = torch.zeros_like(q)
            for j in tiles.key_blocks(i):
                tile = _Tile(b, h, i, j)
                s = tiles.logits(q, keys, tile)
                p = torch.sub(s, norm, out=tiles.buffer(1, s.shape)).exp_()
                y = s.sub_(shift)
                py = torch.mul(p, y, out=tiles.buffer(2, s.shape))
                ds = p.mul_(c0).add_(c1 * py).add_(py.mul_(y).mul_(c2))
                into_q.baddbmm_(ds, clean_keys[..., j].transpose(1, 2))
                dk[b, h, j] += torch.bmm(ds.transpose(1, 2), clean_q).view(dk[b, h, j].shape)
                if dmask is not None:
                    into, gain, block = tiles.square(ds, tile), tiles.gain_block(tile), tiles.block_of(dmask, tile)
                    block += (into if gain is None else into * gain).sum_to_size(block.shape)
            dq[b, h, :, i] = (into_q * call.scale).view(dq[b, h, :, i].shape)
    return Gradients(
        dq.to(call.q.dtype),
        dk.to(call.k.dtype),
        None if dmask is None or call.mask is None else dmask.to(call.mask.dtype),
    )


def _first_sums(x: Tensor, weight: Tensor, product: Tensor) -> Tensor:
    """`_sums` of the first tile of a row, centred at its own mean."""
    top = x.amax(-1)
    torch.exp(x.sub_(top[..., None]), out=weight)
    mass = weight.sum(-1)
    mean = torch.mul(weight, x, out=product).sum(-1).div_(mass)
    squares = weight.mul_(x.sub_(mean[..., None])).mul_(x).sum(-1)
    # From weights relative to the maximum to weights relative to the mean.
    factor = torch.exp(-mean)
    return torch.stack((top, top + mean, mass * factor, torch.zeros_like(mass), squares * factor))


def _sums(x: Tensor, weight: Tensor, centre: Tensor) -> Tensor:
    """Stacked: maximum, origin, Σw, Σw·x, Σw·x² of a tile, with x relative to the origin. Overwrites the tile.

    The origin is an estimate of the row's mean, at most 3 below the tile's maximum. So the variance is never the small
    difference of two large numbers, and no weight overflows.
    """
    top = x.amax(-1)
    origin = torch.clamp(centre, top - 3.0, top)
    torch.exp(x.sub_(origin[..., None]), out=weight)
    mass = weight.sum(-1)
    # The weight multiplies first, as the square of a hidden x would overflow while its weight is 0.
    first = weight.mul_(x).sum(-1)
    return torch.stack((top, origin, mass, first, weight.mul_(x).sum(-1)))


def _merge(tiles: list[Tensor]) -> Parts:
    """The parts of the rows from the sums of their tiles. Variances are combined about the common mean."""
    top, origin, mass, first, second = torch.stack(tiles, dim=1)
    peak = top.amax(0)
    # The clamp keeps squares finite for tiles that hold hidden keys only, which weigh nothing.
    below = (origin - peak).clamp_min(-1e4)
    offset = first / mass
    var = (second / mass - offset * offset).clamp_min(0.0)
    mass = mass * torch.exp(below)
    total = mass.sum(0)
    share = mass / total
    mean = below + offset
    centre = (share * mean).sum(0)
    var = (share * (var + (mean - centre) ** 2)).sum(0)
    # Both are at least 0, but rounding can make them negative.
    return Parts(peak, total.log().clamp_min(0.0), (-centre).clamp_min(0.0), var)
