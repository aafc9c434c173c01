"""A process of its own that measures how far `row_stats(impl="streaming")` lifts its memory, in bytes.

Run as `python -m sharpmax.experiments.benchmarks.peak_memory LENGTH HEADS WIDTH`; prints one JSON value.
"""

from __future__ import annotations

import json
import sys

import torch

from sharpmax.experiments.benchmarks.subprocess import resident_bytes
from sharpmax.stats.dispatch import row_stats


def main() -> None:
    """Measure and print."""
    length, heads, width = (int(word) for word in sys.argv[1:4])
    with torch.no_grad():
        q, k = torch.randn(2, 1, heads, length, width).unbind()
        # Libraries and thread pools come to life on the first call; they are not the cost of a longer input.
        row_stats(q[:, :, :64], k[:, :, :64], is_causal=True, impl="streaming")
        before = resident_bytes()
        stats = row_stats(q, k, is_causal=True, impl="streaming")
        after = resident_bytes()
    # The level now against the peak later errs on the high side if the start-up peaked above its own level.
    print(json.dumps(after[1] - before[0] if before and after and stats else None))


if __name__ == "__main__":
    main()
