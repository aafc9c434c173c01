"""The fused kernels behind `impl='triton'`; importing this module imports triton.

One program owns a block of query rows of one head and walks over the keys in tiles, in one of two ways:

- `quick_parts`, for half precision: sums of 2^x, x·2^x and x²·2^x, where x is a logit in units of ln 2 relative to a
  reference that stays fixed for the row. Floating-point sums do not care how far their reference is from the maximum
  as long as nothing leaves the range of float32, so the maximum need not be known, and no sum is ever rescaled. What
  comes out tells whether that went well (`_sound`); a row in which it did not gets NaN for its anchor.
- `careful_parts`, for float32 and float64, and afterwards for the rows that were left at NaN (logits that overflow, a
  NaN that a row sees, a reference far from everything it sees): a tile's statistics are taken relative to the tile's
  own maximum and mean, and then merged with those of the keys before it. It is a kernel of its own because its
  registers would keep half of the quick one's programs off a processor.
"""

from __future__ import annotations

import triton
import triton.language as tl

# `triton.jit` is untyped, and what the annotations of a kernel mean is Triton's business.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"


LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# 2^−1000 is 0 in float32 and float64: where a hidden key is put, so that 0 · x stays 0 where 0 · inf would be NaN.
NOWHERE: tl.constexpr = tl.constexpr(-1000.0)


@triton.jit
def _add(total, lost, more):
    """Add to a running sum, and to what its roundings lost: over thousands of tiles that would show."""
    new = total + more
    taken = new - total
    return new, lost + ((total - (new - taken)) + (more - taken))


@triton.jit
def _absorb(peak, rest, rest_lost, short, short_lost, var, var_lost, bad, s, visible):
    """Merge a tile of logits `s` `[rows, keys]` into the statistics of the keys before it.

    A row's mass relative to its maximum is 1 + rest: the top key's own weight, exactly 1, is kept out of the
    sum, so that ln(1 + rest) of an almost one-hot row keeps its relative accuracy. `short` = max − mean and
    `var` are kept normalised and are merged as Chan et al. do: var from Σx² − (Σx)² would lose all its digits
    when a row's logits are close together, whereas here every square is that of a distance from a mean.
    """
    # Maxima may drop a NaN, so rows that met one (or +inf, which leaves no finite softmax) are marked.
    sound = s < float("inf")
    bad = bad | tl.max((visible & ~sound).to(tl.int32), 1)
    visible = visible & sound

    tile_peak = tl.max(tl.where(visible, s, float("-inf")), 1)
    seen = tile_peak > float("-inf")
    base = tl.where(seen, tile_peak, 0.0)
    # exp(−1000) is 0 in float32 and float64: the bound changes no weight, and keeps 0 · x² from 0 · inf.
    x = tl.maximum(tl.where(visible, s, base[:, None]) - base[:, None], -1000.0)
    light = tl.where(x < 0.0, tl.exp(x), 0.0)  # weights below the top one; 0 for hidden keys, whose x is 0
    ties = tl.sum((visible & (x == 0.0)).to(s.dtype), 1)
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


