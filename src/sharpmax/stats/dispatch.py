"""`row_stats`: choose an implementation, run it, and make it one differentiable operator where that is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sharpmax.errors import UnsupportedError, reject
from sharpmax.stats import triton_launch
from sharpmax.stats.call import Alignment, AttentionCall, Parts, floats_at_least_32, layout, remember
from sharpmax.stats.reference import reference_stats
from sharpmax.stats.spans import packed_spans, window_spans
from sharpmax.stats.statistics import FIELDS, RowStats
from sharpmax.stats.streaming import Incoming, streaming_backward, streaming_parts
from sharpmax.stats.triton_launch import backward_obstacle, triton_backward, triton_parts

Impl = Literal["auto", "reference", "streaming", "sdpa", "triton"]
IMPLS: tuple[str, ...] = ("auto", "reference", "streaming", "sdpa", "triton")

IMPLEMENTATIONS: dict[str, Callable[[AttentionCall, frozenset[str]], Parts]] = {
    "streaming": lambda call, fields: streaming_parts(call),
    "sdpa": lambda call, fields: _sdpa_parts(call, _QUICK_LOSS[floats_at_least_32(call.q.dtype)]),
    "triton": triton_parts,
}

_MEASURABLE = frozenset({*FIELDS, "entropy"})


def row_stats(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    *,
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
    a float mask is added. With `window` (causal only) a row sees at most that many keys, its own included. With
    `cu_seqlens` several sequences are packed along Lq, number s from cu_seqlens[s] to cu_seqlens[s + 1], and along Lk
    by `cu_seqlens_k` (default: the same); each row sees its own sequence.

    `impl` names an implementation and is never replaced by another: `reference` (dense, float64), `streaming` (any
    device), `sdpa` (CPU; count, lse, mean and entropy only) or `triton` (CUDA). `auto` takes the fastest that
    measures `fields`. Inside `torch.func` rows are measured densely, as by `reference`.

    >>> import torch, sharpmax as sm
    >>> q, k = torch.zeros(1, 2, 4), torch.zeros(1, 8, 4)
    >>> sm.row_stats(q, k).entropy.exp()  # two rows, uniform over eight keys
    tensor([[8., 8.]])
    """
    known = None
    spans_given = cu_seqlens is not None or cu_seqlens_k is not None or window is not None
    if attn_mask is None and not spans_given and impl == "auto" and is_plain(q, k) and on_gpu(q) and is_number(scale):
        known = (layout(q), layout(k), is_causal, scale, enable_gqa, frozenset(fields))
        if (earlier := _known.get(known)) is not None:
            return _known_stats(q, k, earlier, known[-1])
    causal: Alignment | None = "lower-right" if is_causal else None
    call = AttentionCall.of(q, k, attn_mask, causal=causal, scale=scale, enable_gqa=enable_gqa)
    if cu_seqlens is not None:
        spans = packed_spans(cu_seqlens, cu_seqlens_k, q.shape[-2], k.shape[-2], is_causal, q.device)
        call = replace(call, spans=spans, offset=None)
    elif cu_seqlens_k is not None:
        reject("cu_seqlens_k", "no cu_seqlens beside it", "both, or cu_seqlens alone")
    if window is not None:
        if not is_causal:
            reject("window", f"{window} without is_causal", "is_causal=True: a window ends at the row's own place")
        spans = window_spans(call.spans, window, q.shape[-2], call.offset or 0, q.device)
        call = replace(call, spans=spans, offset=None)
    found = measure(call, impl, frozenset(fields))
    if known is not None and call.k.shape == k.shape and is_known_kind(call) and _choose(call, known[-1]) == "triton":
        remember(_known, known, _KnownCall(call.offset, call.scale, found.count))
    return found


