"""The fused kernel behind `impl='triton'`; importing this module imports triton.

One program owns a block of query rows of one head and walks over the keys in tiles. A tile's statistics are
taken relative to the tile's own maximum and mean, and then merged with those of the keys before it.
"""

# `triton.jit` is untyped, and what the annotations of a kernel mean is Triton's business.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# No `from __future__ import annotations`: Triton reads them to tell constants from arguments.

import triton
import triton.language as tl

__all__ = ["MASK_ADDED", "MASK_SHOWS", "NO_MASK", "row_parts"]

NO_MASK = 0
MASK_SHOWS = 1  # one byte per key, not 0 = visible
MASK_ADDED = 2  # floats


@triton.jit
def _add(total, lost, more):
    """Add to a running sum, and to what its roundings lost: over thousands of tiles that would show."""
    new = total + more
    taken = new - total
    return new, lost + ((total - (new - taken)) + (more - taken))


@triton.jit
def _absorb(peak, rest, rest_lost, short, short_lost, var, var_lost, bad, s, live):
    """Merge a tile of logits `s` `[rows, keys]` into the statistics of the keys before it.

    A row's mass relative to its maximum is 1 + rest: the top key's own weight, exactly 1, is kept out of the
    sum, so that ln(1 + rest) of an almost one-hot row keeps its relative accuracy. `short` = max − mean and
    `var` are kept normalised and are merged as Chan et al. do: var from Σx² − (Σx)² would lose all its digits
    when a row's logits are close together, whereas here every square is that of a distance from a mean.
    """
    # Maxima may drop a NaN, so rows that met one (or +inf, which leaves no finite softmax) are marked.
    sound = s < float("inf")
    bad = bad | tl.max((live & ~sound).to(tl.int32), 1)
    live = live & sound

    tile_peak = tl.max(tl.where(live, s, float("-inf")), 1)
    seen = tile_peak > float("-inf")
    base = tl.where(seen, tile_peak, 0.0)
    # exp(−1000) is 0 in float32 and float64: the bound changes no weight, and keeps 0 · x² from 0 · inf.
    x = tl.maximum(tl.where(live, s, base[:, None]) - base[:, None], -1000.0)
    light = tl.where(x < 0.0, tl.exp(x), 0.0)  # weights below the top one; 0 for hidden keys, whose x is 0
    ties = tl.sum((live & (x == 0.0)).to(s.dtype), 1)
    tile_rest = tl.sum(light, 1) + (ties - 1.0)
    tile_mass = tl.where(seen, 1.0 + tile_rest, 1.0)
    tile_short = -tl.sum(light * x, 1) / tile_mass
    off_mean = x + tile_short[:, None]
    tile_var = (tl.sum(light * off_mean * off_mean, 1) + ties * tile_short * tile_short) / tile_mass

    anchor = tl.maximum(peak, tile_peak)
    finite = tl.where(anchor > float("-inf"), anchor, 0.0)
    known = peak > float("-inf")
    drop = tl.where(known, tl.minimum(finite - peak, 1000.0), 0.0)
    tile_drop = tl.where(seen, tl.minimum(finite - tile_peak, 1000.0), 0.0)
    mass = tl.where(known, tl.exp(-drop) * (1.0 + rest), 0.0)
    tile_mass = tl.where(seen, tl.exp(-tile_drop) * (1.0 + tile_rest), 0.0)
    lead = tile_peak > peak
    rest, rest_lost = _add(
        tl.where(lead, tile_rest, rest), tl.where(lead, 0.0, rest_lost), tl.where(lead, mass, tile_mass)
    )

    # The lighter side corrects the heavier one. Two shares would have to add up to 1, and the error of that
    # sum, a GPU's division being inexact, would grow with the number of tiles.
    swap = tile_mass > mass
    minor = tl.where(swap, mass, tile_mass) / (1.0 + rest)
    major = 1.0 - minor
    below = drop + short
    tile_below = tile_drop + tile_short
    apart = tl.where(swap, below - tile_below, tile_below - below)
    wider = tl.where(swap, var - tile_var, tile_var - var)
    short, short_lost = _add(tl.where(swap, tile_below, below), tl.where(swap, 0.0, short_lost * major), minor * apart)
    var, var_lost = _add(
        tl.where(swap, tile_var, var),
        tl.where(swap, 0.0, var_lost * major),
        minor * wider + minor * major * apart * apart,
    )
    return anchor, rest, rest_lost, short, short_lost, var, var_lost, bad


