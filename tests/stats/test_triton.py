"""The fused kernel against the dense oracle in float64: interpreted, or on a GPU with TRITON_INTERPRET=0."""

import functools
import math
import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.stats import triton_launch as triton
from sharpmax.stats.call import AttentionCall, Parts
from sharpmax.stats.dispatch import measure
from sharpmax.stats.statistics import dense_stats
from sharpmax.stats.triton_launch import available, triton_parts
from tests.kernel_cases import (
    BRAIN,
    DEVICE,
    DOUBLE,
    HALF,
    INTERPRETED,
    SILENT,
    SINGLE,
    masked_logits,
    parts_of,
    randn,
    random_problem,
    reordered,
)
from tests.kernel_cases import _poisoned_memory as _poisoned_memory
from tests.numerics import call_at

pytestmark = SILENT


def given_logits(rows: Tensor, **changes) -> AttentionCall:
    """A problem whose logits are exactly `rows` `[Lq, Lk]`: one-hot queries pick a column of the keys."""
    queries = rows.shape[0]
    q = torch.eye(queries, dtype=rows.dtype, device=DEVICE)[None, None, None]
    fields = {"mask": None, "gain": None, "offset": None, "scale": 1.0, "rows": (1, 1, queries)}
    return AttentionCall(q=q, k=rows.T.to(DEVICE)[None, None], **{**fields, **changes})


def dense(problem: AttentionCall, dtype: torch.dtype) -> Parts:
    return parts_of(dense_stats(*masked_logits(problem, dtype)))


def assert_within_contract(problem: AttentionCall) -> Parts:
    """At most twice the error of the plain computation in float32 (or float64) plus a few eps."""
    found, exact = triton_parts(problem), dense(problem, DOUBLE)
    wide = DOUBLE if problem.q.dtype == DOUBLE else SINGLE
    plain = zip(*(dense(one, wide) for one in (problem, *(other for other, _ in reordered(problem)))), strict=True)
    # A float64 oracle has float64 errors of its own, those of the logits; and a kernel sums a product in its own order.
    rounding = 16 * torch.finfo(DOUBLE).eps if INTERPRETED or wide == DOUBLE else torch.finfo(wide).eps
    own = rounding * exact[0].nan_to_num(neginf=0).abs().max().item() if exact[0].numel() else 0
    for name, got, want, rough in zip(("max", "log_mass", "shortfall", "var"), found, exact, plain, strict=True):
        assert got.dtype == wide
        assert got.shape == problem.q.shape[:-1]
        assert torch.equal(got.isfinite(), want.isfinite()), name
        assert name == "max" or (got >= 0).all(), name
        fine = want.isfinite()
        allowed = 2 * max((one - want)[fine].abs().amax() for one in rough) if fine.any() else 0
        error = (got - want)[fine].abs()
        slack = 8 * torch.finfo(wide).eps * want[fine].abs().clamp_min(1) + own
        assert (error <= allowed + slack).all(), (name, error.max().item(), allowed)
    return found


SHAPE = (2, 2, 2, 3, 20)


@pytest.mark.parametrize("width", [1, 59, 64, 111, 256])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE])
def test_dtypes_and_head_sizes(dtype, width):
    assert_within_contract(random_problem(17, 97, width, dtype=dtype))


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 130), (17, 97), (97, 17), (130, 1), (130, 130)])
def test_lengths(queries, keys):
    assert_within_contract(random_problem(queries, keys, 20))


@pytest.mark.parametrize("offset", [-200, -20, -1, 0, 7, 63, 64, 65, 2**40])
def test_causal_offsets(offset):
    problem = random_problem(70, 130, 16, offset=offset)
    found = assert_within_contract(problem)
    blind = problem.counts().view(1, 1, 1, 70) == 0
    assert (found[0][blind] == -torch.inf).all()
    assert all((part[blind] == 0).all() for part in found[1:])


# Each axis alone, each axis left out, and all of them.
ONES = [tuple(n if axis == one else 1 for axis, n in enumerate(SHAPE)) for one in range(5)]
OTHERS = [tuple(1 if axis == one else n for axis, n in enumerate(SHAPE)) for one in range(5)]


@pytest.mark.parametrize("shape", [*ONES, *OTHERS, SHAPE], ids=str)
def test_masks_broadcast(shape):
    small = functools.partial(random_problem, 3, 20, 16, batch=2, heads=2, group=2, offset=18)
    mask = randn(*shape, seed=3, dtype=HALF, size=3.0)
    assert_within_contract(small(mask=mask > 0))
    mask = mask.masked_fill(mask > 3, -torch.inf)
    gain = randn(*SHAPE[:-1], seed=4).abs() * 2
    for some in (gain, gain[:1, :1, :1, :1]):
        assert_within_contract(small(mask=mask, gain=some))


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE])
def test_most_negative_number_hides(dtype):
    least = torch.finfo(dtype).min
    mask = randn(1, 1, 1, 3, 70, seed=3, dtype=dtype)
    hide = randn(1, 1, 1, 3, 70, seed=4) > 0
    hide[..., 1, :] = True
    gain = torch.tensor([0.0, 3.0, 3.0], device=DEVICE).view(1, 1, 1, 3)
    marked = [
        triton_parts(random_problem(3, 70, 16, mask=mask.masked_fill(hide, value), gain=gain))
        for value in (-torch.inf, least, least / 2)
    ]
    assert_within_contract(random_problem(3, 70, 16, mask=mask.masked_fill(hide, least), gain=gain))
    for first, *others in zip(*marked, strict=True):
        assert all(torch.equal(first, other) for other in others)
        assert not first.isnan().any()
    assert [part[0, 0, 0, 1].item() for part in marked[0]] == [-math.inf, 0, 0, 0]


