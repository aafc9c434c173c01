"""What the tests of the kernels share: interpreted on a processor, compiled on a GPU with TRITON_INTERPRET=0."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from torch import Tensor

from sharpmax.integrations.transformers import attention as layers
from sharpmax.ops import attention, sharpen
from sharpmax.ops import decode as decode_module
from sharpmax.ops.kernels import decode_launch
from sharpmax.policies.basic import Curve
from sharpmax.policies.log_linear import LogLinear
from sharpmax.stats import dispatch, triton_launch
from sharpmax.stats.call import AttentionCall, Parts, hidden_by

pytest.importorskip("triton")

ENTRIES = {
    "sharpmax.stats.triton_kernel": ("quick_parts", "careful_parts"),
    "sharpmax.ops.kernels.sharpen_kernel": ("sharpen_rows", "scale_rows"),
    "sharpmax.ops.kernels.decode_kernel": ("decode_logits", "decode_values", "decode_sum", "decode_whole"),
}

LINEAR = LogLinear(0.1, 0.2, -0.4, 0.3, 0.5, -0.2, 0.1, 0.3, -0.6, reference=5.0)
CURVE = Curve((0.5, 1.0, 2.5), (1.0, 1.5, 4.0))

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64

# The interpreter computes in numpy, which warns where a GPU is silent; non-finite numbers are meant here.
SILENT = pytest.mark.filterwarnings(
    "ignore:.*(invalid value|overflow|divide by zero|All-NaN slice) encountered:RuntimeWarning"
)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill fresh memory with NaN, so that an output which is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = SINGLE, size: float = 1.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=rng, dtype=DOUBLE) * size).to(dtype).to(DEVICE)


def random_problem(
    queries: int, keys: int, width: int, *, dtype: torch.dtype = HALF, batch: int = 1, heads: int = 1, group: int = 1,
    size: float = 1.0, **changes: Any,
) -> AttentionCall:  # fmt: skip
    fields: dict[str, Any] = {"mask": None, "gain": None, "offset": None, "scale": 1 / math.sqrt(width)}
    return AttentionCall(
        q=randn(batch, heads, group, queries, width, seed=1, dtype=dtype, size=size),
        k=randn(batch, heads, keys, width, seed=2, dtype=dtype, size=size),
        rows=(batch, heads * group, queries),
        **{**fields, **changes},
    )


def masked_logits(problem: AttentionCall, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The logits including a float mask, by their textbook formula, and which keys are visible."""
    q, k = (x.to(dtype or x.dtype) for x in (problem.q, problem.k))
    s = q @ k[:, :, None].mT * problem.scale
    if problem.mask is not None and problem.mask.is_floating_point():
        bias = problem.mask.to(s.dtype).masked_fill(hidden_by(problem.mask), 0)
        s = s + (bias if problem.gain is None else bias * problem.gain.to(s.dtype)[..., None])
    return s, ~problem.hidden().expand(s.shape)


def parts_of(stats: Any) -> Parts:
    """The parts inside dense statistics, which are anchored at the maximum."""
    return Parts(stats._max, stats._log_mass, stats._shortfall, stats._var)


def reordered(problem: AttentionCall) -> Iterator[tuple[AttentionCall, Tensor]]:
    """The same problem with its features in another order, and that order: the same logits, summed differently.

    The error of plain float32 depends on the order in which a BLAS sums a product, which differs between processors.
    The contract allows the largest error over a few orders.
    """
    width = problem.q.shape[-1]
    for seed in range(4):
        order = torch.randperm(width, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        yield replace(problem, q=problem.q[..., order], k=problem.k[..., order]), order


class _Recompiled:
    """An interpreted kernel that is launched as a compiled one is: by addresses, with every argument in its place."""

    packed_metadata, function = "metadata", "function"

    def __init__(self, kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel, self.given, self.options = kernel, given, options
        self.launches = 0

    def run(self, *given: Any) -> None:
        self.launches += 1
        grid, rest = given[:3], given[9:]
        assert given[3:9] == (7, "function", "metadata", None, None, None)
        assert len(rest) == len(self.kernel.arg_names)
        count = sum(not name.isupper() for name in self.kernel.arg_names)
        known = zip(rest, self.given, strict=False)
        values = [self._tensor_at(one, first) if isinstance(first, Tensor) else one for one, first in known]
        constants = dict(zip(self.kernel.arg_names[count:], rest[count:], strict=True))
        more = {name: value for name, value in self.options.items() if name not in self.kernel.arg_names}
        assert constants == {name: value for name, value in self.options.items() if name not in more}
        self.kernel[grid](*values, **constants, **more)

    @staticmethod
    def _tensor_at(address: int, like: Tensor) -> Tensor:
        assert address % 16 == 0
        count = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        memory = (ctypes.c_char * (count * like.element_size())).from_address(address)
        return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


@pytest.fixture
def relaunched(monkeypatch: pytest.MonkeyPatch) -> list[_Recompiled]:
    """Kernels that are bound once and then launched by address, as on a GPU but interpreted; all that were bound."""
    if not INTERPRETED:
        pytest.skip("a GPU has kernels that are compiled")
    bound: list[_Recompiled] = []

    class Proxy:
        def __init__(self, kernel: Any) -> None:
            self.kernel, self.arg_names = kernel, kernel.arg_names

        def __call__(self, *given: Any) -> Any:
            return self.kernel(*given)

        def __getitem__(self, grid: Any) -> Any:
            def first(*given: Any, **options: Any) -> _Recompiled:
                self.kernel[grid](*given, **options)
                bound.append(_Recompiled(self.kernel, given, options))
                return bound[-1]

            return first

    for path, names in ENTRIES.items():
        kernels = importlib.import_module(path)
        for name in names:
            monkeypatch.setattr(kernels, name, Proxy(getattr(kernels, name)))
    for module in (dispatch, attention, sharpen, layers, decode_module):
        monkeypatch.setattr(module, "on_gpu", lambda x: True)
    for module in (dispatch, attention, decode_module):
        monkeypatch.setattr(module, "_known", {})
    monkeypatch.setattr(decode_module, "obstacle", lambda q, v: None)
    for module in (sharpen, decode_launch):
        monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(triton_launch, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return bound
