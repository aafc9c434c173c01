"""β·q as operators: with a given, differentiable β, or with β computed from row statistics in the same launch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError
from sharpmax.ops.kernels.tables import Coefficients
from sharpmax.stats.call import capped_beta, largest_for, layout
from sharpmax.stats.triton_launch import (
    Compiled,
    PartsPlan,
    Settings,
    available,
    interpreted,
    launch,
    limited,
    on_device,
    power_of_2,
)

_WIDEST = 4096
_ELEMENTS = 4096
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def scales(q: Tensor) -> bool:
    """Whether the kernels can scale these queries."""
    return q.ndim == 4 and q.numel() > 0 and q.shape[-1] <= _WIDEST and q.dtype in _DTYPES and not available(q.device)


def _settled(name: str, q: Tensor, numbers: Sequence[int], **constants: Any) -> Settings:
    """The grid over the rows of q, and the constants common to the kernels of this module."""
    kernels = importlib.import_module("sharpmax.ops.kernels.sharpen_kernel")
    width = q.shape[-1]
    block_d = power_of_2(width)
    block_l = max(1, _ELEMENTS // block_d)
    shared = {"WIDTH": width, "ROOM": largest_for(q.dtype), "BLOCK_L": block_l, "BLOCK_D": block_d, "num_warps": 4}
    grid = (-(-(q.numel() // width) // block_l),)
    return Settings(getattr(kernels, name), grid, tuple(numbers), {**shared, **constants})


def _rows(q: Tensor) -> tuple[int, int, int]:
    return q.numel() // q.shape[-1], q.shape[1], q.shape[2]


def _on_kernel(q: Tensor) -> bool:
    return (q.is_cuda or interpreted()) and scales(q)


def scale_rows(q: Tensor, beta: Tensor) -> Tensor:
    """β·q for q `[B, H, Lq, D]` and β `[B, H, Lq]`."""
    out = torch.empty_like(q)
    if not _on_kernel(q):
        return out.copy_(q * capped_beta(q, beta)[..., None])
    with on_device(q):
        launch(
            ("scale_rows", layout(q), layout(beta)),
            (q, beta, out),
            lambda: _settled("scale_rows", q, (*q.stride(), *beta.stride(), *out.stride(), *_rows(q))),
        )
    return out


def scale_features(q: Tensor, factors: Tensor) -> Tensor:
    """q `[B, H, Lq, D]` times float32 factors `[H or 1, 1, D or 1]`, rounded once; products are not capped."""
    out = torch.empty_like(q)
    steps = [0 if size == 1 else stride for size, stride in zip(factors.shape, factors.stride(), strict=True)]
    with on_device(q):
        launch(
            ("scale_features", layout(q), layout(factors)),
            (q, factors, out),
            lambda: _settled("scale_features", q, (*q.stride(), steps[0], steps[2], *out.stride(), *_rows(q))),
        )
    return out


scale_op = torch.library.custom_op("sharpmax::scale_rows", mutates_args=())(scale_rows)


@scale_op.register_fake
def _(q: Tensor, beta: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("sharpmax::scale_rows_backward", mutates_args=())
def scale_backward_op(
    grad: Tensor, q: Tensor, beta: Tensor, log_mass: Tensor | None, shortfall: Tensor | None, counts: Tensor | None,
    keys: int, offset: int | None, table: Tensor | None, shape: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of q and β; with a table, of q and the entropy that gave β, in the shape of `log_mass`."""
    like = beta if log_mass is None else log_mass
    into_q, into_row = torch.empty_like(q), torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if not _on_kernel(q):
        used = capped_beta(q, beta)
        wide = grad.to(beta.dtype)
        into_q.copy_(wide * used[..., None])
        into_row.copy_((wide * q.to(beta.dtype)).sum(-1).masked_fill(used < beta, 0.0))
        return into_q, into_row
    log_mass, shortfall, counts = (None if x is None else x.contiguous() for x in (log_mass, shortfall, counts))
    forms, terms, *_ = shape
    numbers = (
        *grad.stride(), *q.stride(), *beta.stride(), *into_q.stride(),
        0 if table is None else Coefficients(table, shape).stride, *_rows(q), keys, limited(offset, q.shape[2], keys),
    )  # fmt: skip
    constants = {"CAUSAL": offset is not None, "COUNTED": counts is not None, "FORMS": forms, "TERMS": terms}
    key = ("scale_rows_backward", *map(layout, (grad, q, beta, counts, table)), *shape, keys, offset)
    with on_device(q):
        launch(
            key,
            (grad, q, beta, log_mass, shortfall, counts, table, into_q, into_row),
            lambda: _settled("scale_rows_backward", q, numbers, **constants),
        )
    return into_q, into_row


