"""Decoding on a GPU: how the work is cut, the launches, and the operators that compilers see."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
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


# As measured on an H200: keys come faster to two programs per processor than to more, values to three.
_KEY_PROGRAMS, _VALUE_PROGRAMS = 2, 3

# Behind a table of pages the compiler keeps one tile less on its way per stage, as every tile waits for its page's
# number: two more stages make up for it.
_MORE_STAGES_FOR_PAGES = 2


class Tile(NamedTuple):
    """Keys per tile, parts the keys are cut into, warps and pipeline stages."""

    keys: int
    splits: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """How the two passes over a cache are cut, and both in one launch where nothing is cut (else None)."""

    logits: Tile
    values: Tile
    whole: Tile | None = None


@dataclass(frozen=True, eq=False)
class Cache:
    """Keys `[B, Hkv, Lk, D]` (or pages `[pages, page_size, Hkv, D]` with `pages` `[B, n]`) and how many are filled."""

    lengths: Tensor | None
    pages: Tensor | None

    @classmethod
    def dense(cls, lengths: Tensor | None, pages: Tensor | None) -> Cache:
        """A cache whose integers lie side by side, as the kernels read them."""
        return cls(*(None if x is None else x.contiguous() for x in (lengths, pages)))

    def batch_heads_keys(self, x: Tensor) -> tuple[int, int, int]:
        """Sequences, key heads and the most keys of a sequence, given the keys or the values."""
        if self.pages is None:
            return x.shape[0], x.shape[1], x.shape[2]
        return self.pages.shape[0], x.shape[2], self.pages.shape[1] * x.shape[1]

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Strides of sequence or page, head, key and width."""
        if self.pages is None:
            return x.stride()
        page, slot, head, width = x.stride()
        return page, head, slot, width

    def page_size(self, x: Tensor) -> int:
        """Keys per page; 0 for a contiguous cache."""
        return 0 if self.pages is None else x.shape[1]

    @property
    def layout(self) -> Any:
        """What launches depend on, besides addresses."""
        return layout(self.lengths), layout(self.pages)

    @property
    def pages_stride(self) -> int:
        """From one sequence's pages to the next one's."""
        return 0 if self.pages is None else self.pages.stride(0)


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
def plan_for(device: torch.device, itemsize: int, pairs: int, rows: int, keys: int, width: int, paged: bool) -> Plan:
    """Tiles and splits for this many (sequence, key head) pairs of this many rows.

    It depends on shapes alone, never on how many keys are filled: a captured graph serves every length.
    """
    line = itemsize * power_of_2(width)
    # Tensor cores of Hopper take 64 keys at a time; wide lines have fewer of them in flight, float32 has none.
    size, stages = (64, 3) if line <= 256 else (64, 2) if itemsize == 2 else (32 if line <= 512 else 16, 2)
    programs = pairs * -(-rows // _block_of(rows))
    most = max(1, min(_MOST_SPLITS, keys // (4 * size)))

    def cut(resident: int) -> Tile:
        splits = max(1, min(most, resident * _processors(device) // programs))
        return Tile(size, splits, 4, stages)

    if paged:
        stages += min(_MORE_STAGES_FOR_PAGES, 512 // line)  # wide lines fill the shared memory of smaller GPUs
    logits, values = cut(_KEY_PROGRAMS), cut(_VALUE_PROGRAMS)
    return Plan(logits, values, values._replace(stages=stages + 1) if values.splits == 1 else None)


def _block_of(rows: int) -> int:
    return min(_ROWS, power_of_2(rows))


class Kept(NamedTuple):
    """Logits `[pairs, rows, keys]` (the keys padded) and the statistics of their parts."""

    logits: Tensor
    parts: Tensor


def _kernel(name: str) -> Any:
    return getattr(importlib.import_module("sharpmax.ops.kernels.decode_kernel"), name)


FIELDS = 5
"""Statistics of a part, each `[splits, rows]`: maximum, and Σe, Σe·x, Σe·x² with x the distance from it; count."""


def logits_of(
    q: Tensor, k: Tensor, cache: Cache, mask: Tensor | None, scale: float, tile: Tile, causal: bool, with_var: bool,
    whole: bool, launched: Launched,
) -> Kept:  # fmt: skip
    """Logits of every row and the statistics of each part; `whole` fills what lies beyond the lengths with −inf."""
    batch, heads, keys = cache.batch_heads_keys(k)
    queries, width = q.shape[2:]
    group = q.shape[1] // heads
    rows, pairs = group * queries, batch * heads
    kept = _room_for_logits(q, pairs, rows, keys, tile.splits)
    if whole:
        kept.logits.fill_(-torch.inf)

    def settle() -> Settings:
        (kind, floor), block = mask_kind(mask), _block_of(rows)
        numbers = (
            *q.stride(), *cache.strides(k), *strides_as(mask, *q.shape[:3], keys), cache.pages_stride,
            kept.logits.shape[2], heads, keys, tile.splits, scale,
        )  # fmt: skip
        constants = {
            "GROUP": group, "QUERIES": queries, "CAUSAL": causal and queries > 1, "WIDTH": width,
            "PAGE": cache.page_size(k), "LENGTHS": cache.lengths is not None, "MASK": kind, "MASK_FLOOR": floor,
            "VAR": with_var, "WIDEN": widened(q), "BLOCK_R": block, "BLOCK_K": tile.keys,
            "BLOCK_D": power_of_2(width), "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        return Settings(_kernel("decode_logits"), (pairs * tile.splits * -(-rows // block),), numbers, constants)

    key = ("decode_logits", layout(q), layout(k), layout(mask), cache.layout, scale, tile, causal, with_var, q.device)
    with on_device(q):
        launched.append(launch(key, (q, k, mask, cache.lengths, cache.pages, kept.logits, kept.parts), settle))
    return kept


def _room_for_logits(q: Tensor, pairs: int, rows: int, keys: int, splits: int) -> Kept:
    pitch = -(-keys // _ALIGNED) * _ALIGNED
    logits = torch.empty((pairs, rows, pitch), dtype=torch.float32, device=q.device)
    return Kept(logits, torch.empty((pairs, FIELDS, splits, rows), dtype=torch.float32, device=q.device))


class DecodeRows(NamedTuple):
    """β and the statistics of every row, `[B, H, Lq]`; None where not asked for."""

    beta: Tensor | None
    visible: Tensor | None = None
    peak: Tensor | None = None
    log_mass: Tensor | None = None
    shortfall: Tensor | None = None
    var: Tensor | None = None


def rows_of(
    kept: Kept, table: Coefficients | None, cache: Cache, shape: tuple[int, int, int], heads: int, keys: int,
    causal: bool, masked: bool, with_var: bool, with_stats: bool,
) -> DecodeRows:  # fmt: skip
    """Merged statistics and β of each row; rows `shape` = (batch, query heads, queries)."""
    device = kept.logits.device

    def rows(dtype: torch.dtype, wanted: bool) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=device) if wanted else None

    beta = rows(torch.float32, table is not None)
    count = rows(torch.int64, with_stats)
    floats = [rows(torch.float32, with_stats) for _ in range(4)]

    def settle() -> Settings:
        parts = kept.parts.shape[2]
        constants = {
            "GROUP": shape[1] // heads, "QUERIES": shape[2], "CAUSAL": causal and shape[2] > 1,
            "LENGTHS": cache.lengths is not None, "COUNTED": masked, "VAR": with_var, "STATS": with_stats,
            **_forms(table), "PARTS": power_of_2(parts, 1), "BLOCK_K": 64 if interpreted() else 4096, "num_warps": 16,
        }  # fmt: skip
        numbers = (kept.logits.shape[2], 0 if table is None else table.stride, heads, keys, parts)
        return Settings(_kernel("decode_rows"), (math.prod(shape),), numbers, constants)

    values = None if table is None else table.values
    key = (
        "decode_rows", kept.logits.shape, kept.parts.shape, layout(values), _form_key(table), cache.layout, shape,
        heads, keys, causal, masked, with_var, with_stats, device,
    )  # fmt: skip
    with on_device(kept.logits):
        launch(key, (kept.logits, kept.parts, values, cache.lengths, beta, count, *floats), settle)
    return DecodeRows(beta, count, *floats)


def _forms(table: Coefficients | None) -> dict[str, int]:
    forms, terms, segments, _ = (0, 0, 0, 0) if table is None else table.shape
    return {"FORMS": forms, "TERMS": terms, "SEGMENTS": segments}


def _form_key(table: Coefficients | None) -> tuple[int, ...] | None:
    return None if table is None else tuple(table.shape)


class _Sums(NamedTuple):
    """Where the parts of the output go: sums and masses `[pairs, splits, rows]`, or at once the output itself."""

    out: Tensor
    sums: Tensor
    masses: Tensor | None


def _room_for_sums(v: Tensor, shape: tuple[int, int, int], heads: int, splits: int) -> _Sums:
    width = v.shape[-1]
    out = torch.empty((*shape, width), dtype=v.dtype, device=v.device)
    if splits == 1:
        return _Sums(out, out, None)
    lines = (shape[0] * heads, splits, shape[1] // heads * shape[2])
    sums = torch.empty((*lines, width), dtype=torch.float32, device=v.device)
    return _Sums(out, sums, torch.empty(lines, dtype=torch.float32, device=v.device))


def _summed(room: _Sums, launched: Launched) -> Tensor:
    if room.masses is not None:
        pairs, splits, rows = room.masses.shape
        width = room.out.shape[-1]

        def settle() -> Settings:
            step = min(32, power_of_2(width))
            constants = {"ROWS": rows, "WIDTH": width, "SPLITS": power_of_2(splits, 1), "BLOCK_D": step, "num_warps": 4}
            return Settings(_kernel("decode_sum"), (pairs * rows, -(-width // step)), (splits,), constants)

        key = ("decode_sum", room.sums.shape, room.out.dtype, room.out.device)
        launched.append(launch(key, (room.sums, room.masses, room.out), settle))
    return room.out


def _visibility(causal: bool, masked: bool, alike: bool, queries: int) -> int:
    """What the rows of a key head see of the filled keys.

    0: all of them; 1: what a mask shows, to all rows the same; 2: to each row its own; 3: all, but the newest keys are
    seen by the newest rows alone.
    """
    return (1 if alike else 2) if masked else (3 if causal and queries > 1 else 0)


def values_of(
    kept: Kept, table: Coefficients | None, beta: Tensor | None, v: Tensor, cache: Cache, shape: tuple[int, int, int],
    tile: Tile, causal: bool, masked: bool, alike: bool, with_var: bool, launched: Launched,
) -> Tensor:  # fmt: skip
    """The output `[B, H, Lq, Dv]`; β is given, or computed from the table."""
    _, heads, keys = cache.batch_heads_keys(v)
    batch, query_heads, queries = shape
    room = _room_for_sums(v, shape, heads, tile.splits)

    def settle() -> Settings:
        width, rows, parts = v.shape[-1], query_heads // heads * queries, kept.parts.shape[2]
        block = _block_of(rows)
        numbers = (
            *cache.strides(v), cache.pages_stride, kept.logits.shape[2], 0 if table is None else table.stride, heads,
            keys, parts, tile.splits,
        )  # fmt: skip
        constants = {
            "GROUP": query_heads // heads, "QUERIES": queries, "CAUSAL": causal and queries > 1, "WIDTH": width,
            "PAGE": cache.page_size(v), "LENGTHS": cache.lengths is not None, "COUNTED": masked,
            "VAR": with_var and beta is None, "GIVEN": beta is not None, **_forms(table),
            "VISIBILITY": _visibility(causal, masked, alike, queries), "FINAL": tile.splits == 1, "WIDEN": widened(v),
            "PARTS": power_of_2(parts, 1), "BLOCK_R": block, "BLOCK_K": tile.keys, "BLOCK_D": power_of_2(width),
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        programs = batch * heads * tile.splits * -(-rows // block)
        return Settings(_kernel("decode_values"), (programs,), numbers, constants)

    values = None if table is None else table.values
    key = (
        "decode_values", kept.logits.shape, kept.parts.shape, layout(v), layout(values), _form_key(table),
        cache.layout, shape, tile, causal, masked, alike, with_var, beta is None, v.device,
    )  # fmt: skip
    tensors = (kept.logits, kept.parts, values, beta, v, cache.lengths, cache.pages, room.sums, room.masses)
    with on_device(v):
        launched.append(launch(key, tensors, settle))
        return _summed(room, launched)


def whole_of(
    q: Tensor, k: Tensor, v: Tensor, cache: Cache, mask: Tensor | None, scale: float, table: Coefficients, tile: Tile,
    causal: bool, launched: Launched,
) -> Tensor:  # fmt: skip
    """The output `[B, H, Lq, Dv]` in one launch, the keys of a sequence in one part."""
    batch, heads, keys = cache.batch_heads_keys(k)
    queries, width = q.shape[2:]
    group = q.shape[1] // heads
    rows, pairs = group * queries, batch * heads
    kept = _room_for_logits(q, pairs, rows, keys, 1)
    out = torch.empty((batch, q.shape[1], queries, v.shape[-1]), dtype=v.dtype, device=v.device)

    def settle() -> Settings:
        (kind, floor), block = mask_kind(mask), _block_of(rows)
        numbers = (
            *q.stride(), *cache.strides(k), *strides_as(mask, *q.shape[:3], keys), cache.pages_stride,
            kept.logits.shape[2], heads, keys, scale, *cache.strides(v), table.stride,
        )  # fmt: skip
        constants = {
            "GROUP": group, "QUERIES": queries, "CAUSAL": causal and queries > 1, "PAGE": cache.page_size(k),
            "LENGTHS": cache.lengths is not None, "MASK": kind, "MASK_FLOOR": floor, "VAR": table.with_var,
            "WIDEN": widened(q), "BLOCK_R": block, "BLOCK_K": tile.keys, "WIDTH": width, "VALUE_WIDTH": v.shape[-1],
            **_forms(table),
            "VISIBILITY": _visibility(causal, mask is not None, rows_alike(mask, queries), queries),
            "BLOCK_D": power_of_2(width), "VALUE_BLOCK_D": power_of_2(v.shape[-1]),
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip
        return Settings(_kernel("decode_whole"), (pairs * -(-rows // block),), numbers, constants)

    key = (
        "decode_whole", layout(q), layout(k), layout(v), layout(mask), cache.layout, scale, layout(table.values),
        _form_key(table), tile, causal, q.device,
    )  # fmt: skip
    with on_device(q):
        tensors = (q, k, mask, cache.lengths, cache.pages, *kept, table.values, v, out)
        launched.append(launch(key, tensors, settle))
    return out


def _plan(q: Tensor, k: Tensor, v: Tensor, cache: Cache) -> Plan:
    batch, heads, keys = cache.batch_heads_keys(k)
    rows = q.shape[1] // heads * q.shape[2]
    width = max(q.shape[-1], v.shape[-1])
    return plan_for(q.device, q.element_size(), batch * heads, rows, keys, width, cache.pages is not None)


def rows_alike(mask: Tensor | None, queries: int) -> bool:
    """Whether all rows of a key head see the same keys, which the strides of the mask tell."""
    return mask is None or (queries == 1 and (mask.shape[1] == 1 or mask.stride(1) == 0))


def decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, block_table: Tensor | None, mask: Tensor | None,
    scale: float, table: Tensor, form: list[int], stats: bool, causal: bool = True,
) -> list[Tensor]:  # fmt: skip
    """The output and, with `stats`, β, count, maximum, log mass, shortfall and variance of the rows `[B, H, Lq]`.

    With `causal` the queries are the newest tokens, and each sees the keys up to its own. Without it every query sees
    all keys that the mask leaves.
    """
    place = None
    if lengths is None and block_table is None and not stats:
        place = (layout(q), layout(k), layout(v), layout(mask), scale, table.shape, tuple(form), causal, q.device)
        known = _plans.get(place)
        if known is not None and (again := known.run(q, k, v, mask, table)) is not None:
            return [again]
    cache, coefficients = Cache.dense(lengths, block_table), Coefficients(table, form)
    plan = _plan(q, k, v, cache)
    shape = (q.shape[0], q.shape[1], q.shape[2])
    _, heads, keys = cache.batch_heads_keys(k)
    launched: Launched = []
    with_var, masked = coefficients.with_var or stats, mask is not None
    rows = DecodeRows(None)
    if plan.whole is not None and not stats and not coefficients.solved:
        splits = (1, 1)
        out = whole_of(q, k, v, cache, mask, scale, coefficients, plan.whole, causal, launched)
    else:
        splits = (plan.logits.splits, plan.values.splits)
        kept = logits_of(q, k, cache, mask, scale, plan.logits, causal, with_var, False, launched)
        if stats or coefficients.solved:
            rows = rows_of(kept, coefficients, cache, shape, heads, keys, causal, masked, with_var, stats)
        alike = rows_alike(mask, q.shape[2])
        out = values_of(
            kept, coefficients, rows.beta, v, cache, shape, plan.values, causal, masked, alike, with_var, launched
        )
    if place is not None and rows.beta is None and None not in launched:
        remember(_plans, place, DecodePlan.of(q, k, v, splits, launched))
    return [out, *(x for x in rows if x is not None)] if stats else [out]


Launched = list[Compiled | None]
"""The kernels of a call, in order."""

_plans: dict[Any, DecodePlan] = {}


class DecodePlan(NamedTuple):
    """The launches of a decode against a whole contiguous cache, in which addresses alone are left open."""

    launches: Sequence[Any]
    places: tuple[int, ...]
    """Where logits, parts, sums and masses begin in one piece of memory, and where that ends."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, splits: tuple[int, int], launches: Sequence[Any]) -> DecodePlan:
        """A plan for tensors of this layout, whose keys were cut into `splits` parts for logits and for values."""
        pairs, rows = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1] * q.shape[2]
        pitch = -(-k.shape[2] // _ALIGNED) * _ALIGNED
        sums = pairs * rows * splits[1] if splits[1] > 1 else 0
        sizes = (pairs * rows * pitch, pairs * rows * FIELDS * splits[0], sums * v.shape[-1], sums)
        return cls(tuple(launches), (0, *itertools.accumulate(padded(4 * size) for size in sizes)))

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, table: Tensor) -> Tensor | None:
        """The output; None if a tensor starts at an odd address."""
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        mask_at = None if mask is None else mask.data_ptr()
        if (q_at | k_at | v_at | (mask_at or 0)) & 15:
            return None
        out = torch.empty((*q.shape[:3], v.shape[-1]), dtype=v.dtype, device=v.device)
        room = torch.empty((self.places[-1],), dtype=torch.uint8, device=q.device)
        logits, parts, sums, masses, _ = (room.data_ptr() + place for place in self.places)
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
    return [out, q.new_empty(q.shape[:3], dtype=torch.float32), *_fake_rows(q)] if stats else [out]


def _fake_rows(q: Tensor) -> list[Tensor]:
    shape = q.shape[:3]
    return [q.new_empty(shape, dtype=torch.int64), *(q.new_empty(shape, dtype=torch.float32) for _ in range(4))]


@torch.library.custom_op("sharpmax::decode_measure", mutates_args=())
def measure_op(
    q: Tensor, k: Tensor, lengths: Tensor | None, block_table: Tensor | None, mask: Tensor | None, scale: float
) -> list[Tensor]:
    """Logits, and count, maximum, log mass, shortfall and variance of the rows `[B, H, Lq]`."""
    cache = Cache.dense(lengths, block_table)
    _, heads, keys = cache.batch_heads_keys(k)
    kept = logits_of(q, k, cache, mask, scale, _plan(q, k, k, cache).logits, True, True, True, [])
    shape = (q.shape[0], q.shape[1], q.shape[2])
    rows = rows_of(kept, None, cache, shape, heads, keys, True, mask is not None, True, True)
    return [kept.logits, *(x for x in rows if x is not None)]


@measure_op.register_fake
def _(q: Tensor, k: Tensor, lengths: Any, block_table: Any, mask: Any, scale: Any) -> list[Tensor]:
    batch, heads, keys = Cache(lengths, block_table).batch_heads_keys(k)
    shape = (batch * heads, q.shape[1] // heads * q.shape[2], -(-keys // _ALIGNED) * _ALIGNED)
    return [q.new_empty(shape, dtype=torch.float32), *_fake_rows(q)]


@torch.library.custom_op("sharpmax::decode_values", mutates_args=())
def values_op(
    logits: Tensor, peak: Tensor, beta: Tensor, v: Tensor, lengths: Tensor | None, block_table: Tensor | None,
    masked: bool, alike: bool,
) -> Tensor:  # fmt: skip
    """The output for β `[B, H, Lq]` and what `decode_measure` found: logits, and the largest one of each row."""
    cache = Cache.dense(lengths, block_table)
    # Of the statistics only the maximum is read where β is given: one part, whose maximum is the whole's.
    parts = torch.zeros((logits.shape[0], FIELDS, 1, logits.shape[1]), device=v.device)
    parts[:, 0, 0] = peak.reshape(logits.shape[:2]).clamp_min(torch.finfo(torch.float32).min)
    keys = cache.batch_heads_keys(v)[2]
    shape = (beta.shape[0], beta.shape[1], beta.shape[2])
    paged = block_table is not None
    plan = plan_for(v.device, v.element_size(), logits.shape[0], logits.shape[1], keys, v.shape[-1], paged)
    kept, beta = Kept(logits, parts), beta.contiguous()
    return values_of(kept, None, beta, v, cache, shape, plan.values, True, masked, alike, False, [])


@values_op.register_fake
def _(
    logits: Any, peak: Any, beta: Tensor, v: Tensor, lengths: Any, block_table: Any, masked: Any, alike: Any
) -> Tensor:
    return v.new_empty((*beta.shape, v.shape[-1]))
