"""`row_stats`: choose an implementation and run it, as one differentiable torch operator where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import UnsupportedError, reject, reject_type
from sharpmax.stats import sdpa, triton_launch
from sharpmax.stats.call import Alignment, AttentionCall, Parts, floats_at_least_32, layout, remember
from sharpmax.stats.reference import reference_stats
from sharpmax.stats.sdpa import LostDigitsError, quick_parts, wide_parts
from sharpmax.stats.statistics import FIELDS, RowStats
from sharpmax.stats.streaming import Incoming, streaming_backward, streaming_parts
from sharpmax.stats.triton_launch import backward_obstacle, triton_backward, triton_parts

IMPLEMENTATIONS: dict[str, Callable[[AttentionCall, frozenset[str]], Parts]] = {
    "streaming": lambda call, fields: streaming_parts(call),
    "sdpa": lambda call, fields: quick_parts(call),
    "triton": triton_parts,
}


def measure_parts(call: AttentionCall, impl: str, fields: frozenset[str]) -> Parts:
    """The parts of every row; gradients flow into q, k and a float mask, not into the gain.

    Without `max` in `fields` the anchor may be another number than the maximum, and without `var` that part may be 0.
    `impl` is one of `IMPLEMENTATIONS`, or "auto": "sdpa" where that is exact enough, else "streaming".
    """
    if is_plain(call.q, call.k, call.mask):
        return _parts(call, impl, fields & {"max", "var"})
    gain = None if call.gain is None else call.gain.detach()
    inputs = (call.q, call.k, call.mask, gain, call.spans, call.offset, call.scale, impl)
    return Parts(*_row_parts(*inputs, "max" in fields, "var" in fields))


def on_gpu(x: Tensor) -> bool:
    """Whether kernels are the fast way for x."""
    return x.is_cuda


def is_number(scale: object) -> bool:
    """Whether a scale can be part of a key; what else was given is refused by a check."""
    return scale is None or type(scale) in (int, float)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nothing differentiates, transforms, traces or compiles a call: then it needs no operator."""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch._C._len_torch_dispatch_stack():
        return False
    learning = torch.is_grad_enabled()
    for x in tensors:  # noqa: SIM110 (a generator would take longer than all the rest)
        if x is not None and (type(x) is not Tensor or (learning and x.requires_grad)):
            return False
    return True


def _parts(call: AttentionCall, impl: str, fields: frozenset[str]) -> Parts:
    if call.q.numel() == 0 or call.keys == 0:
        anchor = torch.full(call.q.shape[:-1], -torch.inf, dtype=floats_at_least_32(call.q.dtype), device=call.q.device)
        return Parts(anchor, torch.zeros_like(anchor), torch.zeros_like(anchor), torch.zeros_like(anchor))
    try:
        return IMPLEMENTATIONS["sdpa" if impl == "auto" else impl](call, fields)
    except LostDigitsError:
        return streaming_parts(call) if impl == "auto" else wide_parts(call)


