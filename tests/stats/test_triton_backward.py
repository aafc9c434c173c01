"""The gradient kernels against float64 autograd: interpreted, or on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.stats import dispatch as operator
from sharpmax.stats import triton_launch as triton_backward
from sharpmax.stats.call import AttentionCall
from sharpmax.stats.dispatch import measure, measure_parts
from sharpmax.stats.statistics import FIELDS
from sharpmax.stats.streaming import Incoming, streaming_backward
from sharpmax.stats.triton_launch import Tile
from tests import kernel_cases
from tests.kernel_cases import BRAIN, DEVICE, DOUBLE, HALF, INTERPRETED, SILENT, SINGLE, masked_logits, randn, reordered
from tests.kernel_cases import _poisoned_memory as _poisoned_memory
from tests.numerics import textbook

pytestmark = SILENT
random_problem = functools.partial(kernel_cases.random_problem, dtype=SINGLE)

Loss = Callable[[Any], Tensor]
LOSSES: dict[str, Loss] = {
    "lse": lambda stats: stats.lse,
    "mean": lambda stats: stats.mean,
    "var": lambda stats: stats.var,
    "entropy": lambda stats: stats.entropy,
    "mix": lambda stats: stats.entropy.square() + 0.3 * stats.var - 0.7 * stats.lse * stats.mean.tanh(),
}
every_loss = pytest.mark.parametrize("loss", LOSSES)
small_tiles = pytest.mark.usefixtures("_small_tiles")


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that are not square, so that every edge between them is met."""
    tiles = {"into_queries": Tile(32, 16, 4, 2), "into_keys": Tile(16, 32, 4, 2)}
    monkeypatch.setattr(triton_backward, "OVERRIDES", tiles)


