"""Statistics and sharp attention of whole sequences, next to plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.experiments.gpu_bench.contest import Runner, contest, times
from sharpmax.experiments.gpu_bench.entries import entry
from sharpmax.experiments.gpu_bench.inputs import drawn, sampled_rows
from sharpmax.experiments.gpu_bench.shapes import Shape
from sharpmax.experiments.gpu_bench.stock import BACKENDS, attend, with_backend
from sharpmax.experiments.gpu_bench.truth import distance, rows_in_float64, spread
from sharpmax.rows import RowStats

__all__ = ["TIMES", "prefill"]

_OF_STATISTICS = 1e-4
"""Error that a statistic may have, relative where it exceeds 1."""

TIMES = 2.0
"""Error that an output may have, in errors of the stock kernel."""


def prefill(
    shape: Shape,
    *,
    seed: int,
    device: torch.device,
    rounds: int,
    note: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """The entries of a shape, of the kinds `stats` and `attention`."""
    x = drawn(shape, seed=seed, device=device)
    q, k, v, causal, grouped = x.q, x.k, x.v, shape.causal, shape.group > 1
    rows = sampled_rows(shape, device)
    note("computing the float64 reference")
    truth = rows_in_float64(x, rows)

    def stats_errors(found: RowStats) -> dict[str, float]:
        there = ["entropy", *(name for name in ("lse", "mean", "var") if name in found.measured)]
        return {name: distance(getattr(found, name)[..., rows], truth.stats[name]) for name in there}

    def sharp_errors(out: Tensor) -> dict[str, float]:
        return spread("output", out[:, :, rows], truth.sharp)

    def plain_errors(out: Tensor) -> dict[str, float]:
        return spread("output", out[:, :, rows], truth.plain)

    # What the stock kernel makes of the exact β·q in the dtype of q is what rounding costs anybody. Rows do not know
    # of one another, so only those that are looked at need it.
    exact = q.clone()
    exact[:, :, rows] = (truth.beta[..., None] * q[:, :, rows].double()).to(q.dtype)
    yardstick = sharp_errors(attend(exact, k, v, causal))
    plain = plain_errors(attend(q, k, v, causal))
    del exact
    ours = {
        "stats": Runner(
            lambda: sm.row_stats(q, k, is_causal=causal, enable_gqa=grouped, fields={"entropy"}),
            stats_errors,
            dict.fromkeys(truth.stats, _OF_STATISTICS),
        ),
        "attention": Runner(
            lambda: sm.attention(q, k, v, is_causal=causal, enable_gqa=grouped, policy="paper"),
            sharp_errors,
            times(TIMES, yardstick),
        ),
    }
    limits = times(TIMES, plain)
    stock = {
        name: Runner(with_backend(name, lambda: attend(q, k, v, causal)), plain_errors, limits) for name in BACKENDS
    }
    found, rivals = contest(ours, stock, device=device, rounds=rounds, note=note)
    return [
        entry(kind, x, outcome, rivals, rounds=rounds, allowed=ours[kind].allowed, yardstick=yardstick, plain=plain)
        for kind, outcome in found.items()
    ]
