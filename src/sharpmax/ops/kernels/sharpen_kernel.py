"""β·q in one pass over the queries, and its gradient; importing this module imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from sharpmax.ops.kernels.beta import at_least, at_most, row_beta, row_slope

# `triton.jit` is untyped, and what the annotations of a kernel mean is Triton's business.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"


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
