"""β from the statistics of rows and a table of policies, inside a kernel; importing this imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from sharpmax.policies import closed_form

# `triton.jit` is untyped, and what the annotations of a kernel mean is Triton's business.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"


CONSTANT = tl.constexpr(closed_form.CONSTANT)
POLYNOMIAL = tl.constexpr(closed_form.POLYNOMIAL)
LOG_LENGTH = tl.constexpr(closed_form.LOG_LENGTH)
LOG_LINEAR = tl.constexpr(closed_form.LOG_LINEAR)
CURVE = tl.constexpr(closed_form.CURVE)
# Above it is no float32, and 0 · inf would be NaN.
LARGEST = tl.constexpr(3.4e38)
HAS_CONSTANT = tl.constexpr(1 << closed_form.CONSTANT)
HAS_POLYNOMIAL = tl.constexpr(1 << closed_form.POLYNOMIAL)
HAS_LOG_LENGTH = tl.constexpr(1 << closed_form.LOG_LENGTH)
HAS_LOG_LINEAR = tl.constexpr(1 << closed_form.LOG_LINEAR)
HAS_CURVE = tl.constexpr(1 << closed_form.CURVE)


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
