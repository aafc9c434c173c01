"""Row statistics as one torch operator: opaque to compilers, differentiable, and batched by vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.rows.impl import triton_backward
from sharpmax.rows.impl.stock import LostDigitsError, quick_parts, stock_parts
from sharpmax.rows.impl.streaming import Incoming, streaming_backward, streaming_parts
from sharpmax.rows.impl.triton import triton_parts
from sharpmax.rows.layout import Parts, Problem, floats_at_least_32

__all__ = ["measure_parts"]

IMPLEMENTATIONS: dict[str, Callable[[Problem, frozenset[str]], Parts]] = {
    "streaming": lambda problem, fields: streaming_parts(problem),
    "stock": lambda problem, fields: quick_parts(problem),
    "triton": triton_parts,
}


def measure_parts(problem: Problem, impl: str, fields: frozenset[str]) -> Parts:
    """The parts of every row; gradients flow into q, k and a float mask, not into the gain.

    Without `max` in `fields` the anchor may be another number than the maximum, and without `var` that part may be 0.
    `impl` is one of `IMPLEMENTATIONS`, or "auto": "stock" where that is exact enough, else "streaming".
    """
    gain = None if problem.gain is None else problem.gain.detach()
    inputs = (problem.q, problem.k, problem.mask, gain, problem.spans, problem.offset, problem.scale, impl)
    return Parts(*_RowParts.apply(*inputs, "max" in fields, "var" in fields))  # type: ignore[no-untyped-call]


def _problem(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    gain: Tensor | None,
    spans: Tensor | None,
    offset: int | None,
    scale: float,
) -> Problem:
    return Problem(q, k, mask, gain, offset, scale, tuple(q.shape[:-1]), spans)


@torch.library.custom_op("sharpmax::row_parts", mutates_args=())
def _row_parts(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    gain: Tensor | None,
    spans: Tensor | None,
    offset: int | None,
    scale: float,
    impl: str,
    with_max: bool,
    with_var: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = _problem(q, k, mask, gain, spans, offset, scale)
    if q.numel() == 0 or problem.keys == 0:
        anchor = torch.full(q.shape[:-1], -torch.inf, dtype=floats_at_least_32(q.dtype), device=q.device)
        return anchor, torch.zeros_like(anchor), torch.zeros_like(anchor), torch.zeros_like(anchor)
    fields = frozenset({"max"} if with_max else ()) | frozenset({"var"} if with_var else ())
    # A compiler has been promised this layout, whatever an implementation finds convenient.
    try:
        parts = IMPLEMENTATIONS["stock" if impl == "auto" else impl](problem, fields)
    except LostDigitsError:
        parts = streaming_parts(problem) if impl == "auto" else stock_parts(problem)
    anchor, log_mass, shortfall, var = (part.contiguous() for part in parts)
    return anchor, log_mass, shortfall, var


@_row_parts.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(q.shape[:-1], dtype=floats_at_least_32(q.dtype)) for _ in range(4))


@torch.library.custom_op("sharpmax::row_parts_backward", mutates_args=())
def _row_parts_backward(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    gain: Tensor | None,
    spans: Tensor | None,
    parts: list[Tensor],
    g_log_mass: Tensor | None,
    g_shortfall: Tensor | None,
    g_var: Tensor | None,
    offset: int | None,
    scale: float,
    impl: str,
    into_mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    problem = _problem(q, k, mask, gain, spans, offset, scale)
    if q.numel() == 0 or problem.keys == 0:
        return (
            torch.zeros_like(q),
            torch.zeros_like(k),
            q.new_zeros(mask.shape if into_mask and mask is not None else (0,)),
        )
    grads = Incoming(g_log_mass, g_shortfall, g_var)
    if impl == "triton" and triton_backward.obstacle(problem, into_mask=into_mask) is None:
        found = triton_backward.triton_backward(problem, Parts(*parts), grads)
    else:
        found = streaming_backward(problem, Parts(*parts), grads, into_mask=into_mask)
    into = q.new_empty(0) if mask is None or found.mask is None else _laid_out_like(mask, found.mask)
    return _laid_out_like(q, found.q), _laid_out_like(k, found.k), into


def _laid_out_like(x: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in the layout of `empty_like(x)`, which is what a compiler has been promised."""
    wanted = torch.empty_like(x, device="meta").stride()
    return gradient if gradient.stride() == wanted else torch.empty_like(x).copy_(gradient)


@_row_parts_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    mask: Any,
    gain: Any,
    spans: Any,
    parts: Any,
    g_log_mass: Any,
    g_shortfall: Any,
    g_var: Any,
    offset: Any,
    scale: Any,
    impl: Any,
    into_mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(mask) if into_mask else q.new_empty(0)


