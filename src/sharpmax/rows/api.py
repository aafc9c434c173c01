"""`row_stats`: which implementation measures, and what it gives back."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError, reject
from sharpmax.rows.impl import stock, triton
from sharpmax.rows.impl.reference import reference_stats
from sharpmax.rows.layout import Problem, make_problem
from sharpmax.rows.operator import measure_parts
from sharpmax.rows.spans import packed_spans, window_spans
from sharpmax.rows.stats import FIELDS, RowStats

__all__ = ["IMPLS", "Impl", "check_impl", "measure", "problem_of", "row_stats"]

Impl = Literal["auto", "reference", "streaming", "stock", "triton"]
Alignment = Literal["upper-left", "lower-right"]
IMPLS: tuple[str, ...] = ("auto", "reference", "streaming", "stock", "triton")

_MEASURABLE = frozenset({*FIELDS, "entropy"})


def row_stats(
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    impl: Impl = "auto",
    fields: Collection[str] = FIELDS,
) -> RowStats:
    """Statistics of every row of attention logits scale·q·kᵀ (+ mask), without the matrix of logits.

    q `[..., H, Lq, D]` and k `[..., Hkv, Lk, D]` give rows `[..., H, Lq]`, in float32 (float64 for float64 input).
    `is_causal` is aligned bottom-right: the last row sees every key. A boolean mask is True where a key is visible,
    a float mask is added. With `window` (causal only) a row sees at most so many keys, up to its own place. With
    `cu_seqlens` several sequences lie one after the other along Lq, number s from cu_seqlens[s] to cu_seqlens[s + 1],
    and along Lk as `cu_seqlens_k` says (default: the same way); each row sees its own sequence.

    `impl` names an implementation, and is never replaced by another: `reference` (dense, float64), `streaming` (any
    device), `stock` (CPU; count, lse, mean and entropy only) or `triton` (CUDA); `auto` takes the fastest that
    measures `fields`.

    >>> import torch, sharpmax as sm
    >>> q, k = torch.zeros(1, 2, 4), torch.zeros(1, 8, 4)
    >>> sm.row_stats(q, k).entropy.exp()  # two rows, uniform over eight keys
    tensor([[8., 8.]])
    """
    problem = problem_of(q, k, attn_mask, "lower-right" if is_causal else None, scale, enable_gqa)
    if cu_seqlens is not None:
        spans = packed_spans(cu_seqlens, cu_seqlens_k, q.shape[-2], k.shape[-2], is_causal, q.device)
        problem = replace(problem, spans=spans, offset=None)
    elif cu_seqlens_k is not None:
        reject("cu_seqlens_k", "no cu_seqlens beside it", "both, or cu_seqlens alone")
    if window is not None:
        if not is_causal:
            reject("window", f"{window} without is_causal", "is_causal=True: a window ends at the row's own place")
        spans = window_spans(problem.spans, window, q.shape[-2], problem.offset or 0, q.device)
        problem = replace(problem, spans=spans, offset=None)
    return measure(problem, impl, frozenset(fields))


def problem_of(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, causal: Alignment | None, scale: float | None, enable_gqa: bool
) -> Problem:
    """The arguments of an attention function in canonical form; torch's causal biases become causal limits."""
    if attn_mask is not None and causal is not None:
        reject(
            "attn_mask",
            "a mask together with is_causal=True",
            "one of the two",
            "put the causal limit into the mask",
        )
    # Whoever holds such a bias has loaded its module, which is heavy (it brings torch's compiler and Triton).
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is not None and isinstance(attn_mask, bias.CausalBias):
        causal = "lower-right" if attn_mask.variant == bias.CausalVariant.LOWER_RIGHT else "upper-left"
        attn_mask = None
    problem = make_problem(q, k, attn_mask, offset=None, scale=scale, enable_gqa=enable_gqa)
    if causal is None:
        return problem
    return replace(problem, offset=k.shape[-2] - q.shape[-2] if causal == "lower-right" else 0)


def measure(problem: Problem, impl: str, fields: frozenset[str]) -> RowStats:
    """Measure at least `fields` with the implementation asked for; `auto` chooses by device and fields."""
    if unknown := sorted(fields - _MEASURABLE):
        reject("fields", unknown, f"some of {sorted(_MEASURABLE)}")
    check_impl(impl)
    if impl == "reference":
        return reference_stats(problem)
    count = problem.counts()
    chosen = impl == "auto"
    if chosen:
        if fields <= {"count"}:
            return RowStats.anchored(count)
        impl = _choose(problem, fields)
    if impl == "stock" and (reason := stock.obstacle(problem)):
        raise UnsupportedError(f"impl: 'stock' cannot do this: {reason}; use impl='streaming'")
    if impl == "triton" and (reason := triton.obstacle(problem)):
        raise UnsupportedError(f"impl: 'triton' cannot do this: {reason}; use impl='streaming'")
    measured = fields if impl == "triton" else fields | {"max", "var"}  # the others measure them on the way
    operator = "auto" if chosen and impl == "stock" else impl
    parts = [part.reshape(problem.rows) for part in measure_parts(problem, operator, measured)]
    anchor, log_mass, shortfall, var = parts
    if impl == "stock":
        return RowStats.anchored(count, anchor, log_mass, shortfall)
    return RowStats.anchored(
        count,
        anchor,
        log_mass,
        shortfall,
        max=anchor.detach() if "max" in measured else None,
        var=var if "var" in measured else None,
    )


def check_impl(impl: object) -> None:
    """Refuse a name that is not one of `IMPLS`."""
    if impl not in IMPLS:
        reject("impl", repr(impl), f"one of {list(IMPLS)}")


def _choose(problem: Problem, fields: frozenset[str]) -> str:
    if problem.q.device.type == "cuda" and triton.obstacle(problem) is None:
        return "triton"
    if fields <= stock.FIELDS and stock.obstacle(problem) is None:
        return "stock"
    return "streaming"


torch.utils._pytree.register_pytree_node(
    RowStats,
    lambda stats: stats.flatten(),
    lambda arrays, measured: RowStats.unflatten(measured, arrays),
    serialized_type_name="sharpmax.RowStats",
    to_dumpable_context=lambda measured: list(measured),
    from_dumpable_context=lambda measured: tuple(measured),
)
