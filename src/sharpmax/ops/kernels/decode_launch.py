"""Decoding on a GPU: how the work is split, the launches, and the operator that compilers see."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpmax.ops.kernels.tables import Coefficients
from sharpmax.stats.call import layout, remember
from sharpmax.stats.triton_launch import (
    Compiled,
    Settings,
    available,
    interpreted,
    launch,
    mask_kind,
    on_device,
    padded,
    power_of_2,
    strides_as,
    widened,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256
_MOST_SPLITS = 128
_ROWS = 32
_ALIGNED = 64


# Programs per processor that read keys, and values, fastest on an H200.
_KEY_PROGRAMS, _VALUE_PROGRAMS = 2, 3

# With a page table every tile waits for the number of its page, so the compiler keeps fewer tiles in flight per stage.
# Two more stages make up for it.
_MORE_STAGES_FOR_PAGES = 2


class KeyTile(NamedTuple):
    """Keys per tile, parts that the keys are split into, warps and pipeline stages."""

    keys: int
    splits: int
    warps: int
    stages: int


class KeyPlan(NamedTuple):
    """How the two passes over a cache are split; `whole` is both in one launch, if nothing is split."""

    logits: KeyTile
    values: KeyTile
    whole: KeyTile | None = None


def obstacle(q: Tensor, v: Tensor) -> str | None:
    """Return None if the kernels can serve these tensors, else one line that says why not."""
    if reason := available(q.device):
        return reason
    if q.dtype not in DTYPES:
        return f"q is {q.dtype}, and the kernel takes {', '.join(map(str, DTYPES))}"
    width = max(q.shape[-1], v.shape[-1])
    if width > WIDEST:
        return f"the head size is {width}, and the kernel takes 1 to {WIDEST}"
    return None


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.lru_cache(1024)
def plan_for(device: torch.device, itemsize: int, pairs: int, rows: int, keys: int, width: int, paged: bool) -> KeyPlan:
    """Tiles and splits for this many (sequence, key head) pairs of this many rows.

    The plan depends on shapes, not on how many keys are filled, so that a captured graph serves every length.
    """
    line = itemsize * power_of_2(width)
    # Hopper's tensor cores take 64 keys at a time. Wide lines leave room for fewer stages; float32 has no tensor cores.
    size, stages = (64, 3) if line <= 256 else (64, 2) if itemsize == 2 else (32 if line <= 512 else 16, 2)
    programs = pairs * -(-rows // _block_of(rows))
    most = max(1, min(_MOST_SPLITS, keys // (4 * size)))

    def cut(resident: int) -> KeyTile:
        splits = max(1, min(most, resident * _processors(device) // programs))
        return KeyTile(size, splits, 4, stages)

    if paged:
        stages += min(_MORE_STAGES_FOR_PAGES, 512 // line)  # as wide lines fill the shared memory of smaller GPUs
    logits, values = cut(_KEY_PROGRAMS), cut(_VALUE_PROGRAMS)
    return KeyPlan(logits, values, values._replace(stages=stages + 1) if values.splits == 1 else None)


def _block_of(rows: int) -> int:
    return min(_ROWS, power_of_2(rows))


def _kernel(name: str) -> Any:
    return getattr(importlib.import_module("sharpmax.ops.kernels.decode_kernel"), name)


FIELDS = 5
"""Statistics of a part, each `[splits, rows]`: maximum; Σe, Σe·x, Σe·x² with x relative to it; count."""


class _Call:
    """One call of `decode`: its sizes, and the kernels launched for it, in order.

    The passes share `logits` `[pairs, rows, keys]` (the keys padded) and the statistics of their parts, `parts`
    `[pairs, FIELDS, splits, rows]`.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, pages: Tensor | None, mask: Tensor | None,
        scale: float, table: Coefficients, causal: bool, with_stats: bool,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.mask, self.scale, self.table = q, k, v, mask, scale, table
        # The kernels read contiguous integers.
        self.lengths, self.pages = (None if x is None else x.contiguous() for x in (lengths, pages))
        if self.pages is None:
            (self.heads, self.keys), self.page_size, self.pages_stride = k.shape[1:3], 0, 0
        else:
            self.page_size, self.heads = k.shape[1:3]
            self.keys, self.pages_stride = self.pages.shape[1] * self.page_size, self.pages.stride(0)
        (self.queries, self.width), self.value_width = q.shape[2:], v.shape[-1]
        self.group = q.shape[1] // self.heads
        self.rows, self.pairs = self.group * self.queries, q.shape[0] * self.heads
        self.causal, self.with_stats, self.with_var = causal, with_stats, table.with_var or with_stats
        width = max(self.width, self.value_width)
        self.plan = plan_for(
            q.device, q.element_size(), self.pairs, self.rows, self.keys, width, self.pages is not None
        )
        # A single launch neither returns statistics nor solves for β.
        self.whole = None if with_stats or table.solved else self.plan.whole
        self.splits = (self.plan.logits.splits, self.plan.values.splits) if self.whole is None else (1, 1)
        self.key = (
            layout(q), layout(k), layout(v), layout(mask), layout(self.lengths), layout(self.pages), scale,
            layout(table.values), *table.shape, causal, with_stats, self.plan,
        )  # fmt: skip
        self.launched: list[Compiled | None] = []
        pitch = -(-self.keys // _ALIGNED) * _ALIGNED
        self.logits = torch.empty((self.pairs, self.rows, pitch), dtype=torch.float32, device=q.device)
        parts = (self.pairs, FIELDS, self.splits[0], self.rows)
        self.parts = torch.empty(parts, dtype=torch.float32, device=q.device)

    def _launch(self, name: str, tensors: Sequence[Tensor | None], settle: Callable[[], Settings]) -> None:
        with on_device(self.q):
            self.launched.append(launch((name, *self.key), tensors, settle))

    def _strides(self, x: Tensor) -> tuple[int, ...]:
        """Strides of sequence or page, head, key and width."""
        if self.pages is None:
            return x.stride()
        page, slot, head, width = x.stride()
        return page, head, slot, width

    def _constants(self, tile: KeyTile) -> dict[str, Any]:
        """Compile-time constants of the kernels that read keys or values."""
        return {
            **self._row_constants(), "PAGE": self.page_size, "WIDEN": widened(self.q),
            "BLOCK_R": _block_of(self.rows), "BLOCK_K": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip

    def _row_constants(self) -> dict[str, Any]:
        return {
            "GROUP": self.group, "QUERIES": self.queries, "CAUSAL": self.causal and self.queries > 1,
            "LENGTHS": self.lengths is not None,
        }  # fmt: skip

    def _mask_constants(self) -> dict[str, Any]:
        kind, floor = mask_kind(self.mask)
        return {"MASK": kind, "MASK_FLOOR": floor, "WIDTH": self.width, "BLOCK_D": power_of_2(self.width)}

    def _forms(self) -> dict[str, int]:
        return dict(zip(("FORMS", "TERMS", "SEGMENTS"), self.table.shape, strict=False))

    def _key_numbers(self) -> tuple[Any, ...]:
        return (
            *self.q.stride(), *self._strides(self.k), *strides_as(self.mask, *self.q.shape[:3], self.keys),
            self.pages_stride, self.logits.shape[2], self.heads, self.keys,
        )  # fmt: skip

    def _visibility(self) -> int:
        """What the rows of a key head see of the filled keys.

        0: all of them; 1: those a mask shows, the same for all rows; 2: those a mask shows to each row; 3: all except
        tokens newer than the row.
        """
        if self.mask is None:
            return 3 if self.causal and self.queries > 1 else 0
        # The strides of the mask tell whether all rows of a key head see the same keys.
        return 1 if self.queries == 1 and (self.mask.shape[1] == 1 or self.mask.stride(1) == 0) else 2

    def in_one_launch(self, tile: KeyTile) -> Tensor:
        """The output `[B, H, Lq, Dv]` in one launch, with the keys of a sequence in one part."""
        out = torch.empty((*self.q.shape[:3], self.value_width), dtype=self.v.dtype, device=self.v.device)

        def settle() -> Settings:
            numbers = (*self._key_numbers(), self.scale, *self._strides(self.v), self.table.stride)
            constants = {
                **self._constants(tile), **self._mask_constants(), **self._forms(), "VAR": self.with_var,
                "VALUE_WIDTH": self.value_width, "VALUE_BLOCK_D": power_of_2(self.value_width),
                "VISIBILITY": self._visibility(),
            }  # fmt: skip
            programs = self.pairs * -(-self.rows // _block_of(self.rows))
            return Settings(_kernel("decode_whole"), (programs,), numbers, constants)

        tensors = (
            self.q, self.k, self.mask, self.lengths, self.pages, self.logits, self.parts,
            self.table.values, self.v, out,
        )  # fmt: skip
        self._launch("decode_whole", tensors, settle)
        return out

    def find_logits(self) -> None:
        """Compute the logits of every row and the statistics of each part."""
        tile = self.plan.logits

        def settle() -> Settings:
            constants = {**self._constants(tile), **self._mask_constants(), "VAR": self.with_var}
            programs = self.pairs * tile.splits * -(-self.rows // _block_of(self.rows))
            numbers = (*self._key_numbers(), tile.splits, self.scale)
            return Settings(_kernel("decode_logits"), (programs,), numbers, constants)

        tensors = (self.q, self.k, self.mask, self.lengths, self.pages, self.logits, self.parts)
        self._launch("decode_logits", tensors, settle)

    def merged_rows(self) -> list[Tensor]:
        """β of each row and, if asked for, count, maximum, log mass, shortfall and variance, each `[B, H, Lq]`."""
        beta = torch.empty(self.q.shape[:3], dtype=torch.float32, device=self.q.device)
        stats: list[Tensor | None] = [None] * 5
        if self.with_stats:
            stats = [torch.empty_like(beta, dtype=torch.int64), *(torch.empty_like(beta) for _ in range(4))]

        def settle() -> Settings:
            constants = {
                **self._row_constants(), **self._forms(), "COUNTED": self.mask is not None, "VAR": self.with_var,
                "STATS": self.with_stats, "PARTS": power_of_2(self.splits[0], 1),
                "BLOCK_K": 64 if interpreted() else 4096, "num_warps": 16,
            }  # fmt: skip
            numbers = (self.logits.shape[2], self.table.stride, self.heads, self.keys, self.splits[0])
            return Settings(_kernel("decode_rows"), (beta.numel(),), numbers, constants)

        self._launch("decode_rows", (self.logits, self.parts, self.table.values, self.lengths, beta, *stats), settle)
        return [beta, *(one for one in stats if one is not None)]

    def weighted_values(self, beta: Tensor | None) -> Tensor:
        """The output `[B, H, Lq, Dv]`, with the given β or, for None, β computed from the table."""
        tile, width, splits = self.plan.values, self.value_width, self.plan.values.splits
        out = torch.empty((*self.q.shape[:3], width), dtype=self.v.dtype, device=self.v.device)
        sums, masses = out, None
        if splits > 1:
            masses = torch.empty((self.pairs, splits, self.rows), dtype=torch.float32, device=out.device)
            sums = torch.empty((*masses.shape, width), dtype=torch.float32, device=out.device)

        def settle() -> Settings:
            numbers = (
                *self._strides(self.v), self.pages_stride, self.logits.shape[2], self.table.stride,
                self.heads, self.keys, self.splits[0], splits,
            )  # fmt: skip
            constants = {
                **self._constants(tile), **self._forms(), "COUNTED": self.mask is not None,
                "VAR": self.with_var and beta is None, "GIVEN": beta is not None, "VISIBILITY": self._visibility(),
                "FINAL": splits == 1, "PARTS": power_of_2(self.splits[0], 1), "WIDTH": width,
                "BLOCK_D": power_of_2(width),
            }  # fmt: skip
            programs = self.pairs * splits * -(-self.rows // _block_of(self.rows))
            return Settings(_kernel("decode_values"), (programs,), numbers, constants)

        tensors = (
            self.logits, self.parts, self.table.values, beta, self.v, self.lengths, self.pages, sums, masses
        )  # fmt: skip
        self._launch("decode_values", tensors, settle)
        if masses is None:
            return out

        def settle_sum() -> Settings:
            step = min(32, power_of_2(width))
            constants = {
                "ROWS": self.rows, "WIDTH": width, "SPLITS": power_of_2(splits, 1), "BLOCK_D": step, "num_warps": 4
            }  # fmt: skip
            grid = (self.pairs * self.rows, -(-width // step))
            return Settings(_kernel("decode_sum"), grid, (splits,), constants)

        self._launch("decode_sum", (sums, masses, out), settle_sum)
        return out


def decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, block_table: Tensor | None, mask: Tensor | None,
    scale: float, table: Tensor, form: list[int], stats: bool, causal: bool = True,
) -> list[Tensor]:  # fmt: skip
    """The output and, with `stats`, β, count, maximum, log mass, shortfall and variance of the rows `[B, H, Lq]`.

    With `causal` the queries are the newest tokens, and each sees the keys up to its own. Otherwise every query sees
    all keys that the mask shows.
    """
    place = None
    if lengths is None and block_table is None and not stats:
        place = (layout(q), layout(k), layout(v), layout(mask), scale, layout(table), tuple(form), causal)
        known = _plans.get(place)
        if known is not None and (again := known.run(q, k, v, mask, table)) is not None:
            return [again]
    coefficients = Coefficients(table, form)
    call = _Call(q, k, v, lengths, block_table, mask, scale, coefficients, causal, stats)
    rows: list[Tensor] = []
    if call.whole is not None:
        out = call.in_one_launch(call.whole)
    else:
        call.find_logits()
        if stats or coefficients.solved:
            rows = call.merged_rows()
        out = call.weighted_values(rows[0] if rows else None)
    if place is not None and not rows and None not in call.launched:
        remember(_plans, place, DecodePlan.of(call))
    return [out, *rows] if stats else [out]


_plans: dict[Any, DecodePlan] = {}


class DecodePlan(NamedTuple):
    """The launches of a decode with a full contiguous cache, for any tensors of the same layout."""

    launches: Sequence[Any]
    places: tuple[int, ...]
    """Offsets of logits, parts, sums and masses in one allocation, and its size."""

    @classmethod
    def of(cls, call: _Call) -> DecodePlan:
        """The plan for tensors with the layout of this call."""
        sums = call.pairs * call.rows * call.splits[1] if call.splits[1] > 1 else 0
        sizes = (call.logits.numel(), call.parts.numel(), sums * call.value_width, sums)
        return cls(tuple(call.launched), (0, *itertools.accumulate(padded(4 * size) for size in sizes)))

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor) -> Tensor | None:
        """The output; None if an address is not a multiple of 16."""
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        mask_at = None if mask is None else mask.data_ptr()
        if (q_at | k_at | v_at | (mask_at or 0)) & 15:
            return None
        out = torch.empty((*q.shape[:3], v.shape[-1]), dtype=v.dtype, device=v.device)
        room = torch.empty((self.places[-1],), dtype=torch.uint8, device=q.device)
        at = room.data_ptr()
        _, parts, sums, masses, _ = self.places
        logits, parts, sums, masses = at, at + parts, at + sums, at + masses
        table_at, out_at = table.data_ptr(), out.data_ptr()
        with on_device(q):
            if len(self.launches) == 1:
                self.launches[0](q_at, k_at, mask_at, None, None, logits, parts, table_at, v_at, out_at)
                return out
            self.launches[0](q_at, k_at, mask_at, None, None, logits, parts)
            if len(self.launches) == 2:
                self.launches[1](logits, parts, table_at, None, v_at, None, None, out_at, None)
            else:
                self.launches[1](logits, parts, table_at, None, v_at, None, None, sums, masses)
                self.launches[2](sums, masses, out_at)
        return out


decode_op = torch.library.custom_op("sharpmax::decode", mutates_args=())(decode)


@decode_op.register_fake
def _(
    q: Tensor, k: Any, v: Tensor, lengths: Any, block_table: Any, mask: Any, scale: Any, table: Any, form: Any,
    stats: bool, causal: bool = True,
) -> list[Tensor]:  # fmt: skip
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    if not stats:
        return [out]
    beta, *floats = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(5))
    return [out, beta, q.new_empty(q.shape[:3], dtype=torch.int64), *floats]