def measure(call: AttentionCall, impl: str, fields: frozenset[str]) -> RowStats:
    """Measure at least `fields` with the implementation `impl`; `auto` chooses by device and fields."""
    if unknown := sorted(fields - _MEASURABLE):
        reject("fields", unknown, f"some of {sorted(_MEASURABLE)}")
    check_impl(impl)
    if impl == "reference":
        return reference_stats(call)
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        # The transformations of `torch.func` do not reach into operators.
        dtype = floats_at_least_32(call.q.dtype)
        return reference_stats(call).map(lambda part: part.to(dtype) if part.is_floating_point() else part)
    count = call.counts()
    chosen = impl == "auto"
    if chosen:
        if fields <= {"count"}:
            return RowStats.anchored(count)
        impl = _choose(call, fields)
    obstacle = {"sdpa": _sdpa_obstacle, "triton": triton_launch.obstacle}.get(impl)
    if obstacle is not None and (reason := obstacle(call)):
        raise UnsupportedError(f"impl: {impl!r} cannot do this: {reason}; use impl='streaming'")
    measured = fields if impl == "triton" else fields | {"max", "var"}  # the others measure both in any case
    operator = "auto" if chosen and impl == "sdpa" else impl
    parts = [part.reshape(call.rows) for part in measure_parts(call, operator, measured)]
    anchor, log_mass, shortfall, var = parts
    if impl == "sdpa":
        return RowStats.anchored(count, anchor, log_mass, shortfall)
    peak = anchor.detach() if "max" in measured else None
    return RowStats.anchored(count, anchor, log_mass, shortfall, max=peak, var=var if "var" in measured else None)


def check_impl(impl: object) -> None:
    """Refuse a name that is not one of `IMPLS`."""
    if impl not in IMPLS:
        reject("impl", repr(impl), f"one of {list(IMPLS)}")


def _choose(call: AttentionCall, fields: frozenset[str]) -> str:
    if on_gpu(call.q) and triton_launch.obstacle(call) is None:
        return "triton"
    if fields <= _SDPA_FIELDS and _sdpa_obstacle(call) is None:
        return "sdpa"
    return "streaming"


def measure_parts(call: AttentionCall, impl: str, fields: frozenset[str]) -> Parts:
    """The parts of every row; gradients flow into q, k and a float mask, but not into the gain.

    Without `max` in `fields` the anchor need not be the maximum, and without `var` that part may be 0. `impl` is one of
    `IMPLEMENTATIONS`, or "auto": "sdpa" where it is accurate enough, else "streaming".
    """
    if is_plain(call.q, call.k, call.mask):
        return _parts(call, impl, fields & {"max", "var"})
    gain = None if call.gain is None else call.gain.detach()
    inputs = (call.q, call.k, call.mask, gain, call.spans, call.offset, call.scale, impl)
    return Parts(*_row_parts(*inputs, "max" in fields, "var" in fields))


def _parts(call: AttentionCall, impl: str, fields: frozenset[str]) -> Parts:
    dtype = floats_at_least_32(call.q.dtype)
    if call.q.numel() == 0 or call.keys == 0:
        anchor = torch.full(call.q.shape[:-1], -torch.inf, dtype=dtype, device=call.q.device)
        return Parts(anchor, torch.zeros_like(anchor), torch.zeros_like(anchor), torch.zeros_like(anchor))
    try:
        return IMPLEMENTATIONS["sdpa" if impl == "auto" else impl](call, fields)
    except _LostDigitsError:
        if impl == "auto":
            return streaming_parts(call)
        wide = _sdpa_parts(replace(call, q=call.q.double(), k=call.k.double()), _MOST_LOSS[dtype])
        return Parts(*(part.to(dtype) for part in wide))


def on_gpu(x: Tensor) -> bool:
    """Whether kernels are the fast implementation for x."""
    return x.is_cuda


def is_number(scale: object) -> bool:
    """Whether a scale can be part of a key; a check refuses everything else later."""
    return scale is None or type(scale) in (int, float)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a call needs no operator: nothing differentiates, transforms, traces or compiles it."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    learning = torch.is_grad_enabled()
    for x in tensors:  # noqa: SIM110 (a generator would take longer than the rest of the function)
        if x is not None and (type(x) is not Tensor or (learning and x.requires_grad)):
            return False
    return True


# One differentiable operator for every implementation.


@torch.library.custom_op("sharpmax::row_parts", mutates_args=())
def _row_parts(
    q: Tensor, k: Tensor, mask: Tensor | None, gain: Tensor | None, spans: Tensor | None, offset: int | None,
    scale: float, impl: str, with_max: bool, with_var: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = AttentionCall(q, k, mask, offset, scale, tuple(q.shape[:-1]), gain, spans)
    fields = frozenset({"max"} if with_max else ()) | frozenset({"var"} if with_var else ())
    # The fake below promises compilers this layout, whatever layout an implementation returns.
    anchor, log_mass, shortfall, var = (part.contiguous() for part in _parts(call, impl, fields))
    return anchor, log_mass, shortfall, var


@_row_parts.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(q.shape[:-1], dtype=floats_at_least_32(q.dtype)) for _ in range(4))


