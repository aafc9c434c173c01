"""`attention`: measure the rows, compute β from the policy, scale the query, call PyTorch's attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import reject, reject_type
from sharpmax.ops.kernels.sharpen import scale_rows, sharpen_op
from sharpmax.ops.kernels.tables import code_of, form_of
from sharpmax.policies.base import Policy
from sharpmax.policies.per_head import PerHead
from sharpmax.policies.registry import resolve_policy
from sharpmax.stats import triton_launch
from sharpmax.stats.call import Parts, Problem, as_autocast, as_beta, capped_beta, hidden_by
from sharpmax.stats.dispatch import Impl, check_impl, measure, measure_parts, problem_of
from sharpmax.stats.statistics import FIELDS, RowStats

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
    return q.ndim == 4 and q.dtype != torch.float64 and bool(q.numel()) and triton_launch.obstacle(problem) is None


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


_repeated: ContextVar[bool] = ContextVar("sharpmax.attention.repeated", default=False)


def is_repeated() -> bool:
    """Whether the stock kernel runs a second time for one call of `attention`: whoever counts calls skips it."""
    return _repeated.get()


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    policy: Policy | str | None = ...,
    impl: Impl = ...,
    return_stats: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    policy: Policy | str | None = ...,
    impl: Impl = ...,
    return_stats: Literal[True],
) -> tuple[Tensor, RowStats]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    policy: Policy | str | None = "paper",
    impl: Impl = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, RowStats]:
    """`torch.nn.functional.scaled_dot_product_attention` with a temperature per row, chosen by `policy`.

    q `[..., H, Lq, D]`, k `[..., Hkv, Lk, D]`, v `[..., Hkv, Lk, Dv]` give `[..., H, Lq, Dv]`. The arguments mean
    what they mean in the stock function, `is_causal` included: for Lq ≠ Lk it is aligned top-left there, so with a
    cache pass `attn_mask=torch.nn.attention.bias.causal_lower_right(Lq, Lk)`. `policy=None` is the stock function.

    `impl` chooses how rows are measured (see `row_stats`). With `return_stats` the statistics of the rows *before*
    sharpening come back too. A row without visible keys is 0; a key or value that a row does not see has no effect
    on it, NaN included (on CUDA that last part is the stock kernel's to keep).

    >>> import torch, sharpmax as sm
    >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
    >>> sm.attention(q, k, v, is_causal=True, policy="paper").shape
    torch.Size([1, 2, 16, 8])
    """
    chosen = resolve_policy(policy)
    check_impl(impl)
    q, k, v, attn_mask = as_autocast(q, k, v, attn_mask)
    problem = problem_of(q, k, attn_mask, "upper-left" if is_causal else None, scale, enable_gqa)
    check_values(q, k, v)
    _check_dropout(dropout_p)
    if type(attn_mask) is Tensor and attn_mask.dtype not in (torch.bool, q.dtype):
        reject_type("attn_mask", f"dtype {attn_mask.dtype}", f"bool or the dtype of q, {q.dtype}")

    # The stock kernel hides keys before it multiplies by the scale: with one of 0 or less, −inf becomes NaN or +inf.
    folded = problem.offset is not None and problem.scale <= 0.0 and not chosen.is_identity

    def stock(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            queries * problem.scale if folded else queries, keys, values, attn_mask=mask, dropout_p=dropout_p,
            is_causal=is_causal, scale=1.0 if folded else scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    fields = frozenset(FIELDS) if return_stats else chosen.needs | {"count"}
    if chosen.is_identity:
        out = stock(q, k, v, attn_mask)
        return (out, measure(problem, impl, fields)) if return_stats else out
    found = None if return_stats else _by_kernels(problem, q, (k, v, attn_mask), chosen, impl)
    if found is not None:
        queries, beta, count, stats = *found, None
    else:
        stats = measure(problem, impl, fields)
        beta = chosen.beta(stats, lambda b: measure(problem.scaled(b), impl, chosen.needs))
        beta, count, queries = as_beta(beta, q.dtype), stats.count, None
    if queries is None or _adds(attn_mask):
        beta = fitting_beta(q, attn_mask, beta)
        queries = scaled_queries(q, beta)
    mask = scaled_mask(attn_mask, beta)
    out = stock(queries, k, v, mask)
    if out.device.type == "cpu" and ops_for(out).concrete(out) and bool(out.isnan().any()):
        unseen_fixed = _without_broken_keys(problem, k, v)
        if unseen_fixed is not None:
            keys, values, spoilt = unseen_fixed
            again = _repeated.set(True)
            try:
                out = stock(queries, keys, values, mask).masked_fill(spoilt, torch.nan)
            finally:
                _repeated.reset(again)
    if attn_mask is not None and count is not None:
        out = out.masked_fill((count == 0)[..., None], 0.0)
    return out if stats is None or not return_stats else (out, stats)


def _by_kernels(
    problem: Problem, q: Tensor, others: tuple[Tensor | None, ...], policy: Policy, impl: str
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """β·q, β, and the counts where a mask makes them differ, in two launches; None where that cannot be."""
    if torch.compiler.is_compiling() or not (impl == "triton" or (impl == "auto" and q.is_cuda)):
        return None
    policies = by_head(policy)
    form, code = form_of(policies), code_of(policies)
    if form is None or code is None or form.solved:
        return None
    if (learns(q, *others) and not differentiates(problem.mask, form.smooth)) or not serves(problem, q):
        return None
    counts = None if problem.mask is None else problem.counts()
    queries, beta, parts = sharpened(problem, q, counts, sorted(form.needs), code)
    warn_now_and_then(policies, problem, parts)
    return queries, beta, counts


def check_values(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse values that do not go with the queries and keys: type, dtype, device and shape."""
    if not isinstance(v, Tensor):
        reject_type("v", type(v).__name__, "a torch.Tensor")
    if v.dtype != q.dtype:
        reject_type("v", f"dtype {v.dtype}", f"the dtype of q, {q.dtype}")
    if v.device != q.device:
        reject("v", f"device {v.device}", f"the device of q, {q.device}")
    if v.ndim != k.ndim or v.shape[:-1] != k.shape[:-1]:
        reject("v", f"shape {tuple(v.shape)}", f"the shape of k {tuple(k.shape)}, but for the last dimension")


def _check_dropout(dropout_p: float) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        reject_type("dropout_p", type(dropout_p).__name__, "a probability, 0 … 1")
    if not 0.0 <= dropout_p <= 1.0:
        reject("dropout_p", dropout_p, "a probability, 0 … 1")


def scaled_queries(q: Tensor, beta: Tensor) -> Tensor:
    """β·q in the dtype of q; β stops where the product would leave the dtype's range."""
    return scale_rows(q, beta)


def _adds(mask: Tensor | None) -> bool:
    """Whether a mask is added to the logits (torch's causal biases are not tensors of their own kind)."""
    return mask is not None and type(mask) is Tensor and mask.is_floating_point()


def fitting_beta(q: Tensor, mask: Tensor | None, beta: Tensor) -> Tensor:
    """β for both parts of the logits, stopped where β·q or β·mask would leave its dtype's range."""
    if mask is None or not _adds(mask) or not mask.shape[-1]:
        return beta
    # A quarter of the range: what lies below half of it would count as hidden.
    beta = capped_beta(mask.masked_fill(hidden_by(mask), 0.0), beta, share=0.25)
    return capped_beta(q, beta)


def scaled_mask(mask: Tensor | None, beta: Tensor) -> Tensor | None:
    """A float mask is part of the logit, so β multiplies it too; what hides a key stays as it is."""
    if mask is None or not _adds(mask):
        return mask
    hidden = hidden_by(mask)
    # Nothing but visibility needs no mask per head. On a GPU to look would mean to wait for it.
    if mask.device.type == "cpu" and ops_for(mask).concrete(mask) and bool((hidden | (mask == 0)).all()):
        return mask
    scaled = mask.masked_fill(hidden, 0.0) * beta[..., None]
    return torch.where(hidden, mask, scaled.to(mask.dtype))


def _without_broken_keys(problem: Problem, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys and values with those that are not finite set to 0, and the rows that see such a key; None without any."""
    broken = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    if not bool(broken.any()):
        return None
    spoilt = problem.rows_that_see(broken.reshape(problem.k.shape[:-1]))
    gone = broken[..., None]
    return k.masked_fill(gone, 0.0), v.masked_fill(gone, 0.0), spoilt.reshape(problem.rows)[..., None]
