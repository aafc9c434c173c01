"""The table "Numerics every public function meets", row by row, on every implementation and dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.policies.basic import Constant, LogLength
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.stats import dispatch as api
from tests.numerics import DTYPES, FULL, IMPLS, exact, heads, tables, worst

# The interpreter computes with numpy, which reports what a GPU does silently.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

every_impl = pytest.mark.parametrize("impl", IMPLS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
POLICIES = (None, "paper", Constant(2.0), LogLength(4), EntropyTarget(0.5))
# A solved β measures each row many times: more than `sdpa` can tell, and more than the interpreter has time for.
MEASURED = [(impl, policy) for impl in IMPLS for policy in POLICIES if impl in FULL[:2] or policy is not POLICIES[-1]]


def measured(pairs: list[tuple[str, Any]]) -> pytest.MarkDecorator:
    names = [f"{impl}-{getattr(policy, 'kind', policy)}" for impl, policy in pairs]
    return pytest.mark.parametrize(("impl", "policy"), pairs, ids=names)


every_measured_policy = measured(MEASURED)
# Without a policy it is PyTorch's own function, bit for bit, whatever that makes of a row without keys.
every_sharpening_policy = measured([(impl, policy) for impl, policy in MEASURED if policy is not None])
every_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.kind if hasattr(p, "kind") else str(p))


def qkv(dtype: torch.dtype, rows: int = 5, keys: int = 9, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return (
        heads(2, 4, rows, width, dtype=dtype),
        heads(2, 2, keys, width, dtype=dtype),
        heads(2, 2, keys, 3, dtype=dtype),
    )


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


class TestFiniteRow:
    @every_dtype
    @every_policy
    @pytest.mark.parametrize("n", [2, 37, 1025])
    def test_softmax_is_a_distribution(self, dtype: torch.dtype, policy: Any, n: int) -> None:
        p = sm.softmax(heads(64, n, dtype=dtype, scale=3.0), policy=policy)
        assert p.dtype == dtype
        assert (p >= 0).all()
        assert worst(p.double().sum(-1), torch.ones(64)) <= 4 * torch.finfo(dtype).eps * math.sqrt(n)

    @every_dtype
    @every_measured_policy
    def test_attention_weights_sum_to_one(self, dtype: torch.dtype, policy: Any, impl: Any) -> None:
        q, k, v = qkv(dtype, 33, 65)
        out = sm.attention(q, k, torch.ones_like(v), enable_gqa=True, policy=policy, impl=impl)
        assert out.dtype == dtype
        assert worst(out, torch.ones_like(out)) <= 4 * torch.finfo(dtype).eps * math.sqrt(65)

    @every_dtype
    @every_impl
    @pytest.mark.parametrize("scale", [0.0, 0.3, 30.0])
    def test_entropy_is_between_0_and_ln_n(self, dtype: torch.dtype, impl: Any, scale: float) -> None:
        q, k, _ = qkv(dtype, 33, 65)
        stats = sm.row_stats(q, k, enable_gqa=True, is_causal=True, scale=scale, impl=impl)
        ceiling = stats.count.to(stats.entropy.dtype).log()
        assert (stats.entropy >= 0).all()
        assert (stats.entropy <= ceiling).all()
        if scale == 0.0:
            assert worst(stats.entropy, ceiling) < 1e-5


class TestFullyMaskedRow:
    def masks(self, dtype: torch.dtype) -> list[Tensor]:
        visible = torch.ones(5, 9, dtype=torch.bool)
        visible[2] = False
        lowest = torch.zeros(5, 9, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
        return [visible, torch.zeros(5, 9, dtype=dtype).masked_fill(~visible, -torch.inf), lowest]

    @every_dtype
    @every_impl
    def test_statistics(self, dtype: torch.dtype, impl: Any) -> None:
        q, k, _ = qkv(dtype)
        for mask in self.masks(dtype)[: 1 if impl == "sdpa" else 3]:
            stats = sm.row_stats(q, k, enable_gqa=True, attn_mask=mask, impl=impl)
            assert (stats.count[:, :, 2] == 0).all()
            assert (stats.entropy[:, :, 2] == 0).all()
            assert (stats.lse[:, :, 2] == -torch.inf).all()
            assert all(not t.isnan().any() for _, t in tables(stats))
            assert stats.entropy[:, :, [0, 1, 3, 4]].min() > 0

    @every_dtype
    @every_sharpening_policy
    def test_output_and_gradient_are_zero(self, dtype: torch.dtype, policy: Any, impl: Any) -> None:
        for mask in self.masks(dtype)[: 1 if impl == "sdpa" else 3]:
            q, k, v = (x.requires_grad_() for x in qkv(dtype))
            out = sm.attention(q, k, v, enable_gqa=True, attn_mask=mask, policy=policy, impl=impl)
            assert (out[:, :, 2] == 0).all()
            out.float().square().sum().backward()
            assert q.grad is not None
            assert k.grad is not None
            assert (q.grad[:, :, 2] == 0).all()
            assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
            assert k.grad.abs().max() > 0

    @every_dtype
    @every_policy
    def test_softmax(self, dtype: torch.dtype, policy: Any) -> None:
        for filler in (-torch.inf, torch.finfo(dtype).min):
            logits = heads(3, 7, dtype=dtype)
            logits[1] = filler
            logits.requires_grad_()
            p = sm.softmax(logits, policy=policy)
            assert (p[1] == 0).all()
            assert sm.entropy(logits)[1] == 0
            (p.float().square().sum() + sm.entropy(logits).sum()).backward()
            assert logits.grad is not None
            assert (logits.grad[1] == 0).all()
            assert logits.grad.isfinite().all()


class TestNonFiniteInAMaskedKey:
    @every_dtype
    @every_impl
    @pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
    def test_statistics(self, dtype: torch.dtype, impl: Any, poison: float) -> None:
        q, k, _ = qkv(dtype)
        visible = torch.ones(5, 9, dtype=torch.bool)
        visible[:, 7:] = False
        clean = sm.row_stats(q, k, enable_gqa=True, attn_mask=visible, impl=impl)
        k[:, :, 7:] = poison
        poisoned = sm.row_stats(q, k, enable_gqa=True, attn_mask=visible, impl=impl)
        for (name, a), (_, b) in zip(tables(clean), tables(poisoned), strict=True):
            assert torch.equal(a, b), name

    @every_dtype
    @every_impl
    @pytest.mark.parametrize("poison", [torch.nan, torch.inf])
    def test_output_and_gradient(self, dtype: torch.dtype, impl: Any, poison: float) -> None:
        visible = torch.ones(5, 9, dtype=torch.bool)
        visible[:, 7:] = False
        found = []
        for bad in (0.0, poison):
            torch.manual_seed(1)
            q, k, v = qkv(dtype)
            k[:, :, 7], v[:, :, 8] = bad, bad
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            out = sm.attention(q, k, v, enable_gqa=True, attn_mask=visible, impl=impl, policy="paper")
            out.float().square().sum().backward()
            found.append((out, q.grad, k.grad, v.grad))
        for clean, poisoned in zip(*found, strict=True):
            assert clean is not None
            assert poisoned is not None
            assert torch.equal(clean, poisoned)

    @every_dtype
    def test_dense(self, dtype: torch.dtype) -> None:
        logits = heads(3, 7, dtype=dtype)
        mask = torch.ones(7, dtype=torch.bool)
        mask[4] = False
        clean = sm.softmax(logits, mask=mask, policy="paper"), sm.entropy(logits, mask=mask)
        logits[:, 4] = torch.nan
        assert torch.equal(clean[0], sm.softmax(logits, mask=mask, policy="paper"))
        assert torch.equal(clean[1], sm.entropy(logits, mask=mask))


class TestNaNInAVisibleLogit:
    @every_dtype
    @every_impl
    @pytest.mark.parametrize("where", ["query", "key"])
    def test_statistics(self, dtype: torch.dtype, impl: Any, where: str) -> None:
        q, k, _ = qkv(dtype, 9, 9)
        clean = sm.row_stats(q, k, enable_gqa=True, is_causal=True, impl=impl)
        if where == "query":
            q[:, :, 5] = torch.nan
            hit = torch.tensor([5])
        else:
            k[:, :, 7] = torch.nan  # seen by the last two rows
            hit = torch.tensor([7, 8])
        others = torch.tensor([i for i in range(9) if i not in hit])
        poisoned = sm.row_stats(q, k, enable_gqa=True, is_causal=True, impl=impl)
        for (name, a), (_, b) in zip(tables(clean), tables(poisoned), strict=True):
            if name != "count":
                assert b[:, :, hit].isnan().all(), name
            assert torch.equal(bits(a[:, :, others]), bits(b[:, :, others])), name

    @every_dtype
    @every_impl
    @pytest.mark.parametrize("where", ["query", "key", "value"])
    def test_output(self, dtype: torch.dtype, impl: Any, where: str) -> None:
        q, k, v = qkv(dtype, 9, 9)
        clean = sm.attention(q, k, v, enable_gqa=True, is_causal=True, impl=impl, policy="paper")
        hit = [5] if where == "query" else [7, 8]
        {"query": q, "key": k, "value": v}[where][:, :, hit[0]] = torch.nan
        poisoned = sm.attention(q, k, v, enable_gqa=True, is_causal=True, impl=impl, policy="paper")
        others = [i for i in range(9) if i not in hit]
        assert poisoned[:, :, hit].isnan().all()
        assert torch.equal(bits(poisoned[:, :, others]), bits(clean[:, :, others]))

    @every_dtype
    @every_policy
    def test_dense(self, dtype: torch.dtype, policy: Any) -> None:
        logits = heads(3, 7, dtype=dtype)
        clean = sm.softmax(logits, policy=policy), sm.entropy(logits)
        logits[1, 2] = torch.nan
        for a, b in zip(clean, (sm.softmax(logits, policy=policy), sm.entropy(logits)), strict=True):
            assert b[1].isnan().all()
            assert torch.equal(bits(a[[0, 2]]), bits(b[[0, 2]]))


class TestOneKeyAndNone:
    @every_dtype
    @every_measured_policy
    def test_one_key(self, dtype: torch.dtype, policy: Any, impl: Any) -> None:
        q, k, v = qkv(dtype, keys=1)
        stats = sm.row_stats(q, k, enable_gqa=True, impl=impl)
        assert (stats.count == 1).all()
        assert (stats.entropy == 0).all()
        out = sm.attention(q, k, v, enable_gqa=True, policy=policy, impl=impl)
        assert torch.equal(out, v.repeat_interleave(2, 1).expand_as(out))
        assert (sm.softmax(heads(4, 1, dtype=dtype), policy=policy) == 1).all()
        if isinstance(policy, (LogLength, EntropyTarget)):
            assert (policy.beta(stats, lambda beta: stats) == 1).all()

    @every_dtype
    @every_measured_policy
    @pytest.mark.parametrize(("rows", "keys"), [(0, 9), (5, 0), (0, 0)])
    def test_no_rows_or_no_keys(self, dtype: torch.dtype, policy: Any, impl: Any, rows: int, keys: int) -> None:
        q, k, v = qkv(dtype, rows, keys)
        stats = sm.row_stats(q, k, enable_gqa=True, impl=impl)
        assert stats.entropy.shape == (2, 4, rows)
        assert (stats.entropy == 0).all()
        assert (stats.count == 0).all()
        out = sm.attention(q, k, v, enable_gqa=True, policy=policy, impl=impl)
        assert out.shape == (2, 4, rows, 3)
        assert (out == 0).all()
        assert sm.softmax(torch.empty(3, 0, dtype=dtype), policy=policy).shape == (3, 0)
        assert torch.equal(sm.entropy(torch.empty(3, 0, dtype=dtype)).float(), torch.zeros(3))


class TestLargeLogitsAndOddSizes:
    @every_dtype
    @every_impl
    @pytest.mark.parametrize("width", [59, 111])
    def test_logits_of_a_thousand(self, dtype: torch.dtype, impl: Any, width: int) -> None:
        q, k, v = (heads(1, 1, n, width, dtype=dtype) for n in (17, 97, 97))
        scale = 1000.0 / float((q.double() @ k.double().transpose(-1, -2)).abs().max())
        want = exact(q, k, scale=scale)
        got = sm.row_stats(q, k, scale=scale, impl=impl)
        assert float(want.max.max()) > 500
        for name, value in tables(got):
            assert value.isfinite().all(), name
        # A logit of 1000 is itself rounded to 6e-5 in float32; entropies of such rows can be no better.
        allowed = 1e-10 if got.entropy.dtype == torch.float64 else 2e-3
        assert worst(got.entropy, want.entropy) < allowed
        out = sm.attention(q, k, v, scale=scale, impl=impl, policy="paper")
        assert out.isfinite().all()

    @every_dtype
    @every_impl
    @pytest.mark.parametrize(("rows", "keys"), [(1023, 1025), (3, 1023), (1025, 2)])
    def test_odd_lengths(self, dtype: torch.dtype, impl: Any, rows: int, keys: int) -> None:
        if impl == "triton" and rows > 1000 and keys > 1000:
            rows = 65  # the interpreter is slow; blocks at both ends are what matters
        q, k = heads(1, 1, rows, 59, dtype=dtype), heads(1, 1, keys, 59, dtype=dtype)
        want = exact(q, k, is_causal=True)
        got = sm.row_stats(q, k, is_causal=True, impl=impl)
        assert torch.equal(got.count, want.count)
        assert worst(got.entropy, want.entropy) < (1e-11 if dtype == torch.float64 else 5e-6)


class TestLayoutInMemory:
    @every_dtype
    @every_impl
    def test_non_contiguous_and_expanded(self, dtype: torch.dtype, impl: Any) -> None:
        q = heads(2, 5, 4, 16, dtype=dtype).transpose(1, 2)[..., ::2]
        k = heads(1, 2, 8, 9, dtype=dtype).transpose(-1, -2).expand(2, 2, 9, 8)
        mask = (torch.rand(9, 5) > 0.4).T.expand(2, 1, 5, 9)
        got = sm.row_stats(q, k, enable_gqa=True, attn_mask=mask, impl=impl)
        same = sm.row_stats(q.contiguous(), k.contiguous(), enable_gqa=True, attn_mask=mask.contiguous(), impl=impl)
        for (name, a), (_, b) in zip(tables(got), tables(same), strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6), name
        out = sm.attention(q, k, k, enable_gqa=True, attn_mask=mask, impl=impl, policy="paper")
        plain = (q.contiguous(), k.contiguous(), k.contiguous())
        want = sm.attention(*plain, enable_gqa=True, attn_mask=mask.contiguous(), impl=impl, policy="paper")
        assert torch.allclose(out, want, rtol=1e-6, atol=float(8 * torch.finfo(dtype).eps))


class TestLongRows:
    @every_dtype
    @pytest.mark.parametrize("impl", ["reference", "streaming", "sdpa"])
    def test_131072_keys(self, dtype: torch.dtype, impl: Any) -> None:
        self.check(dtype, impl)

    def test_16385_keys_triton(self) -> None:
        """The interpreter needs half a minute for 131,072 keys; the compiled kernel meets them in `make test-gpu`."""
        self.check(torch.float16, "triton", 16_385)

    def check(self, dtype: torch.dtype, impl: Any, keys: int = 131_072) -> None:
        q, k = heads(1, 1, 2, 16, dtype=dtype), heads(1, 1, keys, 16, dtype=dtype)
        got, want = sm.row_stats(q, k, impl=impl), exact(q, k)
        assert worst(got.entropy, want.entropy) < (1e-10 if dtype == torch.float64 else 2e-5)
        assert (got.count == keys).all()

    @pytest.mark.parametrize("impl", ["streaming", "sdpa"])
    def test_more_than_two_to_the_31_logits(self, impl: Any) -> None:
        rows, keys = 32_768, 65_600
        assert rows * keys > 2**31
        q, k = heads(1, 1, rows, 2), heads(1, 1, keys, 2)
        fields = ("entropy",)
        got = sm.row_stats(q, k, impl=impl, fields=fields)
        some = torch.tensor([0, 1, 12_345, 32_766, 32_767])
        assert worst(got.entropy[..., some], exact(q[:, :, some], k).entropy) < 2e-5


def test_every_implementation_is_in_the_table() -> None:
    assert set(api.IMPLS) == {"auto", *IMPLS}
    assert set(FULL) < set(IMPLS)