@torch.library.custom_op("sharpmax::row_parts_backward", mutates_args=())
def _row_parts_backward(
    q: Tensor, k: Tensor, mask: Tensor | None, gain: Tensor | None, spans: Tensor | None, parts: list[Tensor],
    g_log_mass: Tensor | None, g_shortfall: Tensor | None, g_var: Tensor | None, offset: int | None, scale: float,
    impl: str, into_mask: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = AttentionCall(q, k, mask, offset, scale, tuple(q.shape[:-1]), gain, spans)
    if q.numel() == 0 or call.keys == 0:
        shape = mask.shape if into_mask and mask is not None else (0,)
        return torch.zeros_like(q), torch.zeros_like(k), q.new_zeros(shape)
    grads = Incoming(g_log_mass, g_shortfall, g_var)
    if impl == "triton" and backward_obstacle(call, into_mask=into_mask) is None:
        found = triton_backward(call, Parts(*parts), grads)
    else:
        found = streaming_backward(call, Parts(*parts), grads, into_mask=into_mask)
    into = q.new_empty(0) if mask is None or found.mask is None else _laid_out_like(mask, found.mask)
    return _laid_out_like(q, found.q), _laid_out_like(k, found.k), into


def _laid_out_like(x: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in the layout of `empty_like(x)`, which the fake below promises compilers."""
    wanted = torch.empty_like(x, device="meta").stride()
    return gradient if gradient.stride() == wanted else torch.empty_like(x).copy_(gradient)


@_row_parts_backward.register_fake
def _(q: Tensor, k: Tensor, mask: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    into_mask = rest[-1]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(mask) if into_mask else q.new_empty(0)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, mask, gain, spans, ctx.offset, ctx.scale, ctx.impl, _, ctx.with_var = inputs
    ctx.save_for_backward(q, k, mask, gain, spans, *output)
    if not torch.compiler.is_compiling():  # compilers always materialise gradients
        ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, _: Any, g_log_mass: Tensor | None, g_shortfall: Tensor | None, g_var: Tensor | None
) -> tuple[Tensor | None, ...]:
    *inputs, anchor, log_mass, shortfall, var = ctx.saved_tensors
    grads = (g_log_mass, g_shortfall, g_var if ctx.with_var else None)
    into_mask = ctx.needs_input_grad[2]
    dq, dk, dmask = _row_parts_backward(
        *inputs, [anchor, log_mass, shortfall, var], *grads, ctx.offset, ctx.scale, ctx.impl, into_mask
    )
    return dq, dk, dmask if into_mask else None, *(None,) * 7


def _refuse(ctx: Any, *grads: Tensor) -> Any:
    raise UnsupportedError(
        "second derivatives of row statistics are not available from this implementation; "
        "use impl='reference', which is differentiable any number of times"
    )


_row_parts.register_autograd(_gradients, setup_context=_remember)
_row_parts_backward.register_autograd(_refuse)

torch.utils._pytree.register_pytree_node(
    RowStats,
    RowStats.flatten,
    lambda arrays, measured: RowStats.unflatten(measured, arrays),
    serialized_type_name="sharpmax.RowStats",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)


# `impl="sdpa"`: entropy from PyTorch's attention kernel. With the keys in place of the values, attention returns E[k].
# The mean logit is scale·q·E[k], and the kernel's log-sum-exp completes the entropy, in one pass of attention. As the
# difference of lse and mean, it carries a rounding error of about eps·|lse|. So half precision is computed in float32,
# and rows of large logits in float64.

_SDPA_FIELDS = frozenset({"count", "lse", "mean", "entropy"})

# The rounding error allowed in an entropy, in nats, by the dtype of statistics: at the first attempt, and in float64.
_QUICK_LOSS: dict[torch.dtype, float] = {torch.float32: 8e-6, torch.float64: 2e-14}
_MOST_LOSS = {torch.float32: 8e-6, torch.float64: 1e-11}


class _LostDigitsError(UnsupportedError):
    """The logits are so large that rounding costs too much of the entropy."""


def _sdpa_obstacle(call: AttentionCall) -> str | None:
    """None if PyTorch's kernel can serve this call, else one line that says why not."""
    if call.q.device.type != "cpu":
        return f"it uses the CPU's flash attention and q is on {call.q.device}"
    if call.mask is not None and call.mask.is_floating_point():
        return "the mean of an added float mask never leaves the kernel"
    return None


def _sdpa_parts(call: AttentionCall, loss: float) -> Parts:
    """Parts anchored at lse: log_mass 0, shortfall the entropy, var 0 (not measured).

    Raises _LostDigitsError if rounding may cost an entropy more than `loss` nats.
    """
    batch, key_heads, group, rows, width = call.q.shape
    heads = (batch, key_heads * group)
    dtype = floats_at_least_32(call.q.dtype)
    q, k = call.q.to(dtype), call.k.to(dtype)
    # The kernel hides a key by adding −inf to its logit, which leaves a NaN there. So keys that are not finite go in as
    # zeros, and the rows that see one become NaN afterwards, as do the rows of a query that is not finite.
    bad_keys = ~k.isfinite().all(-1)
    invalid = ~q.isfinite().all(-1)
    if bad_keys.any():
        k = k.masked_fill(bad_keys[..., None], 0.0)
        invalid = invalid | call.rows_that_see(bad_keys)
    shared = k[:, :, None].expand(-1, -1, group, -1, -1).reshape(*heads, call.keys, width).contiguous()
    mask, is_causal = _kernel_mask(call, heads, dtype)
    scale = call.scale
    if scale <= 0.0:  # the kernel hides keys before it multiplies by the scale: −inf becomes NaN or +inf
        q, scale = q * scale, 1.0
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.reshape(*heads, rows, width).contiguous(), shared, shared, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    lse = lse.to(dtype).view(batch, key_heads, group, rows)
    entropy = (lse - scale * (q * out.reshape(q.shape)).sum(-1)).clamp_min(0.0)
    empty = (call.counts() == 0).view(lse.shape)
    # A logit beyond the range of the dtype makes the lse infinite.
    if not bool((invalid | empty | (lse.abs() * torch.finfo(dtype).eps <= loss)).all()):
        raise _LostDigitsError(
            "impl: 'sdpa' cannot do this: the logits are so large that the difference of lse and mean loses the "
            "entropy; use impl='streaming'"
        )
    return Parts(
        lse.masked_fill(invalid, torch.nan).masked_fill(empty, -torch.inf),
        torch.zeros_like(lse).masked_fill(invalid & ~empty, torch.nan),
        entropy.masked_fill(invalid, torch.nan).masked_fill(empty, 0.0),
        torch.zeros_like(lse),
    )


def _kernel_mask(call: AttentionCall, heads: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """The mask for the kernel and its causal flag, which replaces an equivalent mask."""
    offset = call.offset
    if offset is not None and offset >= call.keys - 1:
        offset = None
    if call.mask is None and call.spans is None and offset in (None, 0):
        return None, offset == 0
    hide = call.hidden()
    hide = hide.reshape(hide.shape[0], -1, *hide.shape[-2:])  # of one head, or of all
    mask = torch.zeros(hide.shape, dtype=dtype, device=hide.device).masked_fill_(hide, -torch.inf)
    return mask.expand(heads[0], heads[1], call.q.shape[-2], call.keys), False


# Calls on a GPU that were checked before.


@dataclass
class _KnownCall:
    """A checked call, and the launches for it once they are known. It serves tensors of the same layout."""

    offset: int | None
    scale: float
    count: Tensor
    plan: triton_launch.PartsPlan | None = None


_known: dict[Any, _KnownCall] = {}


def is_known_kind(call: AttentionCall) -> bool:
    """Whether the kernels can serve calls of this layout without further checks: see `unmasked_parts`."""
    return len(call.rows) == 3 and call.q.dtype != torch.float64 and call.q.numel() > 0 and call.keys > 0


def _known_stats(q: Tensor, k: Tensor, known: _KnownCall, fields: frozenset[str]) -> RowStats:
    """`measure` for tensors that differ from those of the known call in their contents alone."""
    shape = q.shape[:-1]
    rows = shape.numel()
    if known.plan is not None and rows % 4 == 0 and not (q.data_ptr() | k.data_ptr()) & 15:
        parts = torch.empty((4, *shape), dtype=torch.float32, device=q.device)
        with triton_launch.on_device(q):
            known.plan.run(q, k, parts.data_ptr(), 4 * rows)
        anchor, log_mass, shortfall, var = parts.unbind()
    else:
        found, known.plan = triton_launch.unmasked_parts(q, k, known.offset, known.scale, fields)
        anchor, log_mass, shortfall, var = found
    peak = anchor if "max" in fields else None
    more = {"max": peak, "var": var if "var" in fields else None}
    return RowStats.anchored(known.count, anchor, log_mass, shortfall, **more)
