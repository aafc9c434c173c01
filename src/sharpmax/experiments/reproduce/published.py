"""The paper's own table of max retrieval, in percent."""

from __future__ import annotations

__all__ = ["PUBLISHED", "SIZES"]

SIZES = tuple(2**power for power in range(4, 15))
"""Numbers of items the paper tests on: 16 … 16,384."""

_BASELINE = (98.6, 97.1, 94.3, 89.7, 81.3, 70.1, 53.8, 35.7, 22.6, 15.7, 12.4)
_ADAPTIVE = (98.6, 97.1, 94.5, 89.9, 82.1, 72.5, 57.7, 39.4, 24.9, 17.5, 14.0)

PUBLISHED = {
    "softmax": {str(n): value for n, value in zip(SIZES, _BASELINE, strict=True)},
    "paper": {str(n): value for n, value in zip(SIZES, _ADAPTIVE, strict=True)},
}
"""Accuracy by arm and size."""
