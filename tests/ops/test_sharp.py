"""`sm.attention`: equal to PyTorch's function without a policy, and to the definition with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sharpmax as sm
from sharpmax.policies import entropy_target
from sharpmax.policies.basic import Constant, Curve, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.polynomial import PAPER
from tests.numerics import DTYPES, dense_attention, heads, paper_beta, worst

# Rows outside the range of a policy are the business of its own tests.
pytestmark = [
    pytest.mark.filterwarnings("ignore::sharpmax.errors.OutOfRangeWarning"),
    # The compiler uses parts of torch that torch advises against.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

POLICIES = [
    PAPER,
    Constant(2.5),
    LogLength(4),
    EntropyTarget(0.6),
    Curve((0.1, 2.0, 3.5), (1.0, 1.5, 3.0)),
    PerHead.of(Constant, value=[[1.0, 2.0, 3.0, 4.0]]),
    PerHead(((Constant(1.0), PAPER, LogLength(3), EntropyTarget(0.4)),)),
]
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.describe()[:24])


def qkv(rows: int = 7, keys: int = 11, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return heads(2, 4, rows, 8, **options), heads(2, 2, keys, 8, **options), heads(2, 2, keys, 5, **options)


def options() -> dict[str, dict[str, Any]]:
    torch.manual_seed(3)
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(2, 1, 7, 11) > 0.4},
        "bias": {"attn_mask": torch.randn(1, 4, 7, 11)},
        "scale": {"scale": 0.9},
        "bottom-right": {"attn_mask": causal_lower_right(7, 11)},
        "top-left": {"attn_mask": causal_upper_left(7, 11)},
    }


every_option = pytest.mark.parametrize("kind", list(options()))


def naive(q: Tensor, k: Tensor, v: Tensor, policy: Any, kw: dict[str, Any]) -> Tensor:
    rows, keys = q.shape[-2], k.shape[-2]
    visible, bias = torch.ones(rows, keys, dtype=torch.bool), 0.0
    mask = kw.get("attn_mask")
    if kw.get("is_causal") or (mask is not None and getattr(mask, "variant", None) == causal_upper_left(1, 1).variant):
        visible = visible.tril()
    elif hasattr(mask, "variant"):
        visible = visible.tril(keys - rows)
    elif mask is not None and mask.dtype == torch.bool:
        visible = mask
    elif mask is not None:
        bias = mask.double()
    return dense_attention(q, k, v, visible, policy, kw.get("scale"), bias)


class TestIdentity:
    @every_option
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("policy", [None, "none", Constant(1), PerHead.of(Constant, value=[[1.0] * 4])])
    def test_is_bit_equal_to_pytorch(self, kind: str, dtype: torch.dtype, policy: Any) -> None:
        q, k, v = qkv(dtype=dtype)
        kw = options()[kind]
        if kind == "bias":
            kw["attn_mask"] = kw["attn_mask"].to(dtype)
        want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kw)
        assert torch.equal(sm.attention(q, k, v, enable_gqa=True, policy=policy, **kw), want)
        out, stats = sm.attention(q, k, v, enable_gqa=True, policy=policy, return_stats=True, **kw)
        assert torch.equal(out, want)
        assert stats.measured == ("count", "max", "lse", "mean", "var")

    def test_dropout_is_passed_on(self) -> None:
        q, k, v = qkv()
        torch.manual_seed(5)
        want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, dropout_p=0.5)
        torch.manual_seed(5)
        assert torch.equal(sm.attention(q, k, v, enable_gqa=True, dropout_p=0.5, policy=None), want)
        torch.manual_seed(5)
        assert not torch.equal(sm.attention(q, k, v, enable_gqa=True, dropout_p=0.5, policy="paper"), want)


class TestDefinition:
    @every_option
    @every_policy
    @pytest.mark.parametrize("impl", ["auto", "streaming", "reference", "float64"])
    def test_equals_softmax_of_scaled_logits(self, kind: str, policy: Any, impl: Any) -> None:
        # A solved β passes the rounding of the entropy on, magnified where the entropy hardly depends on β.
        dtype, close = torch.float32, 2e-4 if "var" in policy.needs else 2e-5
        if impl == "float64":
            impl, dtype, close = "auto", torch.float64, 1e-11
        q, k, v = qkv(scale=1.5, dtype=dtype)
        kw = options()[kind]
        if kind == "bias":
            kw["attn_mask"] = kw["attn_mask"].to(dtype)
        got = sm.attention(q, k, v, enable_gqa=True, policy=policy, impl=impl, **kw)
        assert worst(got, naive(q, k, v, policy, kw)) < close

    @pytest.mark.parametrize("kind", ["plain", "causal", "float mask"])
    def test_under_autocast_it_measures_what_pytorch_computes(self, kind: str) -> None:
        q, k, v = qkv(scale=1.5)
        mask = torch.linspace(-2.0, 1.0, q.shape[-2] * k.shape[-2]).view(q.shape[-2], k.shape[-2])
        kinds: dict[str, dict[str, Any]] = {
            "plain": {}, "causal": {"is_causal": True}, "float mask": {"attn_mask": mask}
        }  # fmt: skip
        kw = kinds[kind]
        low: dict[str, Any] = {name: x.bfloat16() if isinstance(x, torch.Tensor) else x for name, x in kw.items()}
        want = sm.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), enable_gqa=True, **low)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = sm.attention(q, k, v, enable_gqa=True, **kw)
            exact = sm.attention(q.double(), k.double(), v.double(), enable_gqa=True, policy="paper")
        assert torch.equal(got, want)
        assert exact.dtype == torch.float64

    @pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 2, 3, 5, 8)])
    def test_any_number_of_batch_dimensions(self, shape: tuple[int, ...]) -> None:
        q, k, v = (heads(*shape) for _ in range(3))
        mask = torch.rand(*shape[:-1], 5) > 0.3
        got = sm.attention(q, k, v, attn_mask=mask, policy=Constant(2.0))
        assert worst(got, F.scaled_dot_product_attention(2 * q, k, v, attn_mask=mask)) < 1e-6

    def test_statistics_are_those_before_sharpening(self) -> None:
        q, k, v = qkv()
        _, stats = sm.attention(q, k, v, enable_gqa=True, return_stats=True, policy="paper")
        assert torch.equal(stats.entropy, sm.row_stats(q, k, enable_gqa=True).entropy)

    @pytest.mark.parametrize("policy", [Constant(2.0), LogLength(4), LogLinear(entropy=0.2)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    def test_values_of_a_float_mask_are_not_looked_at(self, policy: Any, dtype: torch.dtype) -> None:
        # Tensors without values stand for those of a GPU, where every look waits for all that was asked of it before.
        q, k, v, mask = (torch.empty(1, 2, 9, 9, device="meta", dtype=dtype) for _ in range(4))
        assert sm.attention(q, k, v, attn_mask=mask, policy=policy).shape == q.shape

    @pytest.mark.parametrize("scale", [0.0, -0.3])
    def test_a_scale_of_zero_or_less(self, scale: float) -> None:
        q, k, v = heads(1, 2, 9, 16), heads(1, 2, 9, 16), heads(1, 2, 9, 16)
        s = (q @ k.mT * scale).double().masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
        want = (2.0 * s).softmax(-1) @ v.double()
        assert worst(sm.attention(q, k, v, is_causal=True, scale=scale, policy=Constant(2.0)), want) < 1e-6


class TestContractOfAccuracy:
    """Error against float64 at most twice that of the plain low-precision computation, gradients three times."""

    @staticmethod
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        p = s.softmax(-1)
        h = s.logsumexp(-1) - (p * s).sum(-1)
        out: Tensor = (s * paper_beta(h)[..., None]).softmax(-1) @ v
        return out

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("impl", ["streaming", "sdpa", "auto"])
    @pytest.mark.parametrize("keys", [33, 257])
    def test_output_and_gradients(self, dtype: torch.dtype, impl: Any, keys: int) -> None:
        inputs = [heads(2, 4, n, 32, dtype=dtype, scale=1.3) for n in (64, keys, keys)]
        weight = heads(2, 4, 64, 32)

        def run(function: Any, kind: torch.dtype) -> list[Tensor]:
            q, k, v = (x.to(kind).requires_grad_() for x in inputs)
            out = function(q, k, v)
            (out.to(torch.float64) * weight).sum().backward()
            return [out, *(x.grad for x in (q, k, v) if x.grad is not None)]

        truth = run(self.plain, torch.float64)
        plain = run(self.plain, dtype)
        ours = run(lambda q, k, v: sm.attention(q, k, v, impl=impl, policy="paper"), dtype)
        for name, factor, t, p, o in zip(("out", "dq", "dk", "dv"), (2, 3, 3, 3), truth, plain, ours, strict=True):
            assert worst(o, t) <= factor * worst(p, t), name


class TestGradient:
    @every_policy
    @pytest.mark.parametrize("kind", ["plain", "bool", "bias"])
    def test_gradcheck_through_beta(self, policy: Any, kind: str) -> None:
        q, k, v = (x.requires_grad_() for x in qkv(3, 5, dtype=torch.float64))
        kw: dict[str, Any] = {}
        if kind == "bool":
            kw["attn_mask"] = torch.rand(3, 5) > 0.3
        inputs: tuple[Tensor, ...] = (q, k, v)
        if kind == "bias":
            inputs = (*inputs, heads(1, 1, 3, 5, dtype=torch.float64).requires_grad_())

        def run(*x: Tensor) -> Tensor:
            more: Any = {"attn_mask": x[3]} if kind == "bias" else kw
            out: Tensor = sm.attention(x[0], x[1], x[2], enable_gqa=True, policy=policy, **more)
            return out

        assert torch.autograd.gradcheck(run, inputs, fast_mode=True)

    @pytest.mark.parametrize("impl", ["reference", "streaming", "sdpa"])
    def test_gradcheck_of_the_statistics(self, impl: Any) -> None:
        shapes = ((1, 4, 5, 3), (1, 2, 6, 3))
        q, k = (heads(*shape, dtype=torch.float64).requires_grad_() for shape in shapes)

        def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
            s = sm.row_stats(q, k, is_causal=True, enable_gqa=True, impl=impl)
            return (s.entropy, s.lse, s.mean) if impl == "sdpa" else (s.entropy, s.lse, s.mean, s.var)

        assert torch.autograd.gradcheck(run, (q, k))


class TestTransforms:
    @pytest.mark.parametrize(
        ("impl", "policy"),
        [("streaming", PAPER), ("auto", PAPER), ("auto", POLICIES[-1])],
        ids=["streaming", "auto", "heads"],
    )
    def test_compiles_into_one_graph(self, impl: Any, policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(entropy_target, "_STEPS", 8)  # traced, every step is a part of the graph
        graphs: list[Any] = []

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sm.attention(q, k, v, enable_gqa=True, policy=policy, impl=impl)

        torch._dynamo.reset()
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        q, k, v = qkv(9, 17)
        assert worst(compiled(q, k, v), run(q, k, v)) < 1e-5
        assert len(graphs) == 1

    def test_compiled_gradients(self) -> None:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, stats = sm.attention(q, k, v, is_causal=True, return_stats=True, impl="streaming", policy="paper")
            total: Tensor = out.sum() + stats.entropy.sum()
            return total

        torch._dynamo.reset()
        inputs = [heads(1, 2, 9, 8).requires_grad_() for _ in range(3)]
        want = torch.autograd.grad(run(*inputs), inputs)
        got = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs), inputs)
        for a, b in zip(got, want, strict=True):
            assert worst(a, b) < 1e-5

    @pytest.mark.parametrize(
        ("impl", "kind", "policy"),
        [
            *(("streaming", kind, PAPER) for kind in ("plain", "bool", "bias", "one mask")),
            ("sdpa", "bool", PAPER),
            # Measured with a factor for the mask, which is one of the inputs.
            ("auto", "bias", EntropyTarget(1.0)),
        ],
        ids=str,
    )
    def test_vmap_and_grad(self, impl: Any, kind: str, policy: Any) -> None:
        q, k, v = (heads(3, 2, 5, 6, dtype=torch.float64) for _ in range(3))
        mask = {"plain": None, "bias": heads(3, 1, 5, 5, dtype=torch.float64)}.get(kind, torch.rand(3, 1, 5, 5) > 0.3)
        dim: int | None = 0
        if kind == "one mask":
            assert mask is not None
            mask, dim = mask[0], None
        if mask is None:
            dim = None

        def run(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Tensor:
            return sm.attention(q, k, v, attn_mask=m, impl=impl, policy=policy).square().sum()

        def each(function: Any) -> list[Any]:
            return [function(q[i], k[i], v[i], mask if dim is None or mask is None else mask[i]) for i in range(3)]

        dims = (0, 0, 0, dim)
        assert worst(torch.func.vmap(run, in_dims=dims)(q, k, v, mask), torch.stack(each(run))) < 1e-10
        grad = torch.func.grad(run, argnums=(0, 1, 2))
        for got, want in zip(
            torch.func.vmap(grad, in_dims=dims)(q, k, v, mask), zip(*each(grad), strict=True), strict=True
        ):
            assert worst(got, torch.stack(want)) < 1e-10