@torch.library.custom_op("sharpmax::row_parts", mutates_args=())
def _row_parts(
    q: Tensor, k: Tensor, mask: Tensor | None, gain: Tensor | None, spans: Tensor | None, offset: int | None,
    scale: float, impl: str, with_max: bool, with_var: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    call = AttentionCall(q, k, mask, offset, scale, tuple(q.shape[:-1]), gain, spans)
    fields = frozenset({"max"} if with_max else ()) | frozenset({"var"} if with_var else ())
    # A compiler has been promised this layout, whatever an implementation finds convenient.
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
    """A gradient in the layout of `empty_like(x)`, which is what a compiler has been promised."""
    wanted = torch.empty_like(x, device="meta").stride()
    return gradient if gradient.stride() == wanted else torch.empty_like(x).copy_(gradient)


@_row_parts_backward.register_fake
def _(q: Tensor, k: Tensor, mask: Any, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    into_mask = rest[-1]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(mask) if into_mask else q.new_empty(0)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, mask, gain, spans, ctx.offset, ctx.scale, ctx.impl, _, ctx.with_var = inputs
    ctx.save_for_backward(q, k, mask, gain, spans, *output)
    if not torch.compiler.is_compiling():  # the compiler knows zeros only
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


Impl = Literal["auto", "reference", "streaming", "sdpa", "triton"]
IMPLS: tuple[str, ...] = ("auto", "reference", "streaming", "sdpa", "triton")

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
    a float mask is added. With `window` (causal only) a row sees at most so many keys, up to its own place. With
    `cu_seqlens` several sequences lie one after the other along Lq, number s from cu_seqlens[s] to cu_seqlens[s + 1],
    and along Lk as `cu_seqlens_k` says (default: the same way); each row sees its own sequence.

    `impl` names an implementation, and is never replaced by another: `reference` (dense, float64), `streaming` (any
    device), `sdpa` (CPU; count, lse, mean and entropy only) or `triton` (CUDA); `auto` takes the fastest that
    measures `fields`. Inside `torch.func` rows are measured densely, as `reference` does.

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


@dataclass
class _KnownCall:
    """What was found out about a call that was checked before, and the launches for it once they are known."""

    offset: int | None
    scale: float
    count: Tensor
    plan: triton_launch.PartsPlan | None = None


_known: dict[Any, _KnownCall] = {}


def is_known_kind(call: AttentionCall) -> bool:
    """Whether calls like this one can go to the kernels unchecked from now on: see `unmasked_parts`."""
    return len(call.rows) == 3 and call.q.dtype != torch.float64 and call.q.numel() > 0 and call.keys > 0


def _known_stats(q: Tensor, k: Tensor, known: _KnownCall, fields: frozenset[str]) -> RowStats:
    """`measure` of a call that differs from an earlier one in the contents of q and k alone."""
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


def measure(call: AttentionCall, impl: str, fields: frozenset[str]) -> RowStats:
    """Measure at least `fields` with the implementation asked for; `auto` chooses by device and fields."""
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
    obstacle = {"sdpa": sdpa.obstacle, "triton": triton_launch.obstacle}.get(impl)
    if obstacle is not None and (reason := obstacle(call)):
        raise UnsupportedError(f"impl: {impl!r} cannot do this: {reason}; use impl='streaming'")
    measured = fields if impl == "triton" else fields | {"max", "var"}  # the others measure them on the way
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
    if fields <= sdpa.FIELDS and sdpa.obstacle(call) is None:
        return "sdpa"
    return "streaming"


torch.utils._pytree.register_pytree_node(
    RowStats,
    RowStats.flatten,
    lambda arrays, measured: RowStats.unflatten(measured, arrays),
    serialized_type_name="sharpmax.RowStats",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)


def window_spans(spans: Tensor | None, window: int, queries: int, offset: int, device: torch.device) -> Tensor:
    """Spans `[B or 1, 2, Lq]` that keep the `window` last keys of each row, up to its own place i + offset."""
    if isinstance(window, bool) or not isinstance(window, int):
        reject_type("window", type(window).__name__, "an integer number of keys, 1 or more")
    if window < 1:
        reject("window", window, "1 or more keys")
    if spans is None:
        last = torch.arange(queries, device=device, dtype=torch.int32) + offset
        spans = torch.stack((torch.zeros_like(last), last + 1))[None]
    low, high = spans.unbind(1)
    return torch.stack((torch.maximum(low, high - window), high), dim=1)


def packed_spans(
    cu_queries: Tensor, cu_keys: Tensor | None, queries: int, keys: int, causal: bool, device: torch.device
) -> Tensor:
    """Spans of sequences that lie one after the other: number s has the rows from cu_queries[s] to cu_queries[s + 1].

    Its keys lie the same way in `cu_keys` (None: as the rows do). Causal limits are aligned to the last row and the
    last key of each sequence. Rows after the last sequence see nothing.
    """
    cu_keys = cu_queries if cu_keys is None else cu_keys
    for name, starts, length in (("cu_seqlens", cu_queries, queries), ("cu_seqlens_k", cu_keys, keys)):
        _check_starts(name, starts, length, device)
    if cu_keys.shape != cu_queries.shape:
        reject("cu_seqlens_k", f"{len(cu_keys)} starts", f"{len(cu_queries)}, as many as cu_seqlens has")
    row = torch.arange(queries, device=device)
    sequence = torch.searchsorted(cu_queries.long(), row, right=True) - 1
    outside = (sequence < 0) | (sequence >= len(cu_queries) - 1)
    sequence = sequence.clamp(0, len(cu_queries) - 2)
    low, high = cu_keys[sequence], cu_keys[sequence + 1]
    if causal:
        high = torch.minimum(high, high - cu_queries[sequence + 1] + row + 1)
    return torch.stack((low, torch.where(outside, low, torch.maximum(high, low)))).to(torch.int32)[None]


def _check_starts(name: str, starts: object, length: int, device: torch.device) -> None:
    if not isinstance(starts, Tensor):
        reject_type(name, type(starts).__name__, "a tensor of integers: where each sequence starts, and the end")
    if starts.dtype not in (torch.int32, torch.int64):
        reject_type(name, f"dtype {starts.dtype}", "int32 or int64")
    if starts.ndim != 1 or len(starts) < 2:
        reject(name, f"shape {tuple(starts.shape)}", "one dimension of two or more numbers, from 0 to the length")
    if starts.device != device:
        reject(name, f"device {starts.device}", f"the device of q, {device}")
    # On a GPU a look at the numbers would wait for everything before it.
    if starts.device.type == "cpu" and ops_for(starts).concrete(starts):
        ascending = bool((starts[1:] >= starts[:-1]).all())
        if not ascending or int(starts[0]) < 0 or int(starts[-1]) > length:
            reject(name, starts.tolist(), f"ascending numbers from 0 to at most {length}")
