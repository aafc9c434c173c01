"""Run with TRITON_INTERPRET=0: compiles every kernel for Hopper as its own launch code would, without a GPU.

Tensors stay on the CPU, Triton is told that the device is a Hopper GPU, and a launch compiles instead of running.
Prints one line per compiled variant; an error of the compiler ends it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import sharpmax as sm
from sharpmax.ops.kernels import decode_launch as decode
from sharpmax.ops.kernels import sharpen_launch as sharpen
from sharpmax.ops.kernels.tables import closed_form
from sharpmax.policies.entropy_target import EntropyTarget
from sharpmax.policies.log_linear import LogLinear
from sharpmax.stats import triton_launch as rows
from sharpmax.stats.call import AttentionCall, Parts
from sharpmax.stats.streaming import Incoming

BRAIN = torch.bfloat16


class Device:
    """As much of a driver as a compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(self: Any, grid: Any) -> Any:
    def launch(*args: Any, **options: Any) -> None:
        kernel = self.run(*args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        print(self.__name__, "wgmma" if "wgmma.mma" in ptx else "-", f"shared {kernel.metadata.shared}", flush=True)

    return launch


def pretend() -> None:
    driver.set_active(Device())
    instead: list[tuple[Any, str, Any]] = [
        (JITFunction, "__getitem__", compile_only),
        *((module, "available", lambda device: None) for module in (rows, sharpen, decode)),
        *((module, "interpreted", lambda: False) for module in (rows, sharpen, decode)),
        (rows, "_has_copy_engine", lambda device: True),
        (rows, "_large", lambda q, k: q.shape[-1] != 59),
        # Tiles are chosen by what the tensors are on.
        (rows, "_tile", lambda kernel, problem: rows._HOPPER[kernel, problem.q.shape[-1]]),
        (sharpen, "_on_kernel", lambda q: True),
    ]
    for place, name, value in instead:
        setattr(place, name, value)


def problem(
    width: int, offset: int | None, mask: torch.Tensor | None = None, dtype: torch.dtype = BRAIN
) -> AttentionCall:
    q, k = torch.zeros(2, 4, 256, width, dtype=dtype), torch.zeros(2, 2, 256, width, dtype=dtype)
    return replace(AttentionCall.of(q, k, mask, enable_gqa=True), offset=offset)


def statistics() -> None:
    shown = torch.ones(2, 1, 256, 256, dtype=torch.bool)
    for one in (
        problem(64, None),
        problem(128, 0),
        problem(59, 0),
        problem(128, None, shown),
        problem(64, None, torch.zeros(1, 1, 256, 256, dtype=BRAIN)),
        replace(problem(128, None), spans=torch.zeros(1, 2, 256, dtype=torch.int32)),
    ):
        rows.triton_parts(one, frozenset({"entropy"}))
    rows.triton_parts(problem(128, 0))
    rows.triton_parts(problem(64, 0, dtype=torch.float32))
    for one in (problem(64, None), problem(128, 0), problem(128, None, shown)):
        numbers = torch.zeros(one.q.shape[:-1])
        rows.triton_backward(one, Parts(*[numbers] * 4), Incoming(numbers, numbers, None))
    rows.triton_backward(one, Parts(*[numbers] * 4), Incoming(numbers, numbers, numbers))


def scaling() -> None:
    q, beta = torch.zeros(2, 4, 256, 128, dtype=BRAIN), torch.zeros(2, 4, 256)
    sharpen.scale_op(q, beta)
    sharpen.scale_features(q, torch.zeros(4, 1, 128))
    sharpen.scale_backward_op(q, q, beta, None, None, None, 0, None, None, [0, 0])
    for policy in (sm.load_policy("paper"), LogLinear(level=0.1, entropy=0.2, top=0.3, var=0.1)):
        form = closed_form((policy,))
        assert form is not None
        sharpen.sharpen_op(q, beta, beta, beta, None, 256, 0, torch.tensor(form.table), form.shape)


def decoding() -> None:
    for batch, width, queries in ((1, 128, 1), (300, 64, 1), (2, 128, 3)):
        q = torch.zeros(batch, 8, queries, width, dtype=BRAIN)
        k = v = torch.zeros(batch, 2, 4096, width, dtype=BRAIN)
        sm.decode(q, k, v, impl="triton", policy="paper")
        sm.decode(
            q, k, v, impl="triton", attn_mask=torch.ones(batch, 1, queries, 4096, dtype=torch.bool), policy="paper"
        )
    sm.decode(q, k, v, impl="triton", policy=EntropyTarget(1.0), lengths=torch.tensor([7, 9]), return_stats=True)
    pages = torch.zeros(64, 64, 2, 128, dtype=BRAIN)
    table = torch.zeros(2, 32, dtype=torch.int32)
    sm.decode(q, pages, pages, impl="triton", block_table=table, lengths=torch.tensor([7, 9]), policy="paper")


if __name__ == "__main__":
    assert isinstance(triton.language.sum, JITFunction), "set TRITON_INTERPRET=0"
    pretend()
    statistics()
    scaling()
    decoding()