@triton.jit(do_not_specialize=["queries", "keys", "offset"])
def row_parts(
    q_ptr,
    k_ptr,
    mask_ptr,
    gain_ptr,
    peak_ptr,
    rest_ptr,
    short_ptr,
    var_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_g,
    q_stride_l,
    q_stride_d,
    k_stride_b,
    k_stride_h,
    k_stride_l,
    k_stride_d,
    mask_stride_b,
    mask_stride_h,
    mask_stride_g,
    mask_stride_q,
    mask_stride_k,
    gain_stride_b,
    gain_stride_h,
    gain_stride_g,
    gain_stride_q,
    heads,
    group,
    queries,
    keys,
    offset,
    scale,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASK: tl.constexpr,
    MASK_FLOOR: tl.constexpr,
    GAIN: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Maximum, mass beside the top key, shortfall and variance of a block of rows; outputs are contiguous."""
    blocks = tl.cdiv(queries, BLOCK_Q)
    program = tl.program_id(0)
    # Later rows see more keys under a causal limit: they start first, so that no long program starts last.
    first = (blocks - 1 - program % blocks) * BLOCK_Q
    lane = (program // blocks).to(tl.int64)  # (batch, key head, member of the group); every offset is 64-bit
    member = lane % group
    head = lane // group % heads
    batch = lane // group // heads

    row = first + tl.arange(0, BLOCK_Q)
    row64 = row.to(tl.int64)
    in_rows = row < queries
    column = tl.arange(0, BLOCK_K)
    dim = tl.arange(0, BLOCK_D)
    dim64 = dim.to(tl.int64)
    in_width = dim < WIDTH

    q_at = q_ptr + batch * q_stride_b + head * q_stride_h + member * q_stride_g
    q_at += row64[:, None] * q_stride_l + dim64[None, :] * q_stride_d
    q = tl.load(q_at, mask=in_rows[:, None] & in_width[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    k_at = k_ptr + batch * k_stride_b + head * k_stride_h + dim64[:, None] * k_stride_d

    dtype: tl.constexpr = peak_ptr.dtype.element_ty
    if MASK != 0:
        mask_at = mask_ptr + batch * mask_stride_b + head * mask_stride_h + member * mask_stride_g
        mask_at += row64[:, None] * mask_stride_q
    if GAIN:
        gain_at = gain_ptr + batch * gain_stride_b + head * gain_stride_h + member * gain_stride_g
        gain = tl.load(gain_at + row64 * gain_stride_q, mask=in_rows, other=0.0).to(dtype)

    end = keys
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(tl.minimum(first + BLOCK_Q, queries) + offset, 0))

    peak = tl.full([BLOCK_Q], float("-inf"), dtype)
    rest = tl.zeros([BLOCK_Q], dtype)
    rest_lost = tl.zeros([BLOCK_Q], dtype)
    short = tl.zeros([BLOCK_Q], dtype)
    short_lost = tl.zeros([BLOCK_Q], dtype)
    var = tl.zeros([BLOCK_Q], dtype)
    var_lost = tl.zeros([BLOCK_Q], dtype)
    bad = tl.zeros([BLOCK_Q], tl.int32)
    for start in range(0, end, BLOCK_K):
        key = start + column
        key64 = key.to(tl.int64)
        in_keys = key < keys
        k = tl.load(k_at + key64[None, :] * k_stride_l, mask=in_width[:, None] & in_keys[None, :], other=0.0)
        if WIDEN:
            k = k.to(tl.float32)
        # "ieee": TF32 would round float32 inputs to 10 bits.
        s = tl.dot(q, k, input_precision="ieee") * scale
        inside = in_rows[:, None] & in_keys[None, :]
        live = inside
        if CAUSAL:
            live = live & (key[None, :] <= row[:, None] + offset)
        if MASK != 0:
            entry = tl.load(mask_at + key64[None, :] * mask_stride_k, mask=inside, other=0)
            if MASK == 1:
                live = live & (entry != 0)
            else:
                if entry.dtype != tl.float64:
                    entry = entry.to(tl.float32)
                hidden = entry <= MASK_FLOOR
                live = live & ~hidden
                # Hidden entries leave before the gain meets them: 0 · −inf is NaN, 2 · finfo.min overflows.
                bias = tl.where(hidden, 0.0, entry).to(dtype)
                if GAIN:
                    bias = bias * gain[:, None]
                s = s + bias
        peak, rest, rest_lost, short, short_lost, var, var_lost, bad = _absorb(
            peak, rest, rest_lost, short, short_lost, var, var_lost, bad, s, live
        )

    out = lane * queries + row64
    nan = float("nan")
    tl.store(peak_ptr + out, tl.where(bad != 0, nan, peak), mask=in_rows)
    tl.store(rest_ptr + out, tl.where(bad != 0, nan, rest + rest_lost), mask=in_rows)
    tl.store(short_ptr + out, tl.where(bad != 0, nan, short + short_lost), mask=in_rows)
    tl.store(var_ptr + out, tl.where(bad != 0, nan, var + var_lost), mask=in_rows)