@scale_backward_op.register_fake
def _(grad: Any, q: Tensor, beta: Tensor, log_mass: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    like = beta if log_mass is None else log_mass
    return torch.empty_like(q), like.new_empty(like.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    into_q, into_beta = scale_backward_op(grad, *ctx.saved_tensors, None, None, None, 0, None, None, [0, 0])
    return into_q, into_beta


scale_op.register_autograd(_gradients, setup_context=_remember)


def sharpened(
    q: Tensor, log_mass: Tensor | None, shortfall: Tensor | None, var: Tensor | None, counts: Tensor | None,
    keys: int, offset: int | None, table: Tensor, shape: list[int],
) -> tuple[Tensor, Tensor, Compiled | None]:  # fmt: skip
    """β·q, β `[B, H, Lq]`, and the kernel that was launched.

    Statistics and counts hold one number per row of q, in the order of the rows.
    """
    out, beta = torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if not q.numel():
        return out, beta, None
    if (reason := available(q.device)) or q.dtype == torch.float64:
        raise UnsupportedError(f"sharpen_rows: {reason or 'the kernel does not take float64'}; use the policy's beta")
    log_mass, shortfall, var, counts = (
        None if x is None else x.contiguous() for x in (log_mass, shortfall, var, counts)
    )

    def settle() -> Settings:
        forms, terms, segments, with_var = shape
        numbers = (
            *q.stride(), *out.stride(), Coefficients(table, shape).stride, *_rows(q), keys,
            limited(offset, q.shape[2], keys),
        )  # fmt: skip
        return _settled(
            "sharpen_rows", q, numbers, CAUSAL=offset is not None, COUNTED=counts is not None,
            MEASURED=log_mass is not None, VAR=var is not None and bool(with_var), FORMS=forms, TERMS=terms,
            SEGMENTS=segments,
        )  # fmt: skip

    key = (
        "sharpen_rows", layout(q), log_mass is None, var is None, layout(counts), keys, offset, layout(table),
        tuple(shape),
    )  # fmt: skip
    with on_device(q):
        found = launch(key, (q, log_mass, shortfall, var, counts, table, out, beta), settle)
    return out, beta, found


class SharpenPlan(NamedTuple):
    """The launches from q and k without a mask to β·q, for any tensors of the same layout."""

    parts: PartsPlan | None
    """None if β depends on the number of visible keys alone."""

    last: Compiled
    step: int
    """Bytes of one statistic of all rows, including padding."""

    def __call__(self, q: Tensor, k: Tensor, table: Tensor) -> Tensor | None:
        """β·q for policies of the same forms; None if an address is not a multiple of 16."""
        parts, last, step = self
        q_at = q.data_ptr()
        if (q_at | k.data_ptr()) & 15:
            return None
        out, room = torch.empty_like(q), torch.empty((5 * step,), dtype=torch.uint8, device=q.device)
        at = room.data_ptr()
        with on_device(q):
            rows: tuple[int | None, ...] = (None, None, None)
            if parts is not None:
                parts.run(q, k, at, step)
                rows = (at + step, at + 2 * step, at + 3 * step)
            last(q_at, *rows, None, table.data_ptr(), out.data_ptr(), at + 4 * step)
        return out


@torch.library.custom_op("sharpmax::sharpen_rows", mutates_args=())
def sharpen_op(
    q: Tensor, log_mass: Tensor | None, shortfall: Tensor | None, var: Tensor | None, counts: Tensor | None,
    keys: int, offset: int | None, table: Tensor, shape: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """β·q and β, as `sharpened`."""
    return sharpened(q, log_mass, shortfall, var, counts, keys, offset, table, shape)[:2]


@sharpen_op.register_fake
def _(
    q: Tensor, log_mass: Any, shortfall: Any, var: Any, counts: Any, keys: Any, offset: Any, table: Any, shape: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _remember_rows(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, log_mass, shortfall, _, counts, ctx.keys, ctx.offset, table, ctx.shape = inputs
    ctx.save_for_backward(q, output[1], log_mass, shortfall, counts, table)


def _gradients_of_rows(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, beta, *rows, table = ctx.saved_tensors
    if rows[0] is None:  # without statistics β is a constant
        return scale_backward_op(grad, q, beta, *rows, 0, None, None, [0, 0])[0], *(None,) * 8
    into_q, into_entropy = scale_backward_op(grad, q, beta, *rows, ctx.keys, ctx.offset, table, ctx.shape)
    return into_q, into_entropy, into_entropy, *(None,) * 6


sharpen_op.register_autograd(_gradients_of_rows, setup_context=_remember_rows)
