"""The kernels behind the gradient of `impl='triton'`; importing this module imports triton.

With a softmax row p and y = logit − mean, the gradient of any combination of the row's statistics with respect to a
logit is dS = p·(c0 + c1·y + c2·y²), three numbers per row (c2 = 0 unless var has a gradient). `into_queries` owns a
block of rows, writes their numbers down, and walks over the keys: dq = scale·dS·K. `into_keys`, launched after it,
owns a block of keys and walks over the rows of every head that shares them: dk = scale·dSᵀ·Q.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sharpmax.stats.triton_kernel import LOG2E, block_of

# `triton.jit` is untyped, and what the annotations of a kernel mean is Triton's business.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"


@triton.jit
def _finite(x):
    """Zeros for what is not finite: a hidden pair has derivative 0, and 0 · NaN must not speak for it."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _biased(t, entry, inside, gain, scale, MASK_FLOOR: tl.constexpr, GAIN: tl.constexpr):
    """Logits with an added mask, and which of them that mask shows."""
    if entry.dtype != tl.float64:
        entry = entry.to(tl.float32)
    hidden = entry <= MASK_FLOOR
    # Hidden entries leave before the gain meets them: 0 · −inf is NaN, 2 · finfo.min overflows.
    bias = tl.where(hidden, 0.0, entry).to(tl.float32)
    if GAIN:
        bias = bias * gain
    return t * scale + bias, inside & ~hidden


