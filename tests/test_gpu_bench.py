"""The GPU benchmark on a GPU, at a fraction of its size."""

from __future__ import annotations

import torch

from sharpmax.experiments.benchmarks.gpu import gpu_entries
from sharpmax.experiments.benchmarks.measuring import peak_bytes, spent
from sharpmax.report.gpu import verdicts
from tests.numerics import NEEDS_GPU

pytestmark = NEEDS_GPU

GPU = torch.device("cuda")


def test_every_case_is_correct_and_measured() -> None:
    entries = gpu_entries(GPU, length=1024, repeat=2)
    assert len(entries) == 31
    for one in entries:
        name = f"{one['kind']} {one['case']}: {one['problem']}, {one['errors']}"
        assert one["agrees"], name
        assert one["ratio"] > 0, name
        assert one["extra_bytes_per_row"] is not None, name
        assert one["stock_backend"].partition(",")[0] in ("cuDNN", "flash", "efficient")
    assert {one.reached for one in verdicts(entries)} == {None}


def test_device_time_excludes_the_host() -> None:
    x = torch.randn(4096, 4096, device=GPU, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(20):
            torch.mm(x, x)

    products()
    taken = spent(products, GPU)
    assert taken.host_ms < taken.device_ms


def test_peak_memory_of_a_call() -> None:
    def call() -> torch.Tensor:
        first = torch.zeros(1 << 26, dtype=torch.uint8, device=GPU)
        second = torch.zeros(1 << 27, dtype=torch.uint8, device=GPU)
        del first
        return second

    assert peak_bytes(call, GPU) == (1 << 26) + (1 << 27)
