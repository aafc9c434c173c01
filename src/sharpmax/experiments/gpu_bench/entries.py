"""One measured case as plain values: the form in which it is printed, saved and drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sharpmax.experiments.gpu_bench.contest import Outcome, fastest
from sharpmax.experiments.gpu_bench.inputs import Inputs
from sharpmax.experiments.gpu_bench.shapes import Shape

__all__ = ["FLOORS", "LIMITS", "entry"]

FLOORS = {"stats": 0.5, "attention": 1.5, "train": None, "decode": 1.03}
"""What arithmetic and memory leave room for, in times of plain attention; None where nothing is that simple."""

LIMITS: dict[str, dict[str, float]] = {
    "stats": {"mean_ratio": 0.62},
    "attention": {"mean_ratio": 1.62, "ratio": 1.8, "extra_bytes_per_row": 32.0},
    "train": {"mean_ratio": 1.9},
    "decode": {"mean_ratio": 1.12},
}
"""What is to be reached: by the mean of the cases that count, and by each of them."""

_PRODUCTS = {"stats": 1, "attention": 3, "train": 11}
"""Matrix products: plain attention has 2 and 5 back; statistics add 1 and, recomputing the logits, 3 back."""


def entry(
    kind: str,
    x: Inputs,
    outcome: Outcome,
    rivals: Mapping[str, Outcome],
    *,
    rounds: int,
    allowed: Mapping[str, float],
    yardstick: Mapping[str, float],
    plain: Mapping[str, float],
) -> dict[str, Any]:
    """All that is known of a case; its times are None where the check failed.

    `yardstick` are the errors of the stock kernel with everything else exact, `plain` those of plain attention.
    """
    name, best = fastest(rivals)
    ms, stock_ms = outcome.ms, best.ms
    right = outcome.agrees and ms is not None and stock_ms is not None
    return {
        "kind": kind,
        "case": x.shape.name,
        "shape": x.shape.to_dict(),
        "counts": x.shape.counts,
        "agrees": outcome.agrees,
        "problem": outcome.problem,
        "ours_ms": ms if right else None,
        "stock_ms": stock_ms if right else None,
        "stock_backend": name,
        "ratio": ms / stock_ms if right and ms is not None and stock_ms is not None else None,
        "floor": FLOORS[kind],
        "limits": LIMITS[kind],
        "stock_ms_by_backend": {rival: found.ms for rival, found in rivals.items()} if right else None,
        **(_pace(kind, x.shape, ms) if right and ms is not None else {}),
        **(_memory(kind, x.shape, outcome, best) if right else {}),
        "host_ms": outcome.host_ms if right else None,
        "stock_host_ms": best.host_ms if right else None,
        "working_set_mb": x.bytes / 1e6,
        "errors": {
            field: {
                "ours": _finite(error),
                "allowed": allowed.get(field),
                "stock": None if kind == "stats" else _finite(yardstick[field]),
                "stock_plain": None if kind == "stats" else _finite(plain[field]),
            }
            for field, error in outcome.errors.items()
        },
        "rounds": rounds,
    }


def _pace(kind: str, shape: Shape, ms: float) -> dict[str, float]:
    if kind == "decode":
        return {"tb_per_s": shape.cache_bytes / ms / 1e9}
    return {"tflop_per_s": _PRODUCTS[kind] * shape.product_flops / ms / 1e9}


def _memory(kind: str, shape: Shape, outcome: Outcome, best: Outcome) -> dict[str, float | None]:
    """Statistics take the place of nothing: all that they hold is extra."""
    if outcome.peak is None or best.peak is None:
        return {"extra_bytes_per_row": None}
    without = 0 if kind == "stats" else best.peak
    return {"extra_bytes_per_row": (outcome.peak - without) / shape.rows}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
