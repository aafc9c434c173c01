"""The training step: forward and backward of sharp attention, next to those of plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sharpmax as sm
from sharpmax.experiments.gpu_bench.contest import Runner, contest, times
from sharpmax.experiments.gpu_bench.entries import entry
from sharpmax.experiments.gpu_bench.gradients import Gradients, Heads, chosen_heads
from sharpmax.experiments.gpu_bench.inputs import Inputs, drawn
from sharpmax.experiments.gpu_bench.shapes import Shape
from sharpmax.experiments.gpu_bench.stock import BACKENDS, attend, with_backend
from sharpmax.experiments.gpu_bench.truth import spread

__all__ = ["training"]

_TIMES = 3.0
"""Error that a gradient may have, in errors of the stock kernel."""


def training(
    shape: Shape,
    *,
    seed: int,
    device: torch.device,
    rounds: int,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The entry of a shape, of the kind `train`."""
    x = drawn(shape, seed=seed, device=device)
    note("computing the float64 reference")
    heads = chosen_heads(x)
    plain_truth, sharp_truth = heads.exact(None), heads.exact("paper")

    def sharp_errors(found: tuple[Tensor, ...]) -> dict[str, float]:
        return _errors(heads.of(*found), sharp_truth)

    def plain_errors(found: tuple[Tensor, ...]) -> dict[str, float]:
        return _errors(heads.of(*found), plain_truth)

    def sharp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sm.attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.group > 1, policy="paper")

    def stock_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, shape.causal)

    plain_step = _step(x, stock_attention)
    plain = plain_errors(plain_step())
    yardstick = _errors(_rounded(heads), sharp_truth)
    ours = {"train": Runner(_step(x, sharp), sharp_errors, times(_TIMES, yardstick))}
    limits = times(_TIMES, plain)
    stock = {name: Runner(with_backend(name, plain_step), plain_errors, limits) for name in BACKENDS}
    found, rivals = contest(ours, stock, device=device, rounds=rounds, note=note)
    outcome, allowed = found["train"], ours["train"].allowed
    return entry("train", x, outcome, rivals, rounds=rounds, allowed=allowed, yardstick=yardstick, plain=plain)


def _step(x: Inputs, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    inputs = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]

    def step() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(attention(*inputs), inputs, x.upstream)

    return step


def _rounded(heads: Heads) -> Gradients:
    """The stock kernel's gradients with everything else exact: β, its gradient, and the sums of the parts."""
    beta = heads.beta()
    exact = (beta[..., None] * heads.q.double()).to(heads.q.dtype)
    inputs = [y.requires_grad_() for y in (exact, heads.k[:, None].clone(), heads.v[:, None].clone())]
    with torch.enable_grad():
        out = attend(inputs[0], inputs[1], inputs[2], heads.causal)
        into_q, into_k, into_v = torch.autograd.grad(out, inputs, heads.upstream)
    through = heads.through_beta((heads.q.double() * into_q.double()).sum(-1))
    return Gradients(
        (beta[..., None] * into_q.double() + through.q).to(heads.q.dtype),
        (into_k[:, 0].double() + through.k).to(heads.k.dtype),
        into_v[:, 0],
    )


def _errors(given: Gradients, wanted: Gradients) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in Gradients._fields:
        found |= spread(f"d{name}", getattr(given, name), getattr(wanted, name))
    return found
