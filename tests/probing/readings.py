"""Made-up readings of heads whose every number is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sharpmax.probing.findings import Findings
from sharpmax.probing.forecast import predict
from sharpmax.probing.inputs import Passage, ProbeInputs
from sharpmax.probing.measurement import Numbers

SIZES = (8, 16, 32, 64, 128, 256, 512)
KEYS = {size: 8 * size for size in SIZES}


def readings(
    entropy: Callable[[float], Any],
    top: Callable[[float], Any] = lambda n: np.array([[0.2]]),
    prompts: int | Mapping[int, int] = 4,
    noise: float = 0.0,
    **others: Any,
) -> dict[int, dict[str, Numbers]]:
    """Statistics `[prompts, layers, heads]` at every size, from functions of the number of keys."""
    rng = np.random.default_rng(0)
    found = {}
    for size, keys in KEYS.items():
        many = prompts if isinstance(prompts, int) else prompts[size]
        values = np.asarray(entropy(keys), dtype=float)
        shape = (many, *values.shape)
        rest = {name: np.broadcast_to(others.get(name, 0.1), shape).astype(float) for name in ("sink", "local")}
        found[size] = {
            "entropy": values + noise * rng.normal(size=shape),
            "top": np.clip(np.broadcast_to(top(keys), shape) + 0.1 * noise * rng.normal(size=shape), 0.0, 1.0),
            "spread": np.full(shape, 9.0),
            "count": np.full(shape, float(keys)),
            **rest,
        }
    return found


def material(task: str = "kv", unit: str = "items", *, nested: bool = False) -> ProbeInputs:
    """ProbeInputs without anything to read."""
    nothing: list[Passage] = []
    return ProbeInputs(task, unit, dict.fromkeys(SIZES, nothing), nested=nested)


def findings(read: dict[int, dict[str, Numbers]], *, task: str = "kv", causal: bool = True) -> Findings:
    """Findings with a forecast by lines."""
    about = material(task)
    curves = {name: np.stack([one[name].mean(0) for one in read.values()]) for name in ("entropy", "top", "count")}
    return Findings.of(about, read, causal, predict(curves, SIZES, 64), seed=0)
