"""The oracle of this folder: softmax rows computed from their definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def _weights(logits: Any) -> Any:
    unnormalised = np.exp(logits - np.max(logits))
    return unnormalised / unnormalised.sum()


def _entropy(logits: Any) -> float:
    # lse(s) − E[s] relative to the largest logit: no term is negative, so small entropies keep their digits.
    below = np.sort(logits - np.max(logits))
    return float(np.log1p(np.exp(below[:-1]).sum()) - (_weights(below) * below).sum())


@pytest.fixture(scope="session")
def softmax() -> Callable[[Any], Any]:
    return _weights


@pytest.fixture(scope="session")
def entropy_of() -> Callable[[Any], float]:
    return _entropy
