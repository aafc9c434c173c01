"""Random arrays and one meaning of "the same numbers" for the tests of this folder."""

from __future__ import annotations

from typing import Any

import numpy as np


def normal(*shape: int, seed: int, scale: float = 1.0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype=np.float32)


def agree(actual: Any, desired: Any, rtol: float = 1e-5) -> None:
    """Equal to `rtol`, entry by entry or relative to the largest entry: sums of both signs have no better."""
    desired = np.asarray(desired)
    largest = float(np.abs(desired).max(initial=0.0, where=np.isfinite(desired)))
    np.testing.assert_allclose(np.asarray(actual), desired, rtol=rtol, atol=rtol * largest)
