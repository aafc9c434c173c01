"""How fast examples are made."""

from __future__ import annotations

import time
from collections.abc import Iterable

from sharpmax.tasks.clrs_text.generation import stream
from sharpmax.tasks.clrs_text.sizes import ALGORITHMS, train_sizes

__all__ = ["generation_rate"]


def generation_rate(
    algorithms: Iterable[str] = ALGORITHMS, *, seconds: float = 0.05, trace: bool = False
) -> dict[str, float]:
    """Return the training examples per second of one core by algorithm, and over all of them under `"average"`.

    Every training size counts equally, as in a training set; each is timed for `seconds` of processor time.
    """
    spent: dict[str, list[float]] = {}
    for algorithm in algorithms:
        for size in train_sizes(algorithm):
            drawn = stream(algorithm, size, "train", trace=trace)
            next(drawn)  # the first one also imports
            begin, count = time.process_time(), 0
            while (passed := time.process_time() - begin) < seconds:
                next(drawn)
                count += 1
            spent.setdefault(algorithm, []).append(passed / count)
    each = {algorithm: len(times) / sum(times) for algorithm, times in spent.items()}
    everything = [cell for times in spent.values() for cell in times]
    return {**each, "average": len(everything) / sum(everything)}
