"""β from the statistics of rows and a table of policies, β·q, and its gradient; importing this imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from sharpmax.ops.kernels import tables

# `triton.jit` is untyped, and what the annotations of a kernel mean is Triton's business.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"


CONSTANT = tl.constexpr(tables.CONSTANT)
POLYNOMIAL = tl.constexpr(tables.POLYNOMIAL)
LOG_LENGTH = tl.constexpr(tables.LOG_LENGTH)
LOG_LINEAR = tl.constexpr(tables.LOG_LINEAR)
CURVE = tl.constexpr(tables.CURVE)
# Above it is no float32, and 0 · inf would be NaN.
LARGEST = tl.constexpr(3.4e38)
HAS_CONSTANT = tl.constexpr(1 << tables.CONSTANT)
HAS_POLYNOMIAL = tl.constexpr(1 << tables.POLYNOMIAL)
HAS_LOG_LENGTH = tl.constexpr(1 << tables.LOG_LENGTH)
HAS_LOG_LINEAR = tl.constexpr(1 << tables.LOG_LINEAR)
HAS_CURVE = tl.constexpr(1 << tables.CURVE)


@triton.jit
def at_least(x, floor):
    """max(x, floor); NaN stays NaN, which a GPU's own maximum would drop."""
    return tl.where(x < floor, floor, x)


@triton.jit
def at_most(x, ceiling):
    """min(x, ceiling); NaN stays NaN."""
    return tl.where(x > ceiling, ceiling, x)


@triton.jit
def log1p(x):
    """ln(1 + x) for x ≥ 0: what the sum loses is put back to first order."""
    u = 1.0 + x
    return tl.log(u) + (x - (u - 1.0)) / u


@triton.jit
def entropy_of(log_mass, shortfall, count):
    """The entropy of rows, between 0 and ln n."""
    n = tl.maximum(count, 1).to(tl.float32)
    return at_most(at_least(log_mass + shortfall, 0.0), tl.log(n))