@triton.jit
def _derivative(
    t, visible, top, mean, c0, c1, c2, scale,
    MASK: tl.constexpr, VAR: tl.constexpr, FOLDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dS of a tile: `t` are products of q and k without their scale, or whole logits where a mask was added to them."""
    unit = 1.0 if MASK == 2 else scale
    if FOLDED:
        z = t * (unit * LOG2E) - top
        slope = c1 * t + c0
    else:
        y = t * unit - mean
        z = y * LOG2E - top
        slope = (c2 * y + c1) * y + c0 if VAR else c1 * y + c0
    if MASKED:
        z = tl.where(visible, z, 0.0)
    p = tl.exp2(z)
    ds = p * slope
    if MASK == 2:
        # A key with a very low logit has weight 0, but 0 · inf would be NaN here. A NaN logit stays NaN.
        ds = tl.where(p == 0.0, 0.0, ds)
    if MASKED:
        ds = tl.where(visible, ds, 0.0)
    return ds


@triton.jit
def _halves(x):
    """The first half of the columns and the second."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def _product(a, b):
    """a·bᵀ. A GPU adds float32 terms one after the other: of many, in four parts, whose rounding errors are smaller."""
    if a.dtype == tl.float32 and a.shape[1] > 128:
        a0, a1 = _halves(a)
        b0, b1 = _halves(b)
        a00, a01 = _halves(a0)
        a10, a11 = _halves(a1)
        b00, b01 = _halves(b0)
        b10, b11 = _halves(b1)
        first = tl.dot(a00, tl.trans(b00), input_precision="ieee") + tl.dot(a01, tl.trans(b01), input_precision="ieee")
        last = tl.dot(a10, tl.trans(b10), input_precision="ieee") + tl.dot(a11, tl.trans(b11), input_precision="ieee")
        found = first + last
    else:
        found = tl.dot(a, tl.trans(b), input_precision="ieee")
    return found


@triton.jit
def _add_keys(
    acc, q, k_at, k_stride_l, mask_at, mask_stride_k, gain, top, mean, c0, c1, c2,
    row, dim, begin, end, queries, keys, offset, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, GAIN: tl.constexpr,
    VAR: tl.constexpr, FOLDED: tl.constexpr, WIDEN: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add dS·K over some keys; only `MASKED` tiles may hold pairs that do not see each other."""
    narrow: tl.constexpr = k_at.dtype.element_ty
    column = tl.arange(0, BLOCK_K)
    for start in tl.range(begin, end, BLOCK_K, num_stages=1 if MASKED and MASK == 0 else None):
        at = k_at + tl.cast(start, tl.int64) * k_stride_l
        key = start + column
        if MASKED:
            k = tl.load(at, mask=(key < keys)[:, None] & (dim < WIDTH)[None, :], other=0.0)
        elif WIDTH < BLOCK_D:
            k = tl.load(at, mask=(dim < WIDTH)[None, :], other=0.0)
        else:
            k = tl.load(at)
        if WIDEN:
            k = k.to(tl.float32)
        t = _product(q, k)
        visible = (row < queries)[:, None] & (key < keys)[None, :]
        if MASKED:
            if MASK != 0:
                entry_at = mask_at + key.to(tl.int64)[None, :] * mask_stride_k
                entry = tl.load(entry_at, mask=visible, other=0)
                if MASK == 1:
                    visible = visible & (entry != 0)
                else:
                    t, visible = _biased(t, entry, visible, gain[:, None], scale, MASK_FLOOR, GAIN)
            if CAUSAL:
                visible = visible & (key[None, :] <= row[:, None] + offset)
            k = _finite(k)
        ds = _derivative(
            t, visible, top[:, None], mean[:, None], c0[:, None], c1[:, None], c2[:, None], scale,
            MASK, VAR, FOLDED, MASKED,
        ).to(narrow)  # fmt: skip
        if WIDEN:
            ds = ds.to(tl.float32)
        acc = tl.dot(ds, k, acc, input_precision="ieee")
    return acc


@triton.jit
def _numbers(at, row, in_rows, ONCE: tl.constexpr):
    """One number per row; 0, which is a derivative of 0, for rows beyond the end.

    Without the sum over an axis of one, some versions of Triton (3.6) have each thread copy the numbers of all rows.
    """
    if ONCE:
        found = tl.sum(tl.load(at + row[:, None], mask=in_rows[:, None], other=0.0), 1)
    else:
        found = tl.load(at + row, mask=in_rows, other=0.0)
    return found


@triton.jit
def _add_rows(
    acc, k, q_at, q_stride_l, mask_at, mask_stride_q, gain_at, gain_stride_q, top_at, mean_at, c0_at, c1_at, c2_at,
    key, dim, begin, end, queries, keys, offset, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, GAIN: tl.constexpr,
    VAR: tl.constexpr, FOLDED: tl.constexpr, WIDEN: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add dSᵀ·Q over some rows of one head; only `MASKED` tiles may hold pairs that do not see each other."""
    narrow: tl.constexpr = q_at.dtype.element_ty
    line = tl.arange(0, BLOCK_Q)
    for start in range(begin, end, BLOCK_Q):
        at = q_at + tl.cast(start, tl.int64) * q_stride_l
        row = start + line
        in_rows = row < queries
        if EVEN:
            q = tl.load(at, mask=(dim < WIDTH)[None, :], other=0.0) if WIDTH < BLOCK_D else tl.load(at)
        else:
            q = tl.load(at, mask=in_rows[:, None] & (dim < WIDTH)[None, :], other=0.0)
        top = _numbers(top_at, row, in_rows, ONCE)
        c0 = _numbers(c0_at, row, in_rows, ONCE)
        c1 = _numbers(c1_at, row, in_rows, ONCE)
        mean = top
        c2 = c1
        if not FOLDED:
            mean = _numbers(mean_at, row, in_rows, ONCE)
        if VAR:
            c2 = _numbers(c2_at, row, in_rows, ONCE)
        if WIDEN:
            q = q.to(tl.float32)
        t = _product(k, q)
        visible = (key < keys)[:, None] & in_rows[None, :]
        if MASKED:
            if MASK != 0:
                entry_at = mask_at + row.to(tl.int64)[None, :] * mask_stride_q
                entry = tl.load(entry_at, mask=visible, other=0)
                if MASK == 1:
                    visible = visible & (entry != 0)
                else:
                    gain = top
                    if GAIN:
                        gain_row_at = gain_at + row.to(tl.int64) * gain_stride_q
                        gain = tl.load(gain_row_at, mask=in_rows, other=0.0).to(tl.float32)
                    t, visible = _biased(t, entry, visible, gain[None, :], scale, MASK_FLOOR, GAIN)
            if CAUSAL:
                visible = visible & (key[:, None] <= row[None, :] + offset)
            q = _finite(q)
        ds = _derivative(
            t, visible, top[None, :], mean[None, :], c0[None, :], c1[None, :], c2[None, :], scale,
            MASK, VAR, FOLDED, MASKED,
        ).to(narrow)  # fmt: skip
        if WIDEN:
            ds = ds.to(tl.float32)
        acc = tl.dot(ds, q, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["queries", "keys", "offset"])
def into_queries(
    q_ptr, k_ptr, mask_ptr, gain_ptr, dq_ptr,
    anchor_ptr, log_mass_ptr, shortfall_ptr, var_ptr, g_log_mass_ptr, g_shortfall_ptr, g_var_ptr,
    top_ptr, mean_ptr, c0_ptr, c1_ptr, c2_ptr,
    q_stride_b, q_stride_h, q_stride_g, q_stride_l, q_stride_d,
    k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    mask_stride_b, mask_stride_h, mask_stride_g, mask_stride_q, mask_stride_k,
    gain_stride_b, gain_stride_h, gain_stride_g, gain_stride_q,
    dq_stride_b, dq_stride_h, dq_stride_g, dq_stride_l, dq_stride_d,
    heads, group, queries, keys, offset, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, GAIN: tl.constexpr,
    VAR: tl.constexpr, FOLDED: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq of a block of rows, and these rows' numbers for `into_keys`; parts, gradients and numbers are contiguous."""
    first, lane, batch, head, member = block_of(
        tl.program_id(0), tl.num_programs(0), queries, heads, group, CAUSAL, BLOCK_Q
    )
    row = first + tl.arange(0, BLOCK_Q)
    row64 = row.to(tl.int64)
    in_rows = row < queries
    dim = tl.arange(0, BLOCK_D)
    dim64 = dim.to(tl.int64)
    inside = in_rows[:, None] & (dim < WIDTH)[None, :]

    at = lane * queries + row64
    anchor = tl.load(anchor_ptr + at, mask=in_rows, other=0.0)
    seen = anchor != float("-inf")  # also of a NaN: such a row's gradient is NaN
    base = tl.where(seen, anchor, 0.0)
    log_mass = tl.load(log_mass_ptr + at, mask=in_rows, other=0.0)
    shortfall = tl.load(shortfall_ptr + at, mask=in_rows, other=0.0)
    mean = base - shortfall
    c0 = tl.zeros([BLOCK_Q], tl.float32)
    c1 = tl.zeros([BLOCK_Q], tl.float32)
    c2 = tl.zeros([BLOCK_Q], tl.float32)
    if g_log_mass_ptr is not None:
        c0 += tl.load(g_log_mass_ptr + at, mask=in_rows, other=0.0)
    if g_shortfall_ptr is not None:
        g = tl.load(g_shortfall_ptr + at, mask=in_rows, other=0.0)
        c0 -= g
        c1 -= g
    if VAR:
        c2 += tl.load(g_var_ptr + at, mask=in_rows, other=0.0)
        c0 -= c2 * tl.load(var_ptr + at, mask=in_rows, other=0.0)
        c1 += 2.0 * c2
        c2 = tl.where(seen, c2, 0.0)
        tl.store(c2_ptr + at, c2, mask=in_rows)
    if FOLDED:
        # p = exp(logit − lse), and c0 + c1·y = (c0 − c1·mean) + c1·logit: one step and one number less.
        top = (base + log_mass) * LOG2E
        c0 -= c1 * mean
        if MASK != 2:
            c1 = c1 * scale
    else:
        # p = exp(y − (lse − mean)): what the logits have in common is rounded once.
        top = (log_mass + shortfall) * LOG2E
        tl.store(mean_ptr + at, mean, mask=in_rows)
    c0 = tl.where(seen, c0, 0.0)
    c1 = tl.where(seen, c1, 0.0)
    tl.store(top_ptr + at, top, mask=in_rows)
    tl.store(c0_ptr + at, c0, mask=in_rows)
    tl.store(c1_ptr + at, c1, mask=in_rows)

    q_at = q_ptr + batch * q_stride_b + head * q_stride_h + member * q_stride_g
    q = tl.load(q_at + row64[:, None] * q_stride_l + dim64[None, :] * q_stride_d, mask=inside, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    k_at = k_ptr + batch * k_stride_b + head * k_stride_h
    k_at += tl.arange(0, BLOCK_K).to(tl.int64)[:, None] * k_stride_l + dim64[None, :] * k_stride_d
    mask_at = mask_ptr
    if MASK != 0:
        mask_at = mask_ptr + batch * mask_stride_b + head * mask_stride_h + member * mask_stride_g
        mask_at += row64[:, None] * mask_stride_q
    gain = top
    if GAIN:
        gain_at = gain_ptr + batch * gain_stride_b + head * gain_stride_h + member * gain_stride_g
        gain = tl.load(gain_at + row64 * gain_stride_q, mask=in_rows, other=0.0).to(tl.float32)

    end = keys
    free = keys  # up to here every row sees every key
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(tl.minimum(first + BLOCK_Q, queries) + offset, 0))
        free = tl.minimum(keys, tl.maximum(first + offset + 1, 0))
    free = free // BLOCK_K * BLOCK_K
    if MASK != 0:
        free = 0
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for masked in tl.static_range(0 if MASK == 0 else 1, 2):
        acc = _add_keys(
            acc, q, k_at, k_stride_l, mask_at, mask_stride_k, gain, top, mean, c0, c1, c2,
            row, dim, free if masked else 0, end if masked else free, queries, keys, offset, scale,
            WIDTH, CAUSAL, MASK, MASK_FLOOR, GAIN, VAR, FOLDED, WIDEN, masked, BLOCK_K, BLOCK_D,
        )  # fmt: skip

    dq_at = dq_ptr + batch * dq_stride_b + head * dq_stride_h + member * dq_stride_g
    dq_at += row64[:, None] * dq_stride_l + dim64[None, :] * dq_stride_d
    tl.store(dq_at, (acc * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["queries", "keys", "offset"])
def into_keys(
    q_ptr, k_ptr, mask_ptr, gain_ptr, dk_ptr,
    top_ptr, mean_ptr, c0_ptr, c1_ptr, c2_ptr,
    q_stride_b, q_stride_h, q_stride_g, q_stride_l, q_stride_d,
    k_stride_b, k_stride_h, k_stride_l, k_stride_d,
    mask_stride_b, mask_stride_h, mask_stride_g, mask_stride_q, mask_stride_k,
    gain_stride_b, gain_stride_h, gain_stride_g, gain_stride_q,
    dk_stride_b, dk_stride_h, dk_stride_l, dk_stride_d,
    heads, group, queries, keys, offset, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, MASK_FLOOR: tl.constexpr, GAIN: tl.constexpr,
    VAR: tl.constexpr, FOLDED: tl.constexpr, WIDEN: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk of a block of keys, from the numbers that `into_queries` wrote; EVEN: every block of rows is full."""
    blocks = tl.cdiv(keys, BLOCK_K)
    program = tl.program_id(0)
    lanes = tl.num_programs(0) // blocks
    if CAUSAL:
        # Earlier keys are seen by more rows: they start first in every lane.
        first = program // lanes * BLOCK_K
        lane = (program % lanes).to(tl.int64)  # (batch, key head); every offset is 64-bit
    else:
        first = program % blocks * BLOCK_K
        lane = (program // blocks).to(tl.int64)
    head = lane % heads
    batch = lane // heads

    key = first + tl.arange(0, BLOCK_K)
    key64 = key.to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    dim64 = dim.to(tl.int64)
    inside = (key < keys)[:, None] & (dim < WIDTH)[None, :]
    k_at = k_ptr + batch * k_stride_b + head * k_stride_h
    k = tl.load(k_at + key64[:, None] * k_stride_l + dim64[None, :] * k_stride_d, mask=inside, other=0.0)
    if WIDEN:
        k = k.to(tl.float32)

    begin = 0
    free = 0  # from here on every row sees every key of the block
    if CAUSAL:
        begin = tl.minimum(queries, tl.maximum(first - offset, 0)) // BLOCK_Q * BLOCK_Q
        last = tl.minimum(first + BLOCK_K, keys) - 1
        free = tl.cdiv(tl.minimum(queries, tl.maximum(last - offset, 0)), BLOCK_Q) * BLOCK_Q
    if MASK != 0:
        free = queries

    line = tl.arange(0, BLOCK_Q).to(tl.int64)
    q_at = q_ptr + batch * q_stride_b + head * q_stride_h
    q_at += line[:, None] * q_stride_l + dim64[None, :] * q_stride_d
    mask_at = mask_ptr
    if MASK != 0:
        mask_at = mask_ptr + batch * mask_stride_b + head * mask_stride_h + key64[:, None] * mask_stride_k
    gain_at = gain_ptr
    if GAIN:
        gain_at = gain_ptr + batch * gain_stride_b + head * gain_stride_h
    acc = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for member in range(0, group):
        step = tl.cast(member, tl.int64)
        at = (lane * group + step) * queries
        member_q_at = q_at + step * q_stride_g
        member_mask_at = mask_at
        if MASK != 0:
            member_mask_at = mask_at + step * mask_stride_g
        member_gain_at = gain_at
        if GAIN:
            member_gain_at = gain_at + step * gain_stride_g
        mean_at = top_ptr
        if not FOLDED:
            mean_at = mean_ptr + at
        c2_at = top_ptr
        if VAR:
            c2_at = c2_ptr + at
        for masked in tl.static_range(0 if MASK == 0 else 1, 2 if CAUSAL or MASK != 0 else 1):
            acc = _add_rows(
                acc, k, member_q_at, q_stride_l, member_mask_at, mask_stride_q, member_gain_at, gain_stride_q,
                top_ptr + at, mean_at, c0_ptr + at, c1_ptr + at, c2_at,
                key, dim, begin if masked else free, free if masked else queries, queries, keys, offset, scale,
                WIDTH, CAUSAL, MASK, MASK_FLOOR, GAIN, VAR, FOLDED, WIDEN, EVEN and not masked, ONCE, masked,
                BLOCK_Q, BLOCK_D,
            )  # fmt: skip

    dk_at = dk_ptr + batch * dk_stride_b + head * dk_stride_h
    dk_at += key64[:, None] * dk_stride_l + dim64[None, :] * dk_stride_d
    tl.store(dk_at, (acc * scale).to(dk_ptr.dtype.element_ty), mask=inside)
