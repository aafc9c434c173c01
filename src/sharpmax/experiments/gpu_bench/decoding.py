"""One new token against a cache, contiguous or in pages, next to plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.experiments.gpu_bench.contest import Runner, contest, times
from sharpmax.experiments.gpu_bench.entries import entry
from sharpmax.experiments.gpu_bench.inputs import Inputs, drawn, in_pages, sampled_rows
from sharpmax.experiments.gpu_bench.prefill import TIMES
from sharpmax.experiments.gpu_bench.shapes import Shape
from sharpmax.experiments.gpu_bench.stock import BACKENDS, attend, with_backend
from sharpmax.experiments.gpu_bench.truth import rows_in_float64, spread

__all__ = ["can_decode", "decoding"]


def can_decode() -> bool:
    """Whether this sharpmax decodes with a kernel of its own."""
    return hasattr(sm, "decode")


def decoding(
    shape: Shape,
    *,
    seed: int,
    device: torch.device,
    rounds: int,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The entry of a shape, of the kind `decode`.

    Stock kernels read no pages: next to a paged cache they are given the same keys in one piece.
    """
    x = drawn(shape, seed=seed, device=device)
    note("computing the float64 reference")
    truth = rows_in_float64(x, sampled_rows(shape, device))
    exact = (truth.beta[..., None] * x.q.double()).to(x.q.dtype)
    yardstick = spread("output", attend(exact, x.k, x.v), truth.sharp)
    plain = spread("output", attend(x.q, x.k, x.v), truth.plain)
    allowed = times(TIMES, yardstick)
    ours = {"decode": Runner(_ours(x, seed), lambda out: spread("output", out, truth.sharp), allowed)}
    limits = times(TIMES, plain)

    def rival(name: str, run: Callable[[], Tensor]) -> Runner:
        return Runner(with_backend(name, run), lambda out: spread("output", out.view_as(x.q), truth.plain), limits)

    # Query heads that share their keys can also be given as query rows of one head, which some kernels like better.
    folded = x.q.view(shape.batch, shape.kv_heads, shape.group, shape.width)
    stock = {name: rival(name, lambda: attend(x.q, x.k, x.v)) for name in BACKENDS}
    stock |= {f"{name}, folded": rival(name, lambda: attend(folded, x.k, x.v)) for name in BACKENDS}
    found, rivals = contest(ours, stock, device=device, rounds=rounds, note=note)
    outcome = found["decode"]
    return entry("decode", x, outcome, rivals, rounds=rounds, allowed=allowed, yardstick=yardstick, plain=plain)


def _ours(x: Inputs, seed: int) -> Callable[[], Tensor]:
    decode: Callable[..., Tensor] = sm.decode  # type: ignore[attr-defined, unused-ignore]
    if x.shape.page_size is None:
        return lambda: decode(x.q, x.k, x.v, policy="paper")
    pages = in_pages(x, x.shape.page_size, seed)
    return lambda: decode(x.q, pages.k, pages.v, block_table=pages.table, lengths=pages.lengths, policy="paper")