@triton.jit
def row_beta(
    table_ptr, place, there, count, log_mass, shortfall, var,
    FORMS: tl.constexpr, TERMS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """β of rows whose policies start at `place` in the table; 1 for a row of fewer than two keys.

    `FORMS` holds one bit for each form that occurs. What is solved instead of computed comes out as 1.
    """
    at = table_ptr + place
    form = tl.load(at, mask=there, other=0.0)
    n = tl.maximum(count, 1).to(tl.float32)
    log_n = tl.log(n)
    one = n * 0.0 + 1.0
    beta = one
    if HAS_CONSTANT & FORMS:
        mine = there & (form == CONSTANT)
        beta = tl.where(mine, tl.load(at + 1, mask=mine, other=1.0), beta)
    if HAS_POLYNOMIAL & FORMS:
        mine = there & (form == POLYNOMIAL)
        entropy = entropy_of(log_mass, shortfall, count)
        threshold = tl.load(at + 1, mask=mine, other=0.0)
        h = at_least(entropy, tl.load(at + 2, mask=mine, other=0.0))
        h = at_most(h, tl.load(at + 3, mask=mine, other=0.0))
        value = one * 0.0
        for term in tl.static_range(TERMS):
            value = value * h + tl.load(at + 4 + term, mask=mine, other=0.0)
        # Written as "left alone if H ≤ threshold" so that a NaN entropy stays NaN.
        value = tl.where(entropy <= threshold, 1.0, at_least(value, 1.0))
        beta = tl.where(mine, value, beta)
    if HAS_LOG_LENGTH & FORMS:
        mine = there & (form == LOG_LENGTH)
        value = log_n / tl.load(at + 2, mask=mine, other=1.0)
        beta = tl.where(mine, at_least(value, tl.load(at + 1, mask=mine, other=0.0)), beta)
    if HAS_LOG_LINEAR & FORMS:
        mine = there & (form == LOG_LINEAR)
        longer = tl.log(at_least(n / tl.load(at + 10, mask=mine, other=1.0), 1.0))
        h = entropy_of(log_mass, shortfall, count) / tl.log(tl.maximum(n, 2.0))
        p = tl.exp(-log_mass)
        total = tl.load(at + 1, mask=mine, other=0.0) + tl.load(at + 2, mask=mine, other=0.0) * longer
        c3 = tl.load(at + 3, mask=mine, other=0.0)
        c4 = tl.load(at + 4, mask=mine, other=0.0)
        c8 = tl.load(at + 8, mask=mine, other=0.0)
        # A statistic that the policy of a row does not read has no say, NaN included.
        of_h = h * (c3 + h * c4 + longer * c8)
        total += tl.where((c3 == 0.0) & (c4 == 0.0) & (c8 == 0.0), 0.0, of_h)
        c5 = tl.load(at + 5, mask=mine, other=0.0)
        c6 = tl.load(at + 6, mask=mine, other=0.0)
        c9 = tl.load(at + 9, mask=mine, other=0.0)
        of_p = p * (c5 + p * c6 + longer * c9)
        total += tl.where((c5 == 0.0) & (c6 == 0.0) & (c9 == 0.0), 0.0, of_p)
        c7 = tl.load(at + 7, mask=mine, other=0.0)
        total += tl.where(c7 == 0.0, 0.0, c7 * log1p(var))
        total = at_least(total, tl.load(at + 11, mask=mine, other=0.0))
        total = at_most(total, tl.load(at + 12, mask=mine, other=0.0))
        beta = tl.where(mine, tl.exp(total), beta)
    if HAS_CURVE & FORMS:
        mine = there & (form == CURVE)
        h = entropy_of(log_mass, shortfall, count)
        value = 0.0 * h + tl.load(at + 1, mask=mine, other=1.0)
        for segment in tl.static_range(SEGMENTS):
            knot = at + 2 + 4 * segment
            x0 = tl.load(knot, mask=mine, other=0.0)
            along = at_most((h - x0) / tl.load(knot + 1, mask=mine, other=1.0), 1.0)
            here = tl.load(knot + 2, mask=mine, other=0.0) + tl.load(knot + 3, mask=mine, other=0.0) * along
            value = tl.where(h > x0, here, value)
        beta = tl.where(mine, value, beta)
    return tl.where(count <= 1, 1.0, at_most(beta, LARGEST))


@triton.jit
def row_slope(
    table_ptr, place, there, count, log_mass, shortfall, FORMS: tl.constexpr, TERMS: tl.constexpr
):  # fmt: skip
    """dβ/dH of rows whose policies read nothing else that has a gradient: 0 but for polynomials."""
    slope = log_mass * 0.0
    if HAS_POLYNOMIAL & FORMS:
        at = table_ptr + place
        mine = there & (tl.load(at, mask=there, other=0.0) == POLYNOMIAL)
        entropy = entropy_of(log_mass, shortfall, count)
        low = tl.load(at + 2, mask=mine, other=0.0)
        high = tl.load(at + 3, mask=mine, other=0.0)
        h = at_most(at_least(entropy, low), high)
        value = h * 0.0
        rise = h * 0.0
        for term in tl.static_range(TERMS):
            rise = rise * h + value
            value = value * h + tl.load(at + 4 + term, mask=mine, other=0.0)
        # Where a bound speaks, the entropy does not.
        still = (entropy <= tl.load(at + 1, mask=mine, other=0.0)) | (value < 1.0) | (entropy < low) | (entropy > high)
        slope = tl.where(mine & ~still & (count > 1), rise, slope)
    return slope


@triton.jit
def _place(line, heads, queries, stride_b, stride_h, stride_l):
    """Where a row lies; every offset is 64-bit."""
    batch = (line // queries // heads).to(tl.int64)
    head = (line // queries % heads).to(tl.int64)
    return batch * stride_b + head * stride_h + (line % queries).to(tl.int64) * stride_l


@triton.jit
def _capped(q, beta, ROOM: tl.constexpr):
    """β as far as no product becomes larger than `ROOM`, as `stats.call.capped_beta`."""
    top = tl.max(tl.abs(q), 1).to(beta.dtype)
    return at_most(beta, at_least(ROOM / at_least(top, 1e-8), 1.0))


@triton.jit(do_not_specialize=["lines", "queries"])
def scale_rows(
    q_ptr, beta_ptr, out_ptr, q_stride_b, q_stride_h, q_stride_l, q_stride_d, beta_stride_b, beta_stride_h,
    beta_stride_l, out_stride_b, out_stride_h, out_stride_l, out_stride_d, lines, heads, queries,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """β·q of a block of rows, β given."""
    line = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    dim = tl.arange(0, BLOCK_D)
    in_lines = line < lines
    inside = in_lines[:, None] & (dim < WIDTH)[None, :]
    at = _place(line, heads, queries, q_stride_b, q_stride_h, q_stride_l)
    q = tl.load(q_ptr + at[:, None] + dim.to(tl.int64)[None, :] * q_stride_d, mask=inside, other=0.0)
    beta_at = beta_ptr + _place(line, heads, queries, beta_stride_b, beta_stride_h, beta_stride_l)
    beta = tl.load(beta_at, mask=in_lines, other=0.0)
    q = q.to(beta.dtype)
    product = q * _capped(q, beta, ROOM)[:, None]
    at = _place(line, heads, queries, out_stride_b, out_stride_h, out_stride_l)
    out_at = out_ptr + at[:, None] + dim.to(tl.int64)[None, :] * out_stride_d
    tl.store(out_at, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["lines", "queries"])
def scale_features(
    q_ptr, factor_ptr, out_ptr, q_stride_b, q_stride_h, q_stride_l, q_stride_d, factor_stride_h, factor_stride_d,
    out_stride_b, out_stride_h, out_stride_l, out_stride_d, lines, heads, queries,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A block of rows times the factors of their head, one per feature."""
    line = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    dim = tl.arange(0, BLOCK_D).to(tl.int64)
    inside = (line < lines)[:, None] & (dim < WIDTH)[None, :]
    at = _place(line, heads, queries, q_stride_b, q_stride_h, q_stride_l)
    q = tl.load(q_ptr + at[:, None] + dim[None, :] * q_stride_d, mask=inside, other=0.0)
    head = (line // queries % heads).to(tl.int64)
    factor_at = factor_ptr + head[:, None] * factor_stride_h + dim[None, :] * factor_stride_d
    factor = tl.load(factor_at, mask=inside, other=0.0)
    at = _place(line, heads, queries, out_stride_b, out_stride_h, out_stride_l)
    product = (q.to(factor.dtype) * factor).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + dim[None, :] * out_stride_d, product, mask=inside)


@triton.jit
def _counts(line, in_lines, count_ptr, queries, keys, offset, CAUSAL: tl.constexpr, COUNTED: tl.constexpr):
    """Visible keys of rows: given, or what the causal limit leaves."""
    if COUNTED:
        return tl.load(count_ptr + line, mask=in_lines, other=0).to(tl.int32)
    elif CAUSAL:
        return tl.minimum(tl.maximum(line % queries + offset + 1, 0), keys)
    else:
        return line * 0 + keys


@triton.jit(do_not_specialize=["lines", "queries", "keys", "offset"])
def scale_rows_backward(
    grad_ptr, q_ptr, beta_ptr, log_mass_ptr, shortfall_ptr, count_ptr, table_ptr, into_q_ptr, into_row_ptr,
    grad_stride_b, grad_stride_h, grad_stride_l, grad_stride_d, q_stride_b, q_stride_h, q_stride_l, q_stride_d,
    beta_stride_b, beta_stride_h, beta_stride_l, out_stride_b, out_stride_h, out_stride_l, out_stride_d,
    table_stride, lines, heads, queries, keys, offset,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, CAUSAL: tl.constexpr, COUNTED: tl.constexpr, FORMS: tl.constexpr,
    TERMS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """β·g into the queries and Σ g·q into β `[lines]`, which gets nothing where it was capped.

    With FORMS, into the entropy that β came from instead.
    """
    line = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    dim = tl.arange(0, BLOCK_D)
    in_lines = line < lines
    inside = in_lines[:, None] & (dim < WIDTH)[None, :]
    at = _place(line, heads, queries, grad_stride_b, grad_stride_h, grad_stride_l)
    grad = tl.load(grad_ptr + at[:, None] + dim.to(tl.int64)[None, :] * grad_stride_d, mask=inside, other=0.0)
    at = _place(line, heads, queries, q_stride_b, q_stride_h, q_stride_l)
    q = tl.load(q_ptr + at[:, None] + dim.to(tl.int64)[None, :] * q_stride_d, mask=inside, other=0.0)
    beta_at = beta_ptr + _place(line, heads, queries, beta_stride_b, beta_stride_h, beta_stride_l)
    beta = tl.load(beta_at, mask=in_lines, other=0.0)
    q = q.to(beta.dtype)
    grad = grad.to(beta.dtype)
    used = _capped(q, beta, ROOM)
    at = _place(line, heads, queries, out_stride_b, out_stride_h, out_stride_l)
    out_at = into_q_ptr + at[:, None] + dim.to(tl.int64)[None, :] * out_stride_d
    tl.store(out_at, (grad * used[:, None]).to(into_q_ptr.dtype.element_ty), mask=inside)
    into_row = tl.where(used < beta, 0.0, tl.sum(grad * q, 1))
    if FORMS != 0:
        count = _counts(line, in_lines, count_ptr, queries, keys, offset, CAUSAL, COUNTED)
        log_mass = tl.load(log_mass_ptr + line, mask=in_lines, other=0.0)
        shortfall = tl.load(shortfall_ptr + line, mask=in_lines, other=0.0)
        place = (line // queries % heads) * table_stride
        into_row *= row_slope(table_ptr, place, in_lines, count, log_mass, shortfall, FORMS, TERMS)
    tl.store(into_row_ptr + line, into_row, mask=in_lines)


@triton.jit(do_not_specialize=["lines", "queries", "keys", "offset"])
def sharpen_rows(
    q_ptr, log_mass_ptr, shortfall_ptr, var_ptr, count_ptr, table_ptr, out_ptr, beta_ptr, q_stride_b, q_stride_h,
    q_stride_l, q_stride_d, out_stride_b, out_stride_h, out_stride_l, out_stride_d, table_stride, lines, heads,
    queries, keys, offset,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, CAUSAL: tl.constexpr, COUNTED: tl.constexpr, MEASURED: tl.constexpr,
    VAR: tl.constexpr, FORMS: tl.constexpr, TERMS: tl.constexpr, SEGMENTS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """β from the statistics `[lines]` of a block of rows, and β·q."""
    line = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    dim = tl.arange(0, BLOCK_D)
    in_lines = line < lines
    inside = in_lines[:, None] & (dim < WIDTH)[None, :]
    at = _place(line, heads, queries, q_stride_b, q_stride_h, q_stride_l)
    q = tl.load(q_ptr + at[:, None] + dim.to(tl.int64)[None, :] * q_stride_d, mask=inside, other=0.0).to(tl.float32)
    count = _counts(line, in_lines, count_ptr, queries, keys, offset, CAUSAL, COUNTED)
    log_mass = tl.zeros([BLOCK_L], tl.float32)
    shortfall = tl.zeros([BLOCK_L], tl.float32)
    var = tl.zeros([BLOCK_L], tl.float32)
    if MEASURED:
        log_mass = tl.load(log_mass_ptr + line, mask=in_lines, other=0.0)
        shortfall = tl.load(shortfall_ptr + line, mask=in_lines, other=0.0)
    if VAR:
        var = tl.load(var_ptr + line, mask=in_lines, other=0.0)
    place = (line // queries % heads) * table_stride
    beta = row_beta(table_ptr, place, in_lines, count, log_mass, shortfall, var, FORMS, TERMS, SEGMENTS)
    tl.store(beta_ptr + line, beta, mask=in_lines)
    product = q * _capped(q, beta, ROOM)[:, None]
    at = _place(line, heads, queries, out_stride_b, out_stride_h, out_stride_l)
    out_at = out_ptr + at[:, None] + dim.to(tl.int64)[None, :] * out_stride_d
    tl.store(out_at, product.to(out_ptr.dtype.element_ty), mask=inside)