def _flat(x: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor `[B, ...]` with a vmapped dimension, as `[V·B, ...]`."""
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(-1, *x.shape[2:])


def _flat_mask(mask: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    if mask is None:
        return None
    mask = mask.expand(size, *mask.shape) if dim is None else mask.movedim(dim, 0)
    mask = mask.expand(size, batch, *mask.shape[2:])
    return mask.reshape(-1, *mask.shape[2:])


def _split(x: Tensor, size: int, batch: int) -> Tensor:
    """The inverse of `_flat`, the vmapped dimension first."""
    return x.reshape(size, batch, *x.shape[1:])


def _batch_of(x: Tensor, dim: int | None) -> int:
    return x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]


class _RowParts(torch.autograd.Function):
    """The operators joined for autograd; unlike an operator's own registration this also serves `torch.func`."""

    @staticmethod
    def forward(
        q: Any, k: Any, mask: Any, gain: Any, spans: Any,
        offset: Any, scale: Any, impl: Any, with_max: Any, with_var: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parts: tuple[Tensor, ...] = _row_parts(q, k, mask, gain, spans, offset, scale, impl, with_max, with_var)
        return parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, mask, gain, spans, ctx.offset, ctx.scale, ctx.impl, _, ctx.with_var = inputs
        ctx.save_for_backward(q, k, mask, gain, spans, *output)
        if not torch.compiler.is_compiling():  # the compiler knows zeros only
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, _: Any, g_log_mass: Tensor | None, g_shortfall: Tensor | None, g_var: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, mask, gain, spans, *parts = ctx.saved_tensors
        grads = (g_log_mass, g_shortfall, g_var if ctx.with_var else None)
        into_mask = ctx.needs_input_grad[2]
        dq, dk, dmask = _RowPartsBackward.apply(  # type: ignore[no-untyped-call]
            q, k, mask, gain, spans, *parts, *grads, ctx.offset, ctx.scale, ctx.impl, into_mask
        )
        return dq, dk, dmask if into_mask else None, None, None, None, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, q: Tensor, k: Tensor, mask: Any, gain: Any, spans: Any, *rest: Any
    ) -> tuple[Any, Any]:
        size, batch = info.batch_size, _batch_of(q, dims[0])
        parts = _RowParts.apply(  # type: ignore[no-untyped-call]
            _flat(q, dims[0], size),
            _flat(k, dims[1], size),
            _flat_mask(mask, dims[2], size, batch),
            _flat_mask(gain, dims[3], size, batch),
            _flat_mask(spans, dims[4], size, batch),
            *rest,
        )
        return tuple(_split(p, size, batch) for p in parts), (0,) * 4


class _RowPartsBackward(torch.autograd.Function):
    """The backward operator for `torch.func`, which differentiates whatever a backward pass calls."""

    @staticmethod
    def forward(
        q: Any, k: Any, mask: Any, gain: Any, spans: Any,
        p0: Any, p1: Any, p2: Any, p3: Any,
        g1: Any, g2: Any, g3: Any,
        offset: Any, scale: Any, impl: Any, into_mask: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        found: tuple[Tensor, ...] = _row_parts_backward(
            q, k, mask, gain, spans, [p0, p1, p2, p3], g1, g2, g3, offset, scale, impl, into_mask
        )
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedError(
            "second derivatives of row statistics are not available from this implementation; "
            "use impl='reference', which is differentiable any number of times"
        )

    @staticmethod
    def vmap(
        info: Any, dims: Any, q: Tensor, k: Tensor, mask: Any, gain: Any, spans: Any, *rest: Any
    ) -> tuple[Any, Any]:
        size, batch = info.batch_size, _batch_of(q, dims[0])
        *rows, offset, scale, impl, into_mask = rest
        dq, dk, dmask = _RowPartsBackward.apply(  # type: ignore[no-untyped-call]
            _flat(q, dims[0], size),
            _flat(k, dims[1], size),
            _flat_mask(mask, dims[2], size, batch),
            _flat_mask(gain, dims[3], size, batch),
            _flat_mask(spans, dims[4], size, batch),
            *(None if x is None else _flat(x, d, size) for x, d in zip(rows, dims[5:12], strict=True)),
            offset,
            scale,
            impl,
            into_mask,
        )
        if into_mask:
            dmask = _split(dmask, size, batch)
            if _batch_of(mask, dims[2]) == 1:
                dmask = dmask.sum(1, keepdim=True)
        else:
            dmask = dmask.expand(size, 0)
        return (_split(dq, size, batch), _split(dk, size, batch), dmask), (0, 0, 0)
