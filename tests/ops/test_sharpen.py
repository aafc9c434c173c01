"""β·q in one launch against the policies and plain torch: interpreted, or on a GPU with TRITON_INTERPRET=0."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.ops import attention
from sharpmax.ops import decode as decode_module
from sharpmax.ops.kernels import decode_launch, tables
from sharpmax.ops.kernels.sharpen_launch import scale_features, scale_op, sharpen_op
from sharpmax.ops.sharpen import scaled_queries
from sharpmax.policies.basic import Constant, Curve, LogLength, PerFrequency
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.stats import dispatch
from sharpmax.stats.call import Parts, capped_beta
from sharpmax.stats.statistics import RowStats, dense_stats
from tests.kernel_cases import BRAIN, CURVE, DEVICE, DOUBLE, HALF, INTERPRETED, LINEAR, SILENT, SINGLE, parts_of, randn
from tests.kernel_cases import relaunched as relaunched
from tests.numerics import worst

pytestmark = [
    SILENT,
    pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning"),
    # On a GPU: the first matrix product of a thread that autograd started.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


def sharpen_rows(q, parts, counts, keys, offset, *policies):
    rows = (None,) * 3 if parts is None else parts[1:]
    table = tables.table_of(policies, q.device)
    assert table is not None
    return sharpen_op(q, *rows, counts, keys, offset, *table)


def plain_scaled(q, beta):
    return (q * capped_beta(q, beta)[..., None]).to(q.dtype)


def assert_same(got, want):
    """Bit for bit; but the interpreter cuts bfloat16 off where a GPU rounds to nearest."""
    assert got.dtype == want.dtype
    if INTERPRETED and got.dtype == BRAIN:
        assert torch.allclose(got.float(), want.float(), rtol=2**-7, atol=0)
    else:
        assert torch.equal(got, want)


POLICIES = [
    Constant(2.5),
    PAPER,
    Polynomial((0.3, -0.2, 1.0), (0.4, 2.0), 0.3),
    LogLength(6.0, floor=0.9),
    LINEAR,
    LogLinear(level=3.0, ceiling=2.0),
    LogLinear(var=1.0),
    LogLinear(top_length=-9.0, reference=1.0),
    CURVE,
]
SHORT = Polynomial((2.0,), (0.0, 9.0))
MIXED = [PAPER, LINEAR, Constant(), Curve((0.5, 1.5), (3.0, 1.0)), LogLength(3.0), SHORT, CURVE]


def statistics(batch, heads, queries, keys, offset):
    """Statistics of random rows of which some see 0 or 1 key, and one is NaN."""
    logits = 3.0 * randn(batch, heads, queries, keys, seed=1, dtype=DOUBLE)
    last = torch.arange(queries, device=DEVICE) + offset
    stats = dense_stats(logits, (torch.arange(keys, device=DEVICE) <= last[:, None]).expand(logits.shape))
    parts = Parts(*(part.float().masked_fill(stats.count == 0, 0.0) for part in parts_of(stats)))
    for part in parts:
        part[0, :, queries - 2] = torch.nan
    return stats.count, parts


def expected(policies, count, parts):
    anchor, log_mass, shortfall, var = (p.double() for p in parts)
    stats = RowStats.anchored(count, anchor, log_mass, shortfall, max=anchor, var=var)
    policy = policies[0] if len(policies) == 1 else PerHead((tuple(policies),))
    return policy.beta(stats).to(DOUBLE)


@pytest.mark.parametrize("policies", [*([p] for p in POLICIES), MIXED], ids=lambda p: f"{p[0].kind}×{len(p)}")
@pytest.mark.parametrize("counted", [False, True])
def test_beta_is_the_policy_s(policies, counted):
    heads, queries, keys, offset = len(MIXED), 9, 8, -2
    count, parts = statistics(2, heads, queries, keys, offset)
    q = randn(2, heads, queries, 20, seed=2)
    given: tuple[Any, Any, Any] = (count, 0, None) if counted else (None, keys, offset)
    scaled, beta = sharpen_rows(q, parts, *given, *policies)
    want = expected(policies, count, parts)
    assert torch.equal(beta.isnan(), want.isnan())
    assert torch.allclose(beta.double(), want, rtol=2e-5, atol=0, equal_nan=True)
    assert torch.allclose(scaled, plain_scaled(q, beta), rtol=1e-6, atol=0, equal_nan=True)
    assert (beta[..., :3] == 1).all()


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("width", [1, 59, 64, 111, 256])
def test_dtypes_and_head_sizes(dtype, width):
    q = randn(2, 2, 5, width, seed=2, dtype=dtype)
    scaled, beta = sharpen_rows(q, None, None, 5, 0, Constant(1.7), LogLength(3.0))
    assert scaled.dtype == dtype
    assert_same(scaled, scaled_queries(q, beta))
    assert_same(scale_op(q, beta), scaled_queries(q, beta))


@pytest.mark.parametrize("factors", [(3, 1, 40), (1, 1, 40), (3, 1, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_factors_of_features(factors, transposed):
    q = randn(2, 7, 3, 40, seed=2, dtype=BRAIN).transpose(1, 2) if transposed else randn(2, 3, 7, 40, dtype=BRAIN)
    by = 1.0 + randn(*factors, seed=3).abs()
    out = scale_features(q, by)
    assert out.stride() == q.stride()
    assert_same(out, (q.double() * by.double()).to(BRAIN))


def test_strides():
    wide = randn(2, 7, 4, 40, seed=2)
    q = wide.transpose(1, 2)[..., ::2]
    beta = randn(2, 1, 7, seed=3).abs().expand(2, 4, 7)
    out = scale_op(q, beta)
    assert torch.equal(out, scaled_queries(q, beta))
    dense = wide.transpose(1, 2)
    assert scale_op(dense, beta).stride() == dense.stride()
    scaled, _ = sharpen_rows(q, None, None, 9, None, Constant(3.0))
    assert torch.equal(scaled, 3.0 * q)


def test_float16_products_stay_finite():
    q = randn(1, 1, 3, 16, dtype=HALF) * 1000
    beta = torch.tensor([[[1.0, 50.0, 1e9]]], device=DEVICE)
    out = scale_op(q, beta)
    assert out.isfinite().all()
    assert torch.equal(out, scaled_queries(q, beta))
    scaled, found = sharpen_rows(q, None, None, 9, None, Constant(1e9))
    assert scaled.isfinite().all()
    assert (found == 1e9).all()  # β itself is not cut, as a mask may be scaled by it


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE, DOUBLE])
@pytest.mark.parametrize("broad", [False, True])
def test_gradients(dtype, broad):
    q = (randn(2, 3, 5, 20, seed=2, dtype=dtype) * (1000 if dtype == HALF else 1)).requires_grad_()
    beta = randn(2, 1 if broad else 3, 5, seed=3, dtype=DOUBLE if dtype == DOUBLE else SINGLE).abs() * 20
    beta = beta.requires_grad_()
    grad = randn(2, 3, 5, 20, seed=4, dtype=dtype)
    out = scale_op(q, beta.expand(2, 3, 5))
    found = torch.autograd.grad(out, (q, beta), grad.transpose(1, 2).contiguous().transpose(1, 2))
    plain = scaled_queries(q, beta)
    assert_same(out, plain)
    wanted = torch.autograd.grad(plain, (q, beta), grad)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        assert torch.allclose(got.double(), want.double(), rtol=1e-2 if dtype in (HALF, BRAIN) else 1e-5, atol=1e-5)


def test_operators_are_registered_as_they_behave():
    q, beta = randn(1, 2, 3, 8), randn(1, 2, 3, seed=1).abs()
    torch.library.opcheck(scale_op, (q.requires_grad_(), beta.requires_grad_()))


def test_float64_is_refused():
    q = randn(1, 1, 2, 8)
    with pytest.raises(UnsupportedError, match="float64"):
        sharpen_rows(q.double(), None, None, 9, None, Constant(2.0))


LEARNT = [
    LogLength(16.0), Constant(1.7), Polynomial((0.2, 1.0), (0.2, 1.5), 0.3, "clamp"), CURVE,
    LogLinear(level=0.1, entropy=0.5, var=0.1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "masked"),
    [*(("paper", masked) for masked in ("full", "causal", "mask")), *((policy, "causal") for policy in LEARNT)],
    ids=str,
)
def test_attention_learns_through_the_kernels(policy: Any, masked: str) -> None:
    """Gradients of the two launches against autograd through the dense oracle in float64."""
    q, k, v = (1.5 * randn(2, heads, 20, 16, seed=i) for i, heads in enumerate((4, 2, 2)))
    own = torch.eye(20, dtype=torch.bool, device=DEVICE)
    mask = own | (randn(2, 1, 20, 20, seed=7) > 0) if masked == "mask" else None
    upstream = randn(2, 4, 20, 16, seed=9)

    def gradients(impl: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        options: dict[str, Any] = {"is_causal": masked == "causal", "enable_gqa": True, "policy": policy, "impl": impl}
        out = sm.attention(inputs[0], inputs[1], inputs[2], mask, **options)
        return torch.autograd.grad(out, inputs, upstream.to(dtype))

    for got, want in zip(gradients("triton", torch.float32), gradients("reference", torch.float64), strict=True):
        assert worst(got, want) < 1e-4


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("causal", [False, True])
def test_later_calls_are_launched_by_address_and_do_the_same(
    dtype: torch.dtype, causal: bool, relaunched: list[Any]
) -> None:
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": True}

    def check(q: Tensor, k: Tensor, v: Tensor, policy: str | None) -> None:
        found = sm.attention(q, k, v, policy=policy, **options)
        truth = sm.attention(q.double(), k.double(), v.double(), policy=policy, impl="reference", **options)
        assert worst(found, truth) < (1e-5 if dtype == SINGLE else 5e-2)
        if policy == "paper":
            stats, exact = sm.row_stats(q, k, **options), sm.row_stats(q, k, impl="reference", **options)
            assert all(worst(getattr(stats, name), getattr(exact, name)) < 1e-4 for name in ("lse", "var", "entropy"))

    for policy in ("paper", "log-length:8", "constant:1.5", None):
        for seed in range(4 if policy == "paper" else 2):
            q, k, v = (randn(1, heads, 20, 16, seed=seed + heads, dtype=dtype) for heads in (4, 2, 2))
            check(q, k, v, policy)
        # Triton specialises on addresses that are multiples of 16: others are bound anew.
        check(torch.cat([q.flatten()[:1], q.flatten()])[1:].view_as(q), k, v, policy)
        for mistake in (v[:, :1], v.double(), v[..., :3, :]):
            with pytest.raises((ValueError, TypeError), match=r"^v: "):
                sm.attention(q, k, mistake, policy=policy, **options)
    assert len(attention._known) == 4
    assert len(dispatch._known) == 1
    names = {one.kernel.__name__ for one in relaunched if one.launches >= 2}
    assert names == {"careful_parts", "sharpen_rows", *(["quick_parts"] if dtype == BRAIN else [])}


@pytest.mark.usefixtures("relaunched")
def test_later_calls_with_a_negative_scale_keep_beta() -> None:
    q, k, v = (randn(1, 2, 9, 16, seed=seed) for seed in range(3))
    want = (2.0 * -0.3 * (q @ k.mT)).softmax(-1) @ v
    for _ in range(2):
        assert worst(sm.attention(q, k, v, scale=-0.3, policy=Constant(2.0)), want) < 1e-6


@pytest.mark.parametrize(
    ("splits", "masked", "policy"),
    [
        (None, False, PAPER), (None, True, PAPER), ((2, 1), True, PAPER), ((3, 2), True, PAPER),
        ((3, 2), False, PerFrequency((0.5, 1.0, 2.0, 1.5, 1.0, 3.0, 0.1, 1.0))),
    ],
    ids=["whole", "masked", "two launches", "three", "frequency"],
)  # fmt: skip
def test_decoding_by_address_does_the_same(
    splits: Any, masked: bool, policy: Any, relaunched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = [decode_launch.KeyTile(16, parts, 4, 1) for parts in splits or (1, 1)]
    plan = decode_launch.KeyPlan(tiles[0], tiles[1], tiles[1] if splits is None else None)
    monkeypatch.setattr(decode_launch, "plan_for", lambda *_: plan)
    mask = randn(2, 1, 1, 70, seed=9) > -1 if masked else None
    for seed in range(3):
        q, k, v = (randn(2, n, length, 16, seed=seed + i) for i, (n, length) in enumerate(((4, 1), (2, 70), (2, 70))))
        out = sm.decode(q, k, v, attn_mask=mask, policy=policy)
        assert worst(out, sm.decode(q, k, v, attn_mask=mask, policy=policy, impl="torch")) < 1e-5
    assert len(decode_module._known) == 1
    launches = [one.launches for one in relaunched if one.kernel.__name__.startswith("decode")]
    assert launches == [2] * (1 if splits is None else 2 if splits[1] == 1 else 3)