@pytest.mark.parametrize("far", [-1e9, -1e30, -1.6e38])
def test_far_but_visible_keys_weigh_nothing(far):
    mask = torch.zeros(1, 1, 1, 1, 70, device=DEVICE)
    mask[..., 5::2] = far
    gain = torch.full((1, 1, 1, 1), 4.0, device=DEVICE)  # −6.4e38 is −inf in float32
    seen = triton_parts(random_problem(2, 70, 16, mask=mask, gain=gain))
    gone = triton_parts(random_problem(2, 70, 16, mask=mask.masked_fill(mask < 0, -torch.inf), gain=gain))
    assert all(torch.equal(a, b) for a, b in zip(seen, gone, strict=True))


def test_expanded_inputs():
    shared = randn(1, 1, 1, 20, seed=5).expand(1, 3, 33, 20)
    q = randn(1, 3, 4, 20, seed=6)
    found = assert_within_contract(call_at(q, shared, None, offset=None, scale=None, enable_gqa=False))
    assert (found[1] == torch.tensor(32.0).log1p().to(DEVICE)).all()


def test_equal_logits_are_exact():
    peak, log_mass, shortfall, var = triton_parts(given_logits(torch.full((2, 300), 3.5)))
    assert (peak == 3.5).all()
    assert torch.allclose(log_mass.double(), torch.tensor(300.0, dtype=DOUBLE, device=DEVICE).log(), rtol=2e-7, atol=0)
    assert (shortfall == 0).all()
    assert (var == 0).all()


@pytest.mark.parametrize("place", [0, 40, 79])
@pytest.mark.parametrize("gap", [1.0, 30.0, 80.0])
def test_relative_accuracy_when_one_key_leads(place, gap):
    rows = randn(3, 80, seed=1).cpu()
    rows[:, place] = rows.amax(-1) + gap
    problem = given_logits(rows)
    for got, want in zip(triton_parts(problem), dense(problem, DOUBLE), strict=True):
        assert ((got - want).abs() <= 1e-5 * want.abs()).all()


def test_relative_accuracy_of_a_small_variance():
    rows = torch.tensor([[0.0], [1000.0]]) + 2**-13 * torch.randint(
        0, 9, (2, 300), generator=torch.Generator().manual_seed(0)
    )
    rows[:, 250:] += 2**-6
    problem = given_logits(rows)
    for got, want in zip(triton_parts(problem), dense(problem, DOUBLE), strict=True):
        assert ((got - want).abs() <= 2e-6 * want.abs()).all()


@pytest.mark.parametrize("source", ["query", "first tile", "last tile", "every logit", "+inf"])
def test_a_row_with_a_nan_is_nan_and_the_others_are_untouched(source):
    rows = randn(5, 70, seed=1).cpu()
    mask = torch.zeros(1, 1, 1, 5, 70, device=DEVICE)
    clean = given_logits(rows, mask=mask.clone())
    dirty = given_logits(rows, mask=mask)
    if source == "query":
        dirty.q[..., 2, 0] = math.nan
    else:
        where: Any = {"first tile": 7, "last tile": 68, "every logit": slice(None), "+inf": 68}[source]
        mask[..., 2, where] = math.inf if source == "+inf" else math.nan
    others = [0, 1, 3, 4]
    for found, want in zip(triton_parts(dirty), triton_parts(clean), strict=True):
        assert found[..., 2].isnan().all()
        assert torch.equal(found[..., others], want[..., others])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="takes 4 GiB of a GPU")
def test_offsets_beyond_32_bits():
    far = torch.zeros(2**31 + 64, dtype=HALF, device=DEVICE)
    k = far.as_strided((1, 1, 9, 16), (0, 0, 2**28, 1))
    k.copy_(randn(1, 1, 9, 16, seed=2))
    q = randn(1, 1, 5, 16, seed=1, dtype=HALF)
    near, spread = (call_at(q, x, None, offset=4, scale=None, enable_gqa=False) for x in (k.contiguous(), k))
    assert all(torch.equal(a, b) for a, b in zip(triton_parts(spread), triton_parts(near), strict=True))


def test_wide_heads_and_other_dtypes_are_refused():
    with pytest.raises(UnsupportedError, match=r"head size is 257.*impl='streaming'"):
        measure(random_problem(2, 3, 257), "triton", frozenset({"lse"}))
    small = random_problem(2, 3, 16)
    eight = AttentionCall(small.q.to(torch.float8_e5m2), small.k, None, None, 1.0, small.rows)
    with pytest.raises(UnsupportedError, match=r"float8_e5m2.*impl='streaming'"):
        measure(eight, "triton", frozenset({"lse"}))


def test_available_gives_a_reason(monkeypatch):
    assert available(DEVICE) is None
    assert "'meta'" in (available(torch.device("meta")) or "")
    with monkeypatch.context() as patch:
        patch.setattr(triton, "interpreted", lambda: False)
        assert "set TRITON_INTERPRET=1" in (available(torch.device("cpu")) or "")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(triton, "_INSTALLED", False)
    # The version stands there where the metadata of sharpmax are installed.
    assert re.search(r"pip install '?triton(>=3\.4')?", available(DEVICE) or "")
    with pytest.raises(UnsupportedError, match=r"pip install '?triton"):
        measure(random_problem(2, 3, 16), "triton", frozenset({"lse"}))