def gradients(
    problem: AttentionCall, loss: Loss, impl: str = "triton", dtype: torch.dtype | None = None
) -> list[Tensor]:
    """dq and dk of a weighted sum over the rows that see a key."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (problem.q, problem.k)]
    problem = replace(problem, q=leaves[0], k=leaves[1])
    stats = plain(problem) if impl == "plain" else measure(problem, impl, frozenset(FIELDS))
    seen = problem.counts() > 0
    weight = randn(*problem.rows, seed=9, dtype=DOUBLE)
    total = (loss(stats).double() * weight)[seen].sum()
    return list(torch.autograd.grad(total, leaves))


def plain(problem: AttentionCall) -> Any:
    """The statistics by their textbook formulas, in the dtype of the input."""
    found = textbook(*masked_logits(problem))
    return SimpleNamespace(**{name: x.reshape(problem.rows) for name, x in found.items()})


def assert_within_contract(problem: AttentionCall, loss: str = "mix") -> None:
    """At most three times the error of the plain computation in the same dtype, plus roundings of the largest."""
    found = gradients(problem, LOSSES[loss])
    exact = gradients(problem, LOSSES[loss], "reference", DOUBLE)
    rough = [gradients(problem, LOSSES[loss], "plain")]
    for other, order in reordered(problem):
        rough.append([x[..., order.argsort()] for x in gradients(other, LOSSES[loss], "plain")])
    inputs, each = (problem.q, problem.k), zip(*rough, strict=True)
    for name, got, want, base, x in zip("qk", found, exact, each, inputs, strict=True):
        assert got.dtype == x.dtype
        assert got.shape == x.shape
        assert got.isfinite().all(), name
        error, *others = ((y.double() - want).abs().max().item() for y in (got, *base))
        allowed = max(others)
        slack = 2 * torch.finfo(x.dtype).eps * want.abs().max().item()
        assert error <= 3 * allowed + slack, (name, error, allowed, slack)


@every_loss
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
@pytest.mark.parametrize("offset", [None, 13])
@small_tiles
def test_every_statistic(loss: str, dtype: torch.dtype, offset: int | None) -> None:
    assert_within_contract(random_problem(40, 53, 16, dtype=dtype, offset=offset), loss)


@pytest.mark.parametrize("width", [1, 59, 128, 256])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_dtypes_and_head_sizes(dtype: torch.dtype, width: int) -> None:
    assert_within_contract(random_problem(17, 70, width, dtype=dtype, offset=53))
    assert_within_contract(random_problem(64, 33, width, dtype=dtype), "entropy")


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 130), (130, 1), (17, 97), (97, 17), (130, 130)])
def test_lengths(queries: int, keys: int) -> None:
    assert_within_contract(random_problem(queries, keys, 20, dtype=HALF))
    assert_within_contract(random_problem(queries, keys, 20, dtype=HALF, offset=keys - queries), "entropy")


@pytest.mark.parametrize("offset", [-200, -20, -1, 0, 31, 33, 2**40])
@small_tiles
def test_causal_offsets(offset: int) -> None:
    problem = random_problem(40, 70, 16, offset=offset)
    assert_within_contract(problem)
    blind = problem.counts().view(problem.q.shape[:-1]) == 0
    assert (gradients(problem, LOSSES["mix"])[0][blind] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
@small_tiles
def test_grouped_heads_share_the_gradient_of_their_key(masked: bool) -> None:
    mask = randn(2, 2, 3, 9, 30, seed=3) > 0 if masked else None
    assert_within_contract(random_problem(9, 30, 20, batch=2, heads=2, group=3, mask=mask, offset=21))


@pytest.mark.parametrize("shape", [(2, 2, 2, 20, 37), (1, 1, 1, 1, 37), (2, 1, 1, 20, 1), (1, 2, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "gain"])
@small_tiles
def test_masks_broadcast(shape: tuple[int, ...], kind: str) -> None:
    mask = randn(*shape, seed=3, size=3.0)
    mask = mask > -1 if kind == "bool" else mask.masked_fill(mask > 3, -torch.inf)
    gain = randn(2, 2, 2, 20, seed=4).abs() if kind == "gain" else None
    assert_within_contract(random_problem(20, 37, 16, batch=2, heads=2, group=2, mask=mask, gain=gain, offset=18))


@pytest.mark.parametrize("shift", [-3000.0, 3000.0])
def test_logits_far_from_zero(shift: float) -> None:
    """exp of the logits themselves, or of those of keys beyond the end, would overflow."""
    problem = random_problem(20, 50, 16)
    problem.q[..., 0], problem.k[..., 0] = 1.0, shift * 4
    for got in gradients(problem, LOSSES["mix"]):
        assert got.isfinite().all()
    assert_within_contract(problem, "lse")


@small_tiles
def test_strided_inputs_give_the_same_and_gradients_of_their_layout() -> None:
    base = random_problem(20, 67, 20, group=2, heads=2, mask=randn(1, 2, 2, 20, 67, seed=3) > -1)
    assert base.mask is not None
    odd = replace(
        base,
        q=base.q.transpose(1, 3).contiguous().transpose(1, 3),
        k=torch.stack((base.k, -base.k), -1)[..., 0],
        mask=base.mask.mT.contiguous().mT,
    )
    assert not odd.q.is_contiguous()
    parts = measure_parts(base, "triton", frozenset(FIELDS))
    for got, part in zip(measure_parts(odd, "triton", frozenset(FIELDS)), parts, strict=True):
        # Compiled for other strides, the same sums may be taken in another order.
        assert torch.equal(got, part) if INTERPRETED else torch.allclose(got, part, rtol=1e-5, atol=1e-6)
    grads = Incoming(*(randn(*parts.var.shape, seed=i) for i in range(3)))
    # A gradient of a sum comes expanded.
    grads = grads._replace(shortfall=torch.ones((), device=DEVICE).expand(parts.var.shape))
    want = triton_backward.triton_backward(base, parts, grads)
    for impl in (triton_backward.triton_backward, lambda *x: streaming_backward(*x, into_mask=False)):
        found = impl(odd, parts, grads)
        assert found.q.stride() == torch.empty_like(odd.q).stride()
        assert found.k.stride() == torch.empty_like(odd.k).stride()
        assert torch.allclose(found.q, want.q, rtol=1e-5, atol=1e-5)
        assert torch.allclose(found.k, want.k, rtol=1e-5, atol=1e-5)


@small_tiles
def test_a_nan_in_a_query_stays_with_its_row_and_the_keys_it_sees() -> None:
    problem = random_problem(40, 70, 16, offset=10)
    dirty = replace(problem, q=problem.q.clone())
    dirty.q[..., 20, 3] = math.nan
    (dq, dk), (clean_q, clean_k) = gradients(dirty, LOSSES["mix"]), gradients(problem, LOSSES["mix"])
    others = torch.arange(40, device=DEVICE) != 20
    assert dq[..., 20, :].isnan().all()
    assert torch.equal(dq[..., others, :], clean_q[..., others, :])
    assert dk[..., :31, :].isnan().all()
    assert torch.equal(dk[..., 31:, :], clean_k[..., 31:, :])


class TestChoice:
    @pytest.fixture
    def used(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Which gradients ran, and which incoming ones they were given."""
        names: list[str] = []

        def spy(module: Any, name: str) -> None:
            function = getattr(module, name)

            def run(problem: Any, parts: Any, grads: Any, **options: Any) -> Any:
                names.append(" ".join([name, *(f for f, g in grads._asdict().items() if g is not None)]))
                return function(problem, parts, grads, **options)

            monkeypatch.setattr(module, name, run)

        spy(operator, "triton_backward")
        spy(operator, "streaming_backward")
        return names

    @staticmethod
    def leaves(dtype: torch.dtype = SINGLE) -> tuple[Tensor, Tensor]:
        return (
            randn(1, 2, 3, 16, seed=1, dtype=dtype).requires_grad_(),
            randn(1, 2, 4, 16, seed=2, dtype=dtype).requires_grad_(),
        )

    def test_what_the_kernels_cannot_do_is_streamed(self, used: list[str]) -> None:
        q, k = self.leaves()
        sm.row_stats(q, k, impl="streaming").var.sum().backward()
        mask = randn(3, 4).requires_grad_()
        sm.row_stats(q, k, attn_mask=mask, impl="triton").var.sum().backward()
        assert mask.grad is not None
        q, k = self.leaves(DOUBLE)
        sm.row_stats(q, k, impl="triton").var.sum().backward()
        assert used == ["streaming_backward var"] * 3

    @pytest.mark.skipif(not INTERPRETED, reason="a GPU compiles in tests/test_gpu.py")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_compiled_vmapped_and_eager_agree(self, used: list[str]) -> None:
        def run(q: Tensor, k: Tensor) -> Tensor:
            stats = sm.row_stats(q, k, is_causal=True, impl="triton", fields=("entropy",))
            total: Tensor = stats.entropy.square().sum()
            return total

        q, k = self.leaves()
        want = torch.autograd.grad(run(q, k), (q, k))
        got = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(q, k), (q, k))
        both = torch.func.vmap(torch.func.grad(run, argnums=(0, 1)))(torch.stack((q, 2 * q)), torch.stack((k, k)))
        assert used == ["triton_backward log_mass shortfall"] * 2
        for w, g, b in zip(want, got, both, strict=True):
            assert torch.allclose(g, w, rtol=1e-5, atol=1e-6)
            assert torch.allclose(b[0], w, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="takes 4 GiB of a GPU")
def test_offsets_beyond_32_bits() -> None:
    far = torch.zeros(2**31 + 64, dtype=HALF, device=DEVICE)
    near = random_problem(9, 9, 16, dtype=HALF, offset=0)
    q = far.as_strided((1, 1, 1, 9, 16), (0, 0, 0, 2**28, 1))
    k = far[32:].as_strided((1, 1, 9, 16), (0, 0, 2**28, 1))
    q.copy_(near.q)
    k.copy_(near.k)
    parts = measure_parts(near, "triton", frozenset(FIELDS))
    grads = Incoming(*(randn(*parts.var.shape, seed=i) for i in range(3)))
    want = triton_backward.triton_backward(near, parts, grads)
    found = triton_backward.triton_backward(replace(near, q=q, k=k), parts, grads)
    assert torch.allclose(found.q, want.q, rtol=1e-2, atol=1e-3)
    assert torch.allclose(found.k, want.k, rtol=1e-2, atol=1e-3)
