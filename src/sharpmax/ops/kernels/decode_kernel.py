"""The kernels of decoding, which read keys and values once; importing this module imports triton.

`decode_logits` computes the logits of a few query rows against a part of the keys, keeps them (4 bytes per key and
row), and leaves the part's statistics. `decode_values` merges the statistics of all parts, derives β, and adds up its
part of the values. `decode_whole` is both in one launch, for keys in one part. `decode_sum` adds the parts in a fixed
order. `decode_rows` writes merged statistics and β where somebody asks for them or where β has to be solved for.

Rows of one key head are numbered r = member of the group · queries + query. With `CAUSAL` the queries are the newest
tokens, and each sees the keys up to its own; without it every query sees all keys that the mask leaves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sharpmax.ops.kernels import tables
from sharpmax.ops.kernels.decode_launch import FIELDS
from sharpmax.ops.kernels.sharpen_kernel import at_least, entropy_of, row_beta

# `triton.jit` is untyped, and what the annotations of a kernel mean is Triton's business.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"


FIELDS_OF = tl.constexpr(FIELDS)
TARGET = tl.constexpr(tables.TARGET)
HAS_TARGET = tl.constexpr(1 << tables.TARGET)
# Below any logit, and finite: the maximum of nothing, from which distances can still be taken.
LOWEST = tl.constexpr(-3.0e38)
STEPS = tl.constexpr(24)
TOLERANCE = tl.constexpr(1e-6)


@triton.jit
def _distance(x):
    """exp(−1000) is 0: the bound changes no weight and keeps 0 · x² from 0 · inf; NaN stays."""
    return at_least(x, -1000.0)


@triton.jit
def _length(lengths_ptr, batch, keys, LENGTHS: tl.constexpr):
    """How many keys of this sequence are filled."""
    if LENGTHS:
        return tl.minimum(tl.maximum(tl.load(lengths_ptr + batch).to(tl.int32), 0), keys)
    else:
        return keys


@triton.jit
def _lines(
    x_ptr, pages_ptr, batch, head, tile, key, inside, stride_b, stride_h, stride_l,
    BLOCK_K: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Where the lines of some keys start: in a contiguous cache, or in the pages of a paged one."""
    base = x_ptr + head * stride_h
    if PAGE == 0:
        return base + batch * stride_b + key.to(tl.int64) * stride_l
    elif PAGE % BLOCK_K == 0:
        # The whole tile lies in one page.
        page = tl.load(pages_ptr + tile * BLOCK_K // PAGE).to(tl.int64)
        return base + page * stride_b + (key % PAGE).to(tl.int64) * stride_l
    else:
        page = tl.load(pages_ptr + key // PAGE, mask=inside, other=0).to(tl.int64)
        return base + page * stride_b + (key % PAGE).to(tl.int64) * stride_l


@triton.jit
def _place(program, splits, ROWS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Block of rows, part of the keys, and pair (batch, key head) of a program; every offset is 64-bit."""
    BLOCKS: tl.constexpr = (ROWS + BLOCK_R - 1) // BLOCK_R
    return program % BLOCKS, program // BLOCKS % splits, (program // BLOCKS // splits).to(tl.int64)


@triton.jit(do_not_specialize=["keys", "splits"])
def decode_logits(
    q_ptr, k_ptr, mask_ptr, lengths_ptr, pages_ptr, logits_ptr, part_ptr, q_stride_b, q_stride_h, q_stride_l,
    q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d, mask_stride_b, mask_stride_h, mask_stride_l,
    mask_stride_k, pages_stride, pitch, heads, keys, splits, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    LENGTHS: tl.constexpr, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, VAR: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Logits `[pair, row, key]` of one part of the keys, −inf where hidden, and the part's statistics."""
    ROWS: tl.constexpr = GROUP * QUERIES
    block, split, pair = _place(tl.program_id(0), splits, ROWS, BLOCK_R)
    head = pair % heads
    batch = pair // heads

    length = _length(lengths_ptr, batch, keys, LENGTHS)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < ROWS
    query = row % QUERIES
    member = (row // QUERIES).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    in_width = dim < WIDTH
    column = tl.arange(0, BLOCK_K)

    q_at = q_ptr + batch * q_stride_b + (head * GROUP + member)[None, :] * q_stride_h
    q_at += query.to(tl.int64)[None, :] * q_stride_l + dim.to(tl.int64)[:, None] * q_stride_d
    q = tl.load(q_at, mask=in_width[:, None] & in_rows[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    if PAGE != 0:
        pages_ptr += batch * pages_stride
    if MASK != 0:
        mask_at = mask_ptr + batch * mask_stride_b + (head * GROUP + member)[None, :] * mask_stride_h
        mask_at += query.to(tl.int64)[None, :] * mask_stride_l
    logits_at = logits_ptr + (pair * ROWS + row.to(tl.int64))[None, :] * pitch

    # Every key's place in the tile keeps statistics of its own, so that nothing is exchanged inside the loop.
    peak = tl.full([BLOCK_K, BLOCK_R], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
    first = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
    second = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
    count = tl.zeros([BLOCK_K, BLOCK_R], tl.int32)
    tiles = tl.cdiv(length, BLOCK_K)
    for tile in range(tiles * split // splits, tiles * (split + 1) // splits):
        key = tile * BLOCK_K + column
        inside = key < length
        k_at = _lines(
            k_ptr, pages_ptr, batch, head, tile, key, inside, k_stride_b, k_stride_h, k_stride_l, BLOCK_K, PAGE
        )
        seen = inside[:, None]
        if WIDTH != BLOCK_D:
            seen = seen & in_width[None, :]
        k = tl.load(
            k_at[:, None] + dim.to(tl.int64)[None, :] * k_stride_d, mask=seen, other=0.0, eviction_policy="evict_first"
        )
        if WIDEN:
            k = k.to(tl.float32)
        # "ieee": TF32 would round float32 inputs to 10 bits.
        s = tl.dot(k, q, input_precision="ieee") * scale
        visible = inside[:, None] & in_rows[None, :]
        if CAUSAL:
            visible = visible & (key[:, None] < (length - QUERIES + 1 + query)[None, :])
        if MASK != 0:
            entry = tl.load(mask_at + key.to(tl.int64)[:, None] * mask_stride_k, mask=visible, other=0)
            if MASK == 1:
                visible = visible & (entry != 0)
            else:
                entry = entry.to(tl.float32)
                hidden = entry <= MASK_FLOOR
                visible = visible & ~hidden
                s = s + tl.where(hidden, 0.0, entry)
            count += visible.to(tl.int32)
        s = tl.where(visible, s, float("-inf"))
        tl.store(
            logits_at + key.to(tl.int64)[:, None],
            s,
            mask=inside[:, None] & in_rows[None, :],
            eviction_policy="evict_last",
        )
        top = tl.maximum(peak, s)
        drop = _distance(peak - top)
        x = _distance(s - top)
        fade = tl.exp(drop)
        weight = tl.exp(x)
        if VAR:
            second = fade * (second + drop * (2.0 * first + drop * mass)) + weight * x * x
        first = fade * (first + drop * mass) + weight * x
        mass = fade * mass + weight
        peak = top

    top = tl.max(peak, 0)
    drop = _distance(peak - top[None, :])
    fade = tl.exp(drop)
    at = part_ptr + (pair * FIELDS_OF * splits + split) * ROWS + row
    step = splits * ROWS
    tl.store(at, top, mask=in_rows)
    tl.store(at + step, tl.sum(fade * mass, 0), mask=in_rows)
    tl.store(at + 2 * step, tl.sum(fade * (first + drop * mass), 0), mask=in_rows)
    if VAR:
        tl.store(at + 3 * step, tl.sum(fade * (second + drop * (2.0 * first + drop * mass)), 0), mask=in_rows)
    if MASK != 0:
        tl.store(at + 4 * step, tl.sum(count, 0).to(tl.float32), mask=in_rows)


@triton.jit
def _merged(
    part_ptr, pair, row, in_rows, length, splits,
    ROWS: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, COUNTED: tl.constexpr, VAR: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Count, maximum, log mass, shortfall and variance of rows over all parts; NaN (but for the count) for a bad row.

    A row that sees nothing has the maximum LOWEST.
    """
    split = tl.arange(0, SPLITS)
    at = part_ptr + (pair * FIELDS_OF * splits + split[:, None]) * ROWS + row[None, :]
    step = splits * ROWS
    there = (split < splits)[:, None] & in_rows[None, :]
    peak = tl.load(at, mask=there, other=LOWEST)
    mass = tl.load(at + step, mask=there, other=0.0)
    first = tl.load(at + 2 * step, mask=there, other=0.0)
    top = tl.max(peak, 0)
    drop = _distance(peak - top[None, :])
    fade = tl.exp(drop)
    total = tl.sum(fade * mass, 0)
    total = tl.where(total == 0.0, 1.0, total)  # NaN stays
    shortfall = -tl.sum(fade * (first + drop * mass), 0) / total
    if VAR:
        second = tl.load(at + 3 * step, mask=there, other=0.0)
        var = tl.sum(fade * (second + drop * (2.0 * first + drop * mass)), 0) / total
        var = at_least(var - shortfall * shortfall, 0.0)
    else:
        var = total * 0.0
    if COUNTED:
        count = tl.sum(tl.load(at + 4 * step, mask=there, other=0.0).to(tl.int32), 0)
    elif CAUSAL:
        count = tl.maximum(length - QUERIES + 1 + row % QUERIES, 0)
    else:
        count = row * 0 + length
    return count, tl.where(total == total, top, float("nan")), tl.log(total), shortfall, var


@triton.jit
def _weighted(
    acc, mass, invalid, logits_at, v_ptr, pages_ptr, batch, head, tile, length, peak, beta, in_rows,
    v_stride_b, v_stride_h, v_stride_l, v_stride_d,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, VISIBILITY: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add one tile of values, weighted; sums are `[width, rows]` and `[keys, rows]`."""
    column = tl.arange(0, BLOCK_K)
    dim = tl.arange(0, BLOCK_D)
    key = tile * BLOCK_K + column
    inside = key < length
    s = tl.load(
        logits_at[None, :] + key.to(tl.int64)[:, None],
        mask=inside[:, None] & in_rows[None, :],
        other=float("-inf"),
        eviction_policy="evict_first",
    )
    hidden = s == float("-inf")
    # 0 · −inf is NaN, and β may be 0.
    weight = tl.where(hidden, 0.0, tl.exp(beta[None, :] * (tl.where(hidden, peak[None, :], s) - peak[None, :])))
    seen = inside
    if VISIBILITY == 1:
        # All rows see the same keys; what a value holds that none of them sees must not be read: 0 · NaN is NaN.
        seen = tl.max((~hidden).to(tl.int32), 1) != 0
    wanted = seen[:, None]
    if WIDTH != BLOCK_D:
        wanted = wanted & (dim < WIDTH)[None, :]
    v_at = _lines(v_ptr, pages_ptr, batch, head, tile, key, inside, v_stride_b, v_stride_h, v_stride_l, BLOCK_K, PAGE)
    v = tl.load(
        v_at[:, None] + dim.to(tl.int64)[None, :] * v_stride_d, mask=wanted, other=0.0, eviction_policy="evict_first"
    )
    if WIDEN:
        v = v.to(tl.float32)
    if VISIBILITY == 2:
        # A non-finite value makes the rows that see its key NaN, and no others.
        broken = ~(tl.abs(v.to(tl.float32)) < float("inf"))
        v = tl.where(broken, 0.0, v).to(v.dtype)
        invalid = tl.dot(tl.trans(broken.to(v.dtype)), (~hidden).to(v.dtype), acc=invalid, input_precision="ieee")
    acc = tl.dot(tl.trans(v), weight.to(v.dtype), acc=acc, input_precision="ieee")
    return acc, mass + weight, invalid


@triton.jit(do_not_specialize=["keys", "splits", "parts"])
def decode_values(
    logits_ptr, part_ptr, table_ptr, beta_ptr, v_ptr, lengths_ptr, pages_ptr, sums_ptr, masses_ptr, v_stride_b,
    v_stride_h, v_stride_l, v_stride_d, pages_stride, pitch, table_stride, heads, keys, parts, splits,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    LENGTHS: tl.constexpr, COUNTED: tl.constexpr, VAR: tl.constexpr, GIVEN: tl.constexpr, FORMS: tl.constexpr,
    TERMS: tl.constexpr, SEGMENTS: tl.constexpr, VISIBILITY: tl.constexpr, FINAL: tl.constexpr, WIDEN: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Σ exp(β(s − max))·v over one part of the keys: `[pair, split, row, width]`, or divided and done if `FINAL`."""
    ROWS: tl.constexpr = GROUP * QUERIES
    block, split, pair = _place(tl.program_id(0), splits, ROWS, BLOCK_R)
    head = pair % heads
    batch = pair // heads

    length = _length(lengths_ptr, batch, keys, LENGTHS)
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    in_rows = row < ROWS
    count, peak, log_mass, shortfall, var = _merged(
        part_ptr, pair, row, in_rows, length, parts, ROWS, QUERIES, CAUSAL, COUNTED, VAR, PARTS
    )
    if GIVEN:
        beta = tl.load(beta_ptr + pair * ROWS + row, mask=in_rows, other=1.0)
    else:
        place = (head * GROUP + row // QUERIES) * table_stride
        beta = row_beta(table_ptr, place, in_rows, count, log_mass, shortfall, var, FORMS, TERMS, SEGMENTS)
    if PAGE != 0:
        pages_ptr += batch * pages_stride
    logits_at = logits_ptr + (pair * ROWS + row.to(tl.int64)) * pitch

    acc = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    invalid = tl.zeros([BLOCK_D, BLOCK_R], tl.float32)
    mass = tl.zeros([BLOCK_K, BLOCK_R], tl.float32)
    tiles = tl.cdiv(length, BLOCK_K)
    start = tiles * split // splits
    end = tiles * (split + 1) // splits
    shared = end
    if VISIBILITY == 3:
        # Without a mask only the last keys are seen by some rows and not by others.
        shared = tl.minimum(end, tl.maximum(start, (length - QUERIES + 1) // BLOCK_K))
    for last in tl.static_range(2 if VISIBILITY == 3 else 1):
        for tile in range(shared if last else start, end if last else shared):
            acc, mass, invalid = _weighted(
                acc, mass, invalid, logits_at, v_ptr, pages_ptr, batch, head, tile, length, peak, beta, in_rows,
                v_stride_b, v_stride_h, v_stride_l, v_stride_d,
                WIDTH, PAGE, 2 if last else VISIBILITY % 3, WIDEN, BLOCK_K, BLOCK_D,
            )  # fmt: skip
    if VISIBILITY >= 2:
        acc = tl.where(invalid > 0.0, float("nan"), acc)

    total = tl.sum(mass, 0)
    dim = tl.arange(0, BLOCK_D)
    wanted = in_rows[None, :] & (dim < WIDTH)[:, None]
    line = (pair * splits + split) * ROWS + row.to(tl.int64)
    at = sums_ptr + line[None, :] * WIDTH + dim[:, None]
    if FINAL:
        acc = acc / tl.where(total == 0.0, 1.0, total)[None, :]
        tl.store(at, acc.to(sums_ptr.dtype.element_ty), mask=wanted)
    else:
        tl.store(at, acc, mask=wanted)
        tl.store(masses_ptr + line, total, mask=in_rows)


@triton.jit(do_not_specialize=["keys"])
def decode_whole(
    q_ptr, k_ptr, mask_ptr, lengths_ptr, pages_ptr, logits_ptr, part_ptr, table_ptr, v_ptr, out_ptr, q_stride_b,
    q_stride_h, q_stride_l, q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d, mask_stride_b,
    mask_stride_h, mask_stride_l, mask_stride_k, pages_stride, pitch, heads, keys, scale, v_stride_b, v_stride_h,
    v_stride_l, v_stride_d, table_stride,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, PAGE: tl.constexpr, LENGTHS: tl.constexpr,
    MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, VAR: tl.constexpr, WIDEN: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, FORMS: tl.constexpr, TERMS: tl.constexpr,
    SEGMENTS: tl.constexpr, VISIBILITY: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Both passes in one launch, where nothing is to be had from other programs between them."""
    decode_logits(
        q_ptr, k_ptr, mask_ptr, lengths_ptr, pages_ptr, logits_ptr, part_ptr, q_stride_b, q_stride_h,
        q_stride_l, q_stride_d, k_stride_b, k_stride_h, k_stride_l, k_stride_d, mask_stride_b, mask_stride_h,
        mask_stride_l, mask_stride_k, pages_stride, pitch, heads, keys, 1, scale,
        GROUP, QUERIES, CAUSAL, WIDTH, PAGE, LENGTHS, MASK, MASK_FLOOR, VAR, WIDEN, BLOCK_R, BLOCK_K, BLOCK_D,
    )  # fmt: skip
    # What other threads of this program have written is read below.
    tl.debug_barrier()
    decode_values(
        logits_ptr, part_ptr, table_ptr, None, v_ptr, lengths_ptr, pages_ptr, out_ptr, None,
        v_stride_b, v_stride_h, v_stride_l, v_stride_d, pages_stride, pitch, table_stride, heads, keys, 1, 1,
        GROUP, QUERIES, CAUSAL, VALUE_WIDTH, PAGE, LENGTHS, MASK != 0, VAR, False, FORMS, TERMS, SEGMENTS, VISIBILITY,
        True, WIDEN, 1, BLOCK_R, BLOCK_K, VALUE_BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def decode_sum(
    sums_ptr, masses_ptr, out_ptr, splits,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one row, always in the same order, and divide by its mass; 0 for a row without keys."""
    line = tl.program_id(0).to(tl.int64)
    pair = line // ROWS
    row = line % ROWS
    split = tl.arange(0, SPLITS)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    there = split < splits
    wanted = dim < WIDTH
    part = (pair * splits + split) * ROWS + row
    mass = tl.sum(tl.load(masses_ptr + part, mask=there, other=0.0), 0)
    acc = tl.load(sums_ptr + part[:, None] * WIDTH + dim[None, :], mask=there[:, None] & wanted[None, :], other=0.0)
    out = tl.sum(acc, 0) / tl.where(mass == 0.0, 1.0, mass)
    tl.store(out_ptr + line * WIDTH + dim, out.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit
def _entropy_at(logits_at, peak, beta, count, length, BLOCK_K: tl.constexpr):
    """Entropy and variance of one row whose logits are multiplied by β."""
    column = tl.arange(0, BLOCK_K)
    mass = tl.zeros([BLOCK_K], tl.float32)
    first = tl.zeros([BLOCK_K], tl.float32)
    second = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, length, BLOCK_K, num_stages=3):
        key = start + column
        s = tl.load(logits_at + key, mask=key < length, other=float("-inf"))
        x = _distance(beta * (s - peak))
        weight = tl.where(s == float("-inf"), 0.0, tl.exp(x))
        mass += weight
        first += weight * x
        second += weight * x * x
    total = tl.sum(mass, 0)
    shortfall = -tl.sum(first, 0) / total
    var = at_least(tl.sum(second, 0) / total - shortfall * shortfall, 0.0)
    return entropy_of(tl.log(total), shortfall, count), var


@triton.jit
def _solved(logits_at, peak, count, length, entropy, var, target, floor, ceiling, BLOCK_K: tl.constexpr):
    """β at which a row's entropy is the target: Newton in u = ln β, kept inside a bracket that halves otherwise."""
    low = floor
    high = ceiling
    u = entropy * 0.0
    now = entropy
    slope = var
    settled = (tl.abs(now - target) < TOLERANCE) | ((now <= target) & (u <= low)) | ((now > target) & (u >= high))
    step = 0
    while (step < STEPS) & (settled == 0):
        above = now > target
        low = tl.where(above, u, low)
        high = tl.where(above, high, u)
        newton = u + (now - target) / at_least(slope, 1e-30)
        u = tl.where((newton > low) & (newton < high), newton, 0.5 * (low + high))
        now, slope = _entropy_at(logits_at, peak, tl.exp(u), count, length, BLOCK_K)
        settled = (tl.abs(now - target) < TOLERANCE) | ((now <= target) & (u <= low))
        settled = settled | ((now > target) & (u >= high)) | (high - low < 1e-9)
        step += 1
    u = tl.minimum(tl.maximum(u, floor), ceiling)
    now, slope = _entropy_at(logits_at, peak, tl.exp(u), count, length, BLOCK_K)
    free = (u > floor) & (u < ceiling) & (slope > 1e-12)
    polish = tl.where(free, (now - target) / tl.where(free, slope, 1.0), 0.0)
    return tl.exp(u + tl.where(tl.abs(polish) < 1e-2, polish, 0.0))


@triton.jit(do_not_specialize=["keys", "parts"])
def decode_rows(
    logits_ptr, part_ptr, table_ptr, lengths_ptr, beta_ptr, count_ptr, peak_ptr, log_mass_ptr, shortfall_ptr,
    var_ptr, pitch, table_stride, heads, keys, parts,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, COUNTED: tl.constexpr,
    VAR: tl.constexpr, STATS: tl.constexpr, FORMS: tl.constexpr, TERMS: tl.constexpr, SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """β of one row (nothing if `FORMS` is 0) and, if asked for, its statistics over all keys."""
    ROWS: tl.constexpr = GROUP * QUERIES
    line = tl.program_id(0).to(tl.int64)
    pair = line // ROWS
    head = pair % heads
    length = _length(lengths_ptr, pair // heads, keys, LENGTHS)
    # A block of one row, so that a row is merged here exactly as where the values are added up.
    one = (line % ROWS).to(tl.int32) + tl.arange(0, 1)
    counts, peaks, log_masses, shortfalls, variances = _merged(
        part_ptr, pair, one, one >= 0, length, parts, ROWS, QUERIES, CAUSAL, COUNTED, VAR, PARTS
    )
    count = tl.sum(counts, 0)
    peak = tl.sum(peaks, 0)
    log_mass = tl.sum(log_masses, 0)
    shortfall = tl.sum(shortfalls, 0)
    var = tl.sum(variances, 0)
    if STATS:
        tl.store(count_ptr + line, count.to(tl.int64))
        tl.store(peak_ptr + line, tl.where(peak == LOWEST, float("-inf"), peak))
        tl.store(log_mass_ptr + line, log_mass)
        tl.store(shortfall_ptr + line, shortfall)
        tl.store(var_ptr + line, var)
    if FORMS != 0:
        place = (head * GROUP + line % ROWS // QUERIES) * table_stride
        beta = row_beta(table_ptr, place, count >= 0, count, log_mass, shortfall, var, FORMS, TERMS, SEGMENTS)
        if HAS_TARGET & FORMS:  # noqa: SIM102  (known while compiling, unlike the next)
            if (tl.load(table_ptr + place) == TARGET) & (count > 1):
                entropy = entropy_of(log_mass, shortfall, count)
                beta = entropy  # NaN for a bad row
                if entropy == entropy:
                    beta = _solved(
                        logits_ptr + line * pitch, peak, count, length, entropy, var,
                        tl.load(table_ptr + place + 1), tl.load(table_ptr + place + 2),
                        tl.load(table_ptr + place + 3), BLOCK_K,
                    )  # fmt: skip
        tl.store(beta_ptr + line, beta)