@triton.jit
def _columns(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Eight partial sums per row: in the layout of a matrix product they need no exchange between threads."""
    return tl.sum(tl.reshape(x, [ROWS, KEYS // 8, 8]), 1)


@triton.jit
def _highest(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Eight partial maxima per row."""
    return tl.max(tl.reshape(x, [ROWS, KEYS // 8, 8]), 1)


@triton.jit
def _collect(
    mass, first, second, peak, x,
    MAX: tl.constexpr, VAR: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add a tile to the sums of the quick way."""
    weight = tl.exp2(x)
    moment = weight * x
    mass += _columns(weight, ROWS, KEYS)
    first += _columns(moment, ROWS, KEYS)
    if VAR:
        second += _columns(moment * x, ROWS, KEYS)
    if MAX:
        peak = tl.maximum(peak, _highest(x, ROWS, KEYS))
    return mass, first, second, peak


@triton.jit
def _kept(x, visible):
    """Logits with those that weigh nothing put where the quick way can have them; NaN stays NaN."""
    # A mask may have put a key at −inf without hiding it.
    return tl.where(visible & ~(x < NOWHERE), x, NOWHERE)


@triton.jit
def _sound(mass):
    """Whether the sums of the quick way can be trusted.

    Above the one end something may have overflowed. Below the other, weights may have underflowed that count: here the
    lost ones, each under 2^−126, are less than 2^−80 of the sum even if there are millions. NaN is not sound.
    """
    return (mass > 1e-12) & (mass < 1e30)


@triton.jit
def _near(mean, VAR: tl.constexpr):
    """Whether the mean, measured from the reference, is small enough for a difference of it and what it is taken from.

    Entropies are differences of numbers of its size, and variances of numbers of its square.
    """
    if VAR:
        return tl.abs(mean) < 16.0
    else:
        return tl.abs(mean) < 64.0


@triton.jit
def _keys_at(k_at, k_desc, batch, head, key, start, keys, k_stride_l, in_width,
             WIDTH: tl.constexpr, TMA: tl.constexpr, RAGGED: tl.constexpr, WIDEN: tl.constexpr,
             BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """A tile of keys, `[BLOCK_D, BLOCK_K]`; 0 beyond the ends."""
    if TMA:
        # What lies beyond the keys of a head is beyond the descriptor's box and comes as 0.
        k = tl.trans(tl.reshape(k_desc.load([batch, head, start, 0]), [BLOCK_K, BLOCK_D]))
    else:
        at = k_at + key.to(tl.int64)[None, :] * k_stride_l
        if RAGGED:
            k = tl.load(at, mask=in_width[:, None] & (key < keys)[None, :], other=0.0)
        elif WIDTH == BLOCK_D:
            k = tl.load(at)
        else:
            k = tl.load(at, mask=in_width[:, None], other=0.0)
    if WIDEN:
        k = k.to(tl.float32)
    return k


@triton.jit
def _shown(s, row_in, key, low, high, mask_at, mask_stride_k, gain,
           MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, GAIN: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """The logits of a tile with the mask added (in units of 1/UNIT), and which of them their rows see."""
    visible = row_in[:, None] & (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
    if MASK != 0:
        entry = tl.load(mask_at + key.to(tl.int64)[None, :] * mask_stride_k, mask=visible, other=0)
        if MASK == 1:
            visible = visible & (entry != 0)
        else:
            if entry.dtype != tl.float64:
                entry = entry.to(tl.float32)
            hidden = entry <= MASK_FLOOR
            visible = visible & ~hidden
            # Hidden entries leave before the gain meets them: 0 · −inf is NaN, 2 · finfo.min overflows.
            bias = tl.where(hidden, 0.0, entry).to(s.dtype) * UNIT
            if GAIN:
                bias = bias * gain[:, None]
            s = s + bias
    return s, visible


@triton.jit
def _reference(q, k_at, begin, keys, k_stride_l, in_rows, in_width, low, high, mask_at, mask_stride_k, gain, scale2,
               WIDTH: tl.constexpr, WIDEN: tl.constexpr, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr,
               GAIN: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Where the quick way measures the logits of each row from: their softmax mean over sixteen keys.

    Variances come out of sums of squares, which keep their digits if the squares are those of distances from a mean.
    """
    key = begin + tl.arange(0, 16)
    k = _keys_at(k_at, None, 0, 0, key, begin, keys, k_stride_l, in_width,
                 WIDTH, False, True, WIDEN, 16, BLOCK_D)  # fmt: skip
    x, visible = _shown(tl.dot(q, k, input_precision="ieee") * scale2, in_rows, key, low, high, mask_at,
                     mask_stride_k, gain, MASK, MASK_FLOOR, GAIN, LOG2E)  # fmt: skip
    top = tl.max(tl.where(visible, x, float("-inf")), 1)
    top = tl.where(top > float("-inf"), top, 0.0)
    x = _kept(x - top[:, None], visible)
    weight = tl.exp2(x)
    return top + tl.sum(weight * x, 1) / tl.maximum(tl.sum(weight, 1), 1.0)


@triton.jit
def block_of(number, total, queries, heads, group, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Which rows a block has: first row, and lane, batch, key head and member of its group (64-bit)."""
    blocks = tl.cdiv(queries, BLOCK_Q)
    lanes = total // blocks
    if CAUSAL:
        # Later rows see more keys: they start first in every lane, so that no long program starts last.
        first = (blocks - 1 - number // lanes) * BLOCK_Q
        lane = (number % lanes).to(tl.int64)
    else:
        first = number % blocks * BLOCK_Q
        lane = (number // blocks).to(tl.int64)
    return first, lane, lane // group // heads, lane // group % heads, lane % group


@triton.jit
def _limits(span_ptr, batch, row, in_rows, keys, offset, span_stride_b, span_stride_e, span_stride_q,
            CAUSAL: tl.constexpr, SPANS: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """The first key of each row, and the one after its last."""
    low = tl.zeros([BLOCK_Q], tl.int32)
    high = tl.zeros([BLOCK_Q], tl.int32) + keys
    if CAUSAL:
        high = tl.minimum(high, row + (offset + 1))
    if SPANS:
        span_at = span_ptr + batch * span_stride_b + row.to(tl.int64) * span_stride_q
        low = tl.maximum(low, tl.load(span_at, mask=in_rows, other=0))
        high = tl.minimum(high, tl.load(span_at + span_stride_e, mask=in_rows, other=0))
    return low, high


@triton.jit
def _masks(mask_ptr, batch, head, member, row, mask_stride_b, mask_stride_h, mask_stride_g, mask_stride_q):
    """Where the mask of each row starts."""
    at = mask_ptr + batch * mask_stride_b + head * mask_stride_h + member * mask_stride_g
    return at + row.to(tl.int64)[:, None] * mask_stride_q


@triton.jit
def _gains(gain_ptr, batch, head, member, row, in_rows, gain_stride_b, gain_stride_h, gain_stride_g, gain_stride_q):
    """The factor of each row's mask."""
    at = gain_ptr + batch * gain_stride_b + head * gain_stride_h + member * gain_stride_g
    return tl.load(at + row.to(tl.int64) * gain_stride_q, mask=in_rows, other=0.0)


@triton.jit(do_not_specialize=["queries", "keys", "offset"])
def quick_parts(
    q_ptr, k_ptr, k_desc, mask_ptr, gain_ptr, span_ptr, anchor_ptr, log_mass_ptr, short_ptr, var_ptr,
    q_stride_b, q_stride_h, q_stride_g, q_stride_l, q_stride_d,
    k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    mask_stride_b, mask_stride_h, mask_stride_g, mask_stride_q, mask_stride_k,
    gain_stride_b, gain_stride_h, gain_stride_g, gain_stride_q,
    span_stride_b, span_stride_e, span_stride_q,
    heads, group, queries, keys, offset, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr,
    GAIN: tl.constexpr, WIDEN: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr, MAX: tl.constexpr,
    VAR: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Statistics of a block of rows relative to their maximum (to their lse without MAX); outputs are contiguous.

    What only MAX or VAR need is left out without them, and the tiles in which some keys are hidden from some rows where
    there are none (EVEN). The anchor of a row that needs more care is NaN.
    """
    first, lane, batch, head, member = block_of(
        tl.program_id(0), tl.num_programs(0), queries, heads, group, CAUSAL, BLOCK_Q
    )
    row = first + tl.arange(0, BLOCK_Q)
    row64 = row.to(tl.int64)
    in_rows = row < queries
    dim = tl.arange(0, BLOCK_D)
    dim64 = dim.to(tl.int64)
    in_width = dim < WIDTH
    column = tl.arange(0, BLOCK_K)
    q_at = q_ptr + batch * q_stride_b + head * q_stride_h + member * q_stride_g
    q_at += row64[:, None] * q_stride_l + dim64[None, :] * q_stride_d
    q = tl.load(q_at, mask=in_rows[:, None] & in_width[None, :], other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    k_at = k_ptr + batch * k_stride_b + head * k_stride_h + dim64[:, None] * k_stride_d
    head32 = head.to(tl.int32)
    batch32 = batch.to(tl.int32)
    mask_at = mask_ptr
    if MASK != 0:
        mask_at = _masks(mask_ptr, batch, head, member, row, mask_stride_b, mask_stride_h, mask_stride_g, mask_stride_q)
    gain = tl.full([BLOCK_Q], 1.0, tl.float32)
    if GAIN:
        gain = _gains(gain_ptr, batch, head, member, row, in_rows, gain_stride_b, gain_stride_h, gain_stride_g,
                      gain_stride_q).to(tl.float32)  # fmt: skip
    low, high = _limits(span_ptr, batch, row, in_rows, keys, offset, span_stride_b, span_stride_e, span_stride_q,
                        CAUSAL, SPANS, BLOCK_Q)  # fmt: skip

    # The block's tiles lie between `begin` and `end`; between `whole` and `ragged` every row sees every key.
    begin = 0
    end = keys
    whole = 0
    ragged = keys // BLOCK_K * BLOCK_K
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(tl.minimum(first + BLOCK_Q, queries) + offset, 0))
        ragged = tl.minimum(ragged, tl.maximum(first + offset + 1, 0) // BLOCK_K * BLOCK_K)
    if SPANS:
        sees = in_rows & (low < high)
        begin = tl.min(tl.where(sees, low, keys), 0) // BLOCK_K * BLOCK_K
        end = tl.max(tl.where(sees, high, 0), 0)
        whole = tl.cdiv(tl.max(tl.where(in_rows, low, 0), 0), BLOCK_K) * BLOCK_K
        whole = tl.maximum(tl.minimum(whole, tl.cdiv(end, BLOCK_K) * BLOCK_K), begin)
        ragged = tl.minimum(ragged, tl.min(tl.where(in_rows, high, keys), 0) // BLOCK_K * BLOCK_K)
    if MASK != 0:
        ragged = whole
    ragged = tl.maximum(ragged, whole)

    scale2 = scale * LOG2E
    reference = _reference(q, k_at, begin, keys, k_stride_l, in_rows, in_width, low, high, mask_at, mask_stride_k,
                           gain, scale2, WIDTH, WIDEN, MASK, MASK_FLOOR, GAIN, BLOCK_D)  # fmt: skip
    mass = tl.zeros([BLOCK_Q, 8], tl.float32)
    moment = tl.zeros([BLOCK_Q, 8], tl.float32)
    second = tl.zeros([BLOCK_Q, 8], tl.float32)
    peak = tl.full([BLOCK_Q, 8], float("-inf"), tl.float32)
    blind = low >= high
    if MASK != 0:
        blind = row >= 0
    for start in tl.range(whole, ragged, BLOCK_K, num_stages=STAGES):
        k = _keys_at(k_at, k_desc, batch32, head32, start + column, start, keys, k_stride_l, in_width,
                     WIDTH, TMA, False, WIDEN, BLOCK_K, BLOCK_D)  # fmt: skip
        x = tl.dot(q, k, input_precision="ieee") * scale2 - reference[:, None]
        mass, moment, second, peak = _collect(mass, moment, second, peak, x, MAX, VAR, BLOCK_Q, BLOCK_K)
    if not EVEN:
        before = (whole - begin) // BLOCK_K
        for number in tl.range(0, before + tl.cdiv(tl.maximum(end - ragged, 0), BLOCK_K), num_stages=1):
            start = begin + number * BLOCK_K
            if SPANS:
                start = tl.where(number < before, start, ragged + (number - before) * BLOCK_K)
            else:
                start += ragged
            key = start + column
            k = _keys_at(k_at, k_desc, batch32, head32, key, start, keys, k_stride_l, in_width,
                         WIDTH, False, True, WIDEN, BLOCK_K, BLOCK_D)  # fmt: skip
            x, visible = _shown(tl.dot(q, k, input_precision="ieee") * scale2, in_rows, key, low, high, mask_at,
                             mask_stride_k, gain, MASK, MASK_FLOOR, GAIN, LOG2E)  # fmt: skip
            if MASK != 0:
                blind = blind & (tl.max(visible.to(tl.int32), 1) == 0)
            x = _kept(x - reference[:, None], visible)
            mass, moment, second, peak = _collect(mass, moment, second, peak, x, MAX, VAR, BLOCK_Q, BLOCK_K)

    total = tl.sum(mass, 1)
    sound = _sound(total)
    total = tl.where(sound, total, 1.0)
    mean = tl.sum(moment, 1) / total
    sound = sound & _near(mean, VAR)
    log_total = tl.log2(total)
    base = log_total
    if MAX:
        base = tl.max(peak, 1)
    var = tl.zeros([BLOCK_Q], tl.float32)
    if VAR:
        var = tl.maximum(tl.sum(second, 1) / total - mean * mean, 0.0) * (LN2 * LN2)
    anchor = tl.where(sound, (reference + base) * LN2, float("nan"))
    out = lane * queries + row64
    tl.store(anchor_ptr + out, tl.where(blind, float("-inf"), anchor), mask=in_rows)
    tl.store(log_mass_ptr + out, tl.where(blind, 0.0, tl.maximum((log_total - base) * LN2, 0.0)), mask=in_rows)
    tl.store(short_ptr + out, tl.where(blind, 0.0, tl.maximum((base - mean) * LN2, 0.0)), mask=in_rows)
    tl.store(var_ptr + out, tl.where(blind, 0.0, var), mask=in_rows)


@triton.jit(do_not_specialize=["queries", "keys", "offset", "total"])
def careful_parts(
    q_ptr, k_ptr, mask_ptr, gain_ptr, span_ptr, anchor_ptr, log_mass_ptr, short_ptr, var_ptr,
    q_stride_b, q_stride_h, q_stride_g, q_stride_l, q_stride_d,
    k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    mask_stride_b, mask_stride_h, mask_stride_g, mask_stride_q, mask_stride_k,
    gain_stride_b, gain_stride_h, gain_stride_g, gain_stride_q,
    span_stride_b, span_stride_e, span_stride_q,
    heads, group, queries, keys, offset, scale, total,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, SPANS: tl.constexpr, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr,
    GAIN: tl.constexpr, WIDEN: tl.constexpr, AFTER_QUICK: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Statistics of a block of rows relative to their maximum; AFTER_QUICK: of those whose anchor is NaN so far."""
    dtype: tl.constexpr = anchor_ptr.dtype.element_ty
    # After the quick kernel hardly any block has work left, so a few programs look through all of them.
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        first, lane, batch, head, member = block_of(number, total, queries, heads, group, CAUSAL, BLOCK_Q)
        row = first + tl.arange(0, BLOCK_Q)
        wanted = row < queries
        out = lane * queries + row.to(tl.int64)
        if AFTER_QUICK:
            anchor = tl.load(anchor_ptr + out, mask=wanted, other=0.0)
            # NaN is the one number that differs from itself. Each row has one writer, and a row of NaN changes no bit
            # of its neighbours.
            wanted = wanted & (anchor != anchor)
        if tl.max(wanted.to(tl.int32), 0) > 0:
            row64 = row.to(tl.int64)
            dim = tl.arange(0, BLOCK_D)
            dim64 = dim.to(tl.int64)
            in_width = dim < WIDTH
            column = tl.arange(0, BLOCK_K)
            q_at = q_ptr + batch * q_stride_b + head * q_stride_h + member * q_stride_g
            q_at += row64[:, None] * q_stride_l + dim64[None, :] * q_stride_d
            q = tl.load(q_at, mask=wanted[:, None] & in_width[None, :], other=0.0)
            if WIDEN:
                q = q.to(tl.float32)
            k_at = k_ptr + batch * k_stride_b + head * k_stride_h + dim64[:, None] * k_stride_d
            mask_at = mask_ptr
            if MASK != 0:
                mask_at = _masks(mask_ptr, batch, head, member, row, mask_stride_b, mask_stride_h, mask_stride_g,
                                 mask_stride_q)  # fmt: skip
            gain = tl.full([BLOCK_Q], 1.0, dtype)
            if GAIN:
                gain = _gains(gain_ptr, batch, head, member, row, wanted, gain_stride_b, gain_stride_h, gain_stride_g,
                              gain_stride_q).to(dtype)  # fmt: skip
            low, high = _limits(span_ptr, batch, row, wanted, keys, offset, span_stride_b, span_stride_e, span_stride_q,
                                CAUSAL, SPANS, BLOCK_Q)  # fmt: skip
            sees = wanted & (low < high)
            begin = tl.min(tl.where(sees, low, keys), 0) // BLOCK_K * BLOCK_K
            end = tl.max(tl.where(sees, high, 0), 0)

            peak = tl.full([BLOCK_Q], float("-inf"), dtype)
            rest = tl.zeros([BLOCK_Q], dtype)
            rest_lost = tl.zeros([BLOCK_Q], dtype)
            short = tl.zeros([BLOCK_Q], dtype)
            short_lost = tl.zeros([BLOCK_Q], dtype)
            var = tl.zeros([BLOCK_Q], dtype)
            var_lost = tl.zeros([BLOCK_Q], dtype)
            bad = tl.zeros([BLOCK_Q], tl.int32)
            for start in range(begin, end, BLOCK_K):
                key = start + column
                k = _keys_at(k_at, None, 0, 0, key, start, keys, k_stride_l, in_width,
                             WIDTH, False, True, WIDEN, BLOCK_K, BLOCK_D)  # fmt: skip
                # "ieee": TF32 would round float32 inputs to 10 bits.
                s, visible = _shown(tl.dot(q, k, input_precision="ieee") * scale, wanted, key, low, high, mask_at,
                                 mask_stride_k, gain, MASK, MASK_FLOOR, GAIN, 1.0)  # fmt: skip
                peak, rest, rest_lost, short, short_lost, var, var_lost, bad = _absorb(
                    peak, rest, rest_lost, short, short_lost, var, var_lost, bad, s, visible
                )
            rest += rest_lost
            mass = 1.0 + rest
            # ln(1 + x) with the relative accuracy of x: the error that 1 + x makes is in both factors.
            log_mass = tl.where(mass == 1.0, rest, tl.log(mass) * (rest / tl.where(mass == 1.0, 1.0, mass - 1.0)))
            nan = float("nan")
            tl.store(anchor_ptr + out, tl.where(bad != 0, nan, peak), mask=wanted)
            tl.store(log_mass_ptr + out, tl.where(bad != 0, nan, log_mass), mask=wanted)
            tl.store(short_ptr + out, tl.where(bad != 0, nan, short + short_lost), mask=wanted)
            tl.store(var_ptr + out, tl.where(bad != 0, nan, var + var_lost), mask=wanted)
