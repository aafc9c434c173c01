"""Made-up tables of `sharpmax calibrate`: plausible numbers, four candidates, always the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LAYERS, HEADS = 30, 9
COMMAND = "sharpmax calibrate smollm2 --task kv --leash 1% --out calibrated"


def make_tables() -> dict[str, Any]:
    """Tables of a full run."""
    rng = np.random.default_rng(4)
    betas = np.ones((LAYERS, HEADS))
    for layer, head in {(int(a), int(b)) for a, b in rng.integers(0, [LAYERS, HEADS], (48, 2))}:
        betas[layer, head] = math.exp(rng.normal(0.35, 0.3))
    places = [(int(a), int(b)) for a, b in np.argwhere(betas != 1.0)]
    places.sort(key=lambda place: -abs(math.log(betas[place])))
    return {
        "setting": {
            "model": "smollm2", "task": "kv", "sizes": [8, 16, 32, 64], "leash": 1.0, "seed": 0, "steps": 240,
            "kinds": ["constant", "length", "entropy"], "touched": len(places), "layers": LAYERS, "heads": HEADS,
        },
        "curve": {
            "nll": [[step, 2.2 * math.exp(-step / 60) + 0.15] for step in range(0, 241, 10)],
            "rise/2048": [[step, 0.8 * (1 - math.exp(-step / 40))] for step in range(0, 241, 40)],
            "rise/6144": [[step, 1.4 * math.sin(step / 80)] for step in range(0, 241, 40)],
            "rise/chat": [[step, 0.2 - step / 1000] for step in range(0, 241, 40)],
        },
        "candidates": {
            "entropy": _candidate("entropy", 0.92, len(places), 93.5, (0.62, 0.98, -0.1), False),
            "length": _candidate("length", 0.71, 61, 91.0, (0.7, 0.99, 0.05), False),
            "constant": _candidate("constant", 0.66, 52, 88.5, (0.5, 0.97, 0.2), True),
            "constant, full strength": _candidate("constant", 1.0, 52, 97.0, (2.4, 3.1, 0.9), True),
        },
        "chosen": "entropy",
        "best_foldable": "constant",
        "heads": {
            "betas": betas.tolist(),
            "touched": [[a, b, f"β = {betas[a, b]:.2f} at H/ln n = 0.5", float(betas[a, b])] for a, b in places],
        },
        "validation": {
            "as it comes": _cells([64.0, 39.0, 31.0, 16.0]),
            "entropy": _cells([97.0, 95.0, 92.0, 90.0]),
            "constant": _cells([95.0, 91.0, 86.0, 82.0]),
        },
    }  # fmt: skip


def _candidate(
    kind: str, strength: float, touched: int, validation: float, rises: tuple[float, ...], foldable: bool
) -> dict[str, Any]:
    return {
        "kind": kind, "strength": strength, "touched": touched, "validation": validation, "foldable": foldable,
        "rise": dict(zip(("2048", "6144", "chat"), rises, strict=True)),
    }  # fmt: skip


def _cells(means: list[float]) -> dict[str, Any]:
    sizes = (8, 16, 32, 64)
    return {
        str(n): {"mean": m, "low": max(0.0, m - 6.0), "high": min(100.0, m + 6.0), "n": 100}
        for n, m in zip(sizes, means, strict=True)
    }
