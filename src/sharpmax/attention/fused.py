"""β·q in two launches on a GPU: the statistics of the rows, then β by a closed form together with the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sharpmax.attention.kernels.sharpen import sharpen_op
from sharpmax.policies import PerHead, Policy
from sharpmax.rows.impl import triton
from sharpmax.rows.layout import Parts, Problem
from sharpmax.rows.operator import measure_parts
from sharpmax.rows.stats import RowStats

__all__ = ["by_head", "differentiates", "learns", "serves", "sharpened", "warn_now_and_then"]

_looked_at: set[Any] = set()


def by_head(policy: Policy) -> tuple[Policy, ...]:
    """The policy of all heads, or one per head."""
    return policy.policies[0] if isinstance(policy, PerHead) and policy.layers == 1 else (policy,)


def learns(*inputs: Tensor | None) -> bool:
    """Whether a gradient into one of these is wanted, which the kernels here have for smooth forms alone."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def differentiates(mask: Tensor | None, smooth: bool) -> bool:
    """Whether gradients flow through the kernels: of smooth forms, and not into a float mask, which β scales too."""
    return smooth and (mask is None or mask.dtype == torch.bool)


def serves(problem: Problem, q: Tensor) -> bool:
    """Whether the kernels can be used here: on a GPU, for q `[B, H, Lq, D]`, outside of `torch.func`."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return q.ndim == 4 and q.dtype != torch.float64 and bool(q.numel()) and triton.obstacle(problem) is None


def sharpened(
    problem: Problem, q: Tensor, counts: Tensor | None, needs: Sequence[str], code: str
) -> tuple[Tensor, Tensor, Parts | None]:
    """β·q, β `[B, H, Lq]`, and the statistics they came from; `counts` are given where there is a mask."""
    parts = None
    if any(name != "count" for name in needs):
        parts = measure_parts(problem, "triton", frozenset(needs))
    rows = (None, None, None) if parts is None else parts[1:]
    scaled, beta = sharpen_op(q, *rows, counts, problem.keys, problem.offset, code)
    return scaled, beta, parts


def warn_now_and_then(
    policies: Sequence[Policy], problem: Problem, parts: Parts | None, said: set[Any] | None = None
) -> None:
    """Warn of rows outside the range of a policy, looking once for every doubling of the number of keys.

    To look means to wait for the device, which not every call can afford; and it is length that takes rows outside.
    """
    looked_at = _looked_at if said is None else said
    for head, policy in enumerate(policies):
        if policy.fitted_range is None or (policy, problem.keys.bit_length()) in looked_at:
            continue
        if problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        looked_at.add((policy, problem.keys.bit_length()))
        rows = [None] * 4 if parts is None else [part.reshape(problem.rows) for part in parts]
        stats = RowStats.anchored(problem.counts(), *rows[:3])
        policy.warn_outside(stats if len(policies) == 1 else stats.map(lambda x, h=head: x[:, h]), said)
