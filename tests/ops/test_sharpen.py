"""β·q in one launch against the policies and plain torch: interpreted, or on a GPU with TRITON_INTERPRET=0."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.errors import UnsupportedError
from sharpmax.ops import attention as ops
from sharpmax.ops.attention import scaled_queries
from sharpmax.ops.kernels import decode_launch
from sharpmax.ops.kernels.sharpen import scale_op, sharpen_op
from sharpmax.policies import closed_form as forms
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER, Polynomial
from sharpmax.stats import dispatch, triton_launch
from sharpmax.stats.call import Parts, capped_beta
from sharpmax.stats.statistics import RowStats
from tests.kernel_cases import BRAIN, DEVICE, DOUBLE, HALF, INTERPRETED, SILENT, SINGLE, randn
from tests.kernel_cases import relaunched as relaunched
from tests.numerics import worst

pytestmark = [
    SILENT,
    pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning"),
    # On a GPU: the first matrix product of a thread that autograd started.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


def sharpen_rows(q, parts, counts, keys, offset, form):
    rows = (None,) * 3 if parts is None else parts[1:]
    table = torch.tensor(form.table, dtype=torch.float32, device=q.device)
    return sharpen_op(q, *rows, counts, keys, offset, table, form.shape)


def plain_scaled(q, beta):
    return (q * capped_beta(q, beta)[..., None]).to(q.dtype)


def closed_form(policies) -> Any:
    form = forms.closed_form(policies)
    assert form is not None
    return form


def assert_same(got, want):
    """Bit for bit; but the interpreter cuts bfloat16 off where a GPU rounds to nearest."""
    assert got.dtype == want.dtype
    if INTERPRETED and got.dtype == BRAIN:
        assert torch.allclose(got.float(), want.float(), rtol=2**-7, atol=0)
    else:
        assert torch.equal(got, want)


LINEAR = LogLinear(0.1, 0.2, -0.4, 0.3, 0.5, -0.2, 0.1, 0.3, -0.6, reference=5.0)
POLICIES = [
    Constant(2.5),
    PAPER,
    Polynomial((0.3, -0.2, 1.0), (0.4, 2.0), 0.3),
    LogLength(6.0, floor=0.9),
    LINEAR,
    LogLinear(level=3.0, ceiling=2.0),
    LogLinear(var=1.0),
    LogLinear(top_length=-9.0, reference=1.0),
    Curve((0.5, 1.0, 2.5), (1.0, 1.5, 4.0)),
]
MIXED = [PAPER, LINEAR, Constant(), Curve((0.5, 1.5), (3.0, 1.0)), LogLength(3.0), Polynomial((2.0,), (0.0, 9.0))]


def statistics(batch, heads, queries, keys, offset):
    """Statistics of random rows of which some see 0 or 1 key, and one is NaN."""
    logits = 3.0 * randn(batch, heads, queries, keys, seed=1, dtype=DOUBLE)
    last = torch.arange(queries, device=DEVICE) + offset
    visible = (torch.arange(keys, device=DEVICE) <= last[:, None]).expand(logits.shape)
    count = visible.sum(-1)
    peak = logits.masked_fill(~visible, -torch.inf).amax(-1)
    share = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    lse = logits.masked_fill(~visible, -torch.inf).logsumexp(-1)
    mean = (share * logits).sum(-1)
    var = (share * (logits - mean[..., None]) ** 2).sum(-1)
    parts = [peak, lse - peak, peak - mean, var]
    parts = [p.masked_fill(count == 0, 0.0) for p in parts]
    for p in parts:
        p[0, :, queries - 2] = torch.nan
    return count, Parts(*(p.float() for p in parts))


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
    scaled, beta = sharpen_rows(q, parts, *given, closed_form(policies))
    want = expected(policies, count, parts)
    assert torch.equal(beta.isnan(), want.isnan())
    assert torch.allclose(beta.double(), want, rtol=2e-5, atol=0, equal_nan=True)
    assert torch.equal(scaled, plain_scaled(q, beta)) or torch.allclose(
        scaled, plain_scaled(q, beta), rtol=1e-6, atol=0, equal_nan=True
    )
    assert (beta[..., :3] == 1).all()


def test_rows_without_a_causal_limit_see_every_key():
    q = randn(1, 2, 3, 16)
    _, beta = sharpen_rows(q, None, None, 49, None, closed_form([LogLength(7.0)]))
    assert torch.allclose(beta, torch.full_like(beta, 2.0))
    _, beta = sharpen_rows(q, None, None, 1, None, closed_form([Constant(7.0)]))
    assert (beta == 1).all()


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("width", [1, 59, 64, 111, 256])
def test_dtypes_and_head_sizes(dtype, width):
    q = randn(2, 2, 5, width, seed=2, dtype=dtype)
    form = closed_form([Constant(1.7), LogLength(3.0)])
    scaled, beta = sharpen_rows(q, None, None, 5, 0, form)
    assert scaled.dtype == dtype
    assert_same(scaled, scaled_queries(q, beta))
    assert_same(scale_op(q, beta), scaled_queries(q, beta))


def test_strides():
    wide = randn(2, 7, 4, 40, seed=2)
    q = wide.transpose(1, 2)[..., ::2]
    beta = randn(2, 1, 7, seed=3).abs().expand(2, 4, 7)
    out = scale_op(q, beta)
    assert torch.equal(out, scaled_queries(q, beta))
    dense = wide.transpose(1, 2)
    assert scale_op(dense, beta).stride() == dense.stride()
    scaled, _ = sharpen_rows(q, None, None, 9, None, closed_form([Constant(3.0)]))
    assert torch.equal(scaled, 3.0 * q)


def test_float16_has_room():
    q = randn(1, 1, 3, 16, dtype=HALF) * 1000
    beta = torch.tensor([[[1.0, 50.0, 1e9]]], device=DEVICE)
    out = scale_op(q, beta)
    assert out.isfinite().all()
    assert torch.equal(out, scaled_queries(q, beta))
    scaled, found = sharpen_rows(q, None, None, 9, None, closed_form([Constant(1e9)]))
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


def test_on_the_cpu_nothing_changes():
    q, beta = randn(1, 2, 3, 8, dtype=HALF).cpu(), randn(1, 1, 3, seed=1).abs().cpu() * 1e6
    assert torch.equal(scaled_queries(q, beta), scaled_queries(q, beta))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_on_a_gpu_it_is_the_operator():
    q, beta = randn(1, 2, 3, 8, dtype=BRAIN), randn(1, 1, 3, seed=1).abs()
    assert torch.equal(scaled_queries(q, beta), scaled_queries(q, beta))
    batched = torch.func.vmap(scaled_queries)(q[None], beta[None])
    assert torch.equal(batched[0], scaled_queries(q, beta))


def test_operators_are_registered_as_they_behave():
    q, beta = randn(1, 2, 3, 8), randn(1, 2, 3, seed=1).abs()
    torch.library.opcheck(scale_op, (q.requires_grad_(), beta.requires_grad_()))


def test_what_cannot_be_done_is_said():
    q = randn(1, 1, 2, 8)
    with pytest.raises(UnsupportedError, match="float64"):
        sharpen_rows(q.double(), None, None, 9, None, closed_form([Constant(2.0)]))


def test_nothing_to_do():
    q = randn(1, 2, 0, 8)
    scaled, beta = sharpen_rows(q, None, None, 9, None, closed_form([Constant(2.0)]))
    assert scaled.shape == q.shape
    assert beta.shape == (1, 2, 0)
    assert scale_op(q, beta).shape == q.shape
    assert math.prod(beta.shape) == 0


SMOOTH = ["paper", LogLength(16.0), Constant(1.7), Polynomial((0.2, 1.0), (0.2, 1.5), 0.3, "clamp")]


@pytest.mark.parametrize(
    ("policy", "masked"),
    [*(("paper", masked) for masked in ("full", "causal", "mask")), *((policy, "causal") for policy in SMOOTH[1:])],
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
        out = sm.attention(
            inputs[0],
            inputs[1],
            inputs[2],
            attn_mask=mask,
            is_causal=masked == "causal",
            enable_gqa=True,
            policy=policy,
            impl=impl,
        )
        return torch.autograd.grad(out, inputs, upstream.to(dtype))

    for got, want in zip(gradients("triton", torch.float32), gradients("reference", torch.float64), strict=True):
        assert worst(got, want) < 1e-4


@pytest.mark.parametrize("policy", ["paper", "log-length:8", "constant:1.5", None])
@pytest.mark.parametrize("causal", [False, True])
def test_later_calls_are_not_checked_again_and_equal_the_first(
    policy: str | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ops, dispatch):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
        monkeypatch.setattr(module, "_known", {})
    for seed in range(3):
        q, k, v = torch.randn(3, 2, 4, 24, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE).unbind()
        k, v = k[:, :2], v[:, :2]
        with torch.no_grad():
            found = sm.attention(q, k, v, is_causal=causal, enable_gqa=True, policy=policy)
            entropy = sm.row_stats(q, k, is_causal=causal, enable_gqa=True).entropy
            expected = sm.attention(q.double(), k.double(), v.double(), None, 0.0, causal, enable_gqa=True,
                                    policy=policy, impl="reference")  # fmt: skip
            exact = sm.row_stats(q, k, is_causal=causal, enable_gqa=True, impl="reference").entropy
        assert torch.allclose(found.double(), expected, atol=1e-5)
        assert torch.allclose(entropy.double(), exact, atol=1e-5)
    assert len(ops._known) == len(dispatch._known) == 1
    shared = sm.attention(q, k[:1], v[:1], is_causal=causal, enable_gqa=True, policy=policy)
    for _ in range(2):
        again = sm.attention(q, k[:1], v[:1], is_causal=causal, enable_gqa=True, policy=policy)
        assert torch.allclose(again, shared, atol=1e-6)
    for mistake in (v[:, :1], v.double(), v[..., :3, :]):
        with pytest.raises((ValueError, TypeError), match=r"^v: "):
            sm.attention(q, k, mistake, is_causal=causal, enable_gqa=True, policy=policy)


def test_a_launch_is_bound_once_for_each_key_and_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    direct: list[tuple[Any, ...]] = []
    bound: list[tuple[Any, ...]] = []

    class Compiled:
        packed_metadata, function = "metadata", "function"

        def run(self, *given: Any) -> None:
            direct.append(given)

    class Kernel:
        arg_names = ("x_ptr", "mask_ptr", "none_ptr", "size", "BLOCK", "FLAG")

        def __getitem__(self, grid: Any) -> Any:
            def first(*given: Any, **constants: Any) -> Compiled:
                bound.append((grid, given, constants))
                return Compiled()

            return first

    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    settings = triton_launch.Settings(Kernel(), (7, 2), (5,), {"FLAG": True, "BLOCK": 64, "num_warps": 4})
    mask = torch.ones(32, dtype=torch.bool)
    x, y = torch.empty(2, 64).unbind()
    for one in (x, y, x[1:]):
        triton_launch.launch(("key",), (one, mask, None), lambda: settings)
    triton_launch.launch(("another",), (y, mask, None), lambda: settings)
    assert [given[0].data_ptr() for _, given, _ in bound] == [x.data_ptr(), x[1:].data_ptr(), y.data_ptr()]
    assert {given[1].dtype for _, given, _ in bound} == {torch.uint8}
    head = (7, 2, 1, 103, "function", "metadata", None, None, None)
    assert direct == [(*head, y.data_ptr(), mask.data_ptr(), None, 5, 64, True)]


@pytest.mark.parametrize("dtype", [BRAIN, SINGLE])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_launched_by_address_do_the_same(dtype: torch.dtype, causal: bool, relaunched: list[Any]) -> None:
    for policy in ("paper", "log-length:8"):
        for seed in range(4):
            q, k, v = (randn(2, heads, 20, 16, seed=seed + heads, dtype=dtype) for heads in (4, 2, 2))
            options: dict[str, Any] = {"is_causal": causal, "enable_gqa": True}
            found = sm.attention(q, k, v, policy=policy, **options)
            stats = sm.row_stats(q, k, **options)
            truth = sm.attention(q.double(), k.double(), v.double(), policy=policy, impl="reference", **options)
            exact = sm.row_stats(q, k, impl="reference", **options)
            assert worst(found, truth) < (1e-5 if dtype == SINGLE else 5e-2)
            assert all(worst(getattr(stats, name), getattr(exact, name)) < 1e-4 for name in ("lse", "var", "entropy"))
    names = {one.kernel.__name__ for one in relaunched if one.launches >= 2}
    assert names == {"careful_parts", "sharpen_rows", *(["quick_parts"] if dtype == BRAIN else [])}


@pytest.mark.parametrize("splits", [None, (2, 1), (3, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_decoding_by_address_does_the_same(
    splits: Any, masked: bool, relaunched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = [decode_launch.Tile(16, parts, 4, 1) for parts in splits or (1, 1)]
    plan = decode_launch.Plan(tiles[0], tiles[1], tiles[1] if splits is None else None)
    monkeypatch.setattr(decode_launch, "plan_for", lambda *_: plan)
    mask = randn(2, 1, 1, 70, seed=9) > -1 if masked else None
    for seed in range(4):
        q, k, v = (randn(2, n, length, 16, seed=seed + i) for i, (n, length) in enumerate(((4, 1), (2, 70), (2, 70))))
        out = sm.decode(q, k, v, attn_mask=mask, policy="paper")
        assert worst(out, sm.decode(q, k, v, attn_mask=mask, policy="paper", impl="torch")) < 1e-5
    launches = [one.launches for one in relaunched if one.kernel.__name__.startswith("decode")]
    assert launches == [3] * (1 if splits is None else 2 if splits[1] == 1 else 3)
