"""Statistics of rows against float64 by hand, and what they do with NaN, hidden keys and nothing at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from sharpmax.probing.capture import LOCAL, STATISTICS, places, row_statistics
from sharpmax.stats.call import Logits
from tests.probing import oracle

SHAPE = (2, 3, 5, 40)


def check(logits: Tensor, hidden: Tensor | None, tolerance: float = 2e-5) -> None:
    found = row_statistics(Logits(logits, hidden))
    visible = np.ones(1, bool) if hidden is None else ~hidden.numpy()
    expected = oracle.rows(logits.double().numpy(), visible)
    assert tuple(found) == STATISTICS
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert value.shape == logits.shape[:-1]
        assert np.allclose(value.numpy(), expected[name], atol=tolerance, rtol=2e-6), name


@pytest.mark.parametrize("scale", [0.0, 10.0, 1e4])
@pytest.mark.parametrize("shape", [None, SHAPE, (2, 1, 1, 40), (1, 1, 5, 1)], ids=lambda s: str(s))
def test_statistics_equal_the_float64_oracle(shape: tuple[int, ...] | None, scale: float) -> None:
    logits = scale * torch.randn(SHAPE)
    check(logits, None if shape is None else torch.rand(shape) < 0.4)


@pytest.mark.parametrize("keys", [1, LOCAL, LOCAL + 1, 131_072])
def test_any_number_of_keys(keys: int) -> None:
    check(torch.randn(1, 1, 1, keys), None)
    check(torch.zeros(1, 1, 1, keys), None)
    assert row_statistics(Logits(torch.zeros(1, 1, 1, keys), None))["entropy"].item() <= np.float32(math.log(keys))


@pytest.mark.parametrize("masked", [False, True])
def test_statistics_keep_nothing_of_the_logits(masked: bool) -> None:
    hidden = torch.rand(1, 1, 1, 40) < 0.4 if masked else None
    for value in row_statistics(Logits(torch.randn(SHAPE), hidden)).values():
        assert value.untyped_storage().nbytes() == 4 * value.numel()


@pytest.mark.parametrize("queries", [1, 3, 8, 100, 8193])
def test_places(queries: int) -> None:
    assert places("last", queries).tolist() == [queries - 1]
    assert places("all", queries).tolist() == list(range(queries))
    log = places("log", queries)
    assert log.dtype == torch.int64
    assert log[0] == 0
    assert log[-1] == queries - 1
    assert (log.diff() > 0).all()
    for low in (2**power for power in range(3, 14) if 2 ** (power + 1) <= queries):
        assert ((log + 1 >= low) & (log + 1 < 2 * low)).sum() == 3
