"""`attention`, and the one place where β meets the query.

q, k → row statistics → policy: β per row → β·q → PyTorch's attention. A `Sharpener` does the middle for one layer.
`attention` and every integration use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import UnsupportedError, reject, reject_type
from sharpmax.ops.kernels import decode_launch
from sharpmax.ops.kernels.sharpen import (
    SharpenPlan,
    scale_features,
    scale_op,
    scale_rows,
    scales,
    sharpen_op,
    sharpened,
)
from sharpmax.ops.kernels.tables import Coefficients, form_of, table_of
from sharpmax.policies.base import WARNED, Policy, Remeasure, Warned
from sharpmax.policies.basic import (
    LEFT_ALONE,
    NO_OUTPUT,
    Constant,
    OutputScale,
    check_frequencies,
    query_factors,
    without_frequencies,
)
from sharpmax.policies.per_head import PerHead, of_head, side_by_side
from sharpmax.policies.registry import resolve_policy
from sharpmax.stats import triton_launch
from sharpmax.stats.call import (
    Alignment,
    AttentionCall,
    Logits,
    Parts,
    as_autocast,
    as_beta,
    autocasts,
    capped_beta,
    check_like,
    floats_at_least_32,
    hidden_by,
    largest_for,
    layout,
    remember,
    take_heads,
)
from sharpmax.stats.dispatch import (
    Impl,
    check_impl,
    is_known_kind,
    is_number,
    is_plain,
    measure,
    measure_parts,
    on_gpu,
)
from sharpmax.stats.statistics import FIELDS, RowStats

K = TypeVar("K")
T = TypeVar("T")

COUNT = frozenset({"count"})
"""What a mask alone tells of a row."""


class Rule(Protocol):
    """What decides β in some heads of one layer. Calibration trains rules; a policy is made of `PolicyRule`s."""

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads this rule speaks for, ascending; None for every head of the layer."""

    @property
    def needs(self) -> frozenset[str]:
        """The statistics `beta` reads; without any, β depends on the head alone and nothing is measured."""

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """β that broadcasts to `[..., heads, Lq]`.

        `stats` holds at least what `needs` names, in shapes that broadcast to `[..., heads, Lq]`, on the device of the
        queries; without needs it is one row of two keys, standing for any. `remeasure` (statistics at another β per
        row) comes with every need beyond the count.
        """


class PolicyRule:
    """Policies of one kind, one per head or one for all, as a `Rule`; their parameters are laid side by side once."""

    def __init__(self, policies: Sequence[Policy], heads: tuple[int, ...] | None, warned: Warned | None = None) -> None:
        alike = all(policy == policies[0] for policy in policies)
        self.policies = (policies[0],) if alike else tuple(policies)
        self.heads = heads
        self.warned = warned
        self.needs = self.policies[0].needs
        self._joined: dict[torch.device, Policy] = {}
        self._constant: dict[torch.device, Tensor] = {}

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """What the policies give for the rows; 1 for a row of fewer than two keys."""
        count = stats.count

        def find() -> Tensor:
            policy = self.policies[0]
            if len(self.policies) > 1:
                policy = _on_device(self._joined, count.device, lambda: self._side_by_side(count))
            self._warn_outside(policy, stats)
            beta: Tensor = policy.rule(ops_for(count), stats, remeasure)
            return beta.masked_fill(count <= 1, 1.0)

        return find() if self.needs else _on_device(self._constant, count.device, find)

    def _side_by_side(self, count: Tensor) -> Policy:
        xp = ops_for(count)
        joined = side_by_side(xp, self.policies, torch.empty(0, dtype=xp.widest, device=count.device))
        if joined is None:
            reject("policy", f"heads of different shapes: {self.policies}", "policies of one kind and shape")
        return joined

    def _warn_outside(self, policy: Policy, stats: RowStats) -> None:
        """In a model, rows outside the fitted range are reported where a prompt is read, not at every new token."""
        if not policy.reads or policy.fitted_range is None or (self.warned is not None and stats.count.shape[-1] == 1):
            return
        warned = WARNED if self.warned is None else self.warned
        if all(one in warned for one in self.policies):
            return
        values = getattr(stats, policy.reads)
        if ops_for(values).concrete(values) and bool(policy.outside(values, stats).any()):
            for place, one in enumerate(self.policies):
                one.warn_outside(stats if len(self.policies) == 1 else of_head(stats, place), self.warned)


_MANY = 1 << 20
"""Elements of a query whose scaling takes a GPU longer than the host."""


class QueryScale:
    """Factors that multiply the query: `[H, D]`, or 1 in place of H (all heads alike) or of D (one β per head)."""

    def __init__(self, factors: Sequence[Sequence[float]]) -> None:
        self._values = factors
        self._factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def factors(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The factors `[H, 1, D]`."""
        return _on_device(
            self._factors, (device, dtype), lambda: torch.tensor(self._values, dtype=dtype, device=device)[:, None]
        )

    def __call__(self, query: Tensor) -> Tensor:
        """The query `[..., H, Lq, D]` times the factors, rounded once to its dtype.

        A row of float16 is multiplied by less where its product would leave the range.
        """
        dtype = floats_at_least_32(query.dtype)
        factors = self.factors(query.device, dtype)
        check_frequencies(factors.shape[-1], query.shape[-1])
        if query.dtype == torch.float16:
            product = query * factors
            room = largest_for(query.dtype) / product.detach().abs().amax(-1, keepdim=True)
            return (product * room.clamp(max=1.0)).to(query.dtype)
        if query.dtype != dtype and is_plain(query, factors):
            # PyTorch's product of two dtypes is several times slower than memory, but quick to launch.
            if query.is_cuda and query.numel() >= _MANY and scales(query):
                return scale_features(query, factors)
            return torch.mul(query, factors, out=torch.empty_like(query))
        return (query * factors).to(query.dtype)


def _on_device(kept: dict[K, T], device: K, make: Callable[[], T]) -> T:
    """What is made once per device, outside of any mode that would keep it from being used again."""
    if torch.compiler.is_compiling():
        return kept[device] if device in kept else make()
    if torch._C._len_torch_dispatch_stack():  # what is made in a mode (of fake tensors, say) is good there alone
        return make()
    if device not in kept:
        with torch.inference_mode(False):
            kept[device] = make()
    return kept[device]


def policies_of(policy: Policy, layer: int = 0) -> tuple[Policy, ...]:
    """The policy of all heads of a layer, or one per head."""
    return policy.policies[layer] if isinstance(policy, PerHead) else (policy,)


def rules_of(policies: Sequence[Policy], warned: Warned | None = None) -> tuple[Rule | QueryScale, ...]:
    """The rules of one layer; none where the policies leave all of it alone. `warned` is shared by those of a model."""
    if all(one.is_identity for one in policies):
        return ()
    if any(isinstance(one, OutputScale) for one in policies):
        raise UnsupportedError(NO_OUTPUT)
    factors = query_factors(policies)
    if factors is not None:
        return (QueryScale(factors), *rules_of(without_frequencies(policies), warned))
    if len(policies) == 1:
        return (PolicyRule(policies, None, warned),)
    groups: dict[Any, list[int]] = {}
    # Where every head is constant, those left alone are constants of 1: one product then serves the whole layer.
    whole = len({type(one) for one in policies}) == 1 and not any(one.needs for one in policies)
    for head, one in enumerate(policies):
        if whole or not one.is_identity:
            groups.setdefault(_shape_of(one), []).append(head)
    return tuple(
        PolicyRule([policies[h] for h in group], None if len(group) == len(policies) else tuple(group), warned)
        for group in groups.values()
    )


def _shape_of(policy: Policy) -> tuple[Any, ...]:
    """What two policies must share to be computed together: their kind, what they read, everything but numbers."""
    values = (getattr(policy, field.name) for field in dataclasses.fields(policy))
    return (
        type(policy),
        policy.needs,
        *(float if isinstance(value, float) else len(value) if isinstance(value, tuple) else value for value in values),
    )


class Sharpener:
    """The rules of one layer: β of every row, β·q, and the mask that goes with it."""

    def __init__(self, rules: Sequence[Rule | QueryScale], heads: int = 1) -> None:
        self.query_scale = next((rule for rule in rules if isinstance(rule, QueryScale)), None)
        """What multiplies the query first, if anything does."""

        self.rules: tuple[Rule, ...] = tuple(rule for rule in rules if not isinstance(rule, QueryScale))
        self.heads = heads
        self.policies = _head_policies(self.rules, heads)
        """The policy of all heads, or one per head; empty where a rule is not made of policies."""

        # While compiling, policies are traced instead: their numbers may be variables then.
        self.form = None if torch.compiler.is_compiling() or not self.policies else form_of(self.policies)
        """The policies as numbers that a kernel reads, if they are of kinds that kernels know."""

        values = [one.value for one in self.policies if type(one) is Constant]
        usual = bool(values) and len(values) == len(self.policies) and all(0.0 < one < _MOST_CONSTANT for one in values)
        self.by_constants = QueryScale([[one] for one in values]) if usual else None
        """β·q `[..., H, Lq, D]` where β is known beforehand and far from the limits of any dtype but float16."""

        self.uniform = values[0] if usual and len(set(values)) == 1 else None
        """The β of all rows, where there is just one: it multiplies the scale of the logits as well as the query."""

        self._places: list[dict[torch.device, Tensor]] = [{} for _ in self.rules]
        self._tables: dict[torch.device, Coefficients] = {}
        self._looked: set[int] = set()
        warned = next((rule.warned for rule in self.rules if isinstance(rule, PolicyRule)), None)
        self._warned = WARNED if warned is None else warned

    @property
    def measures(self) -> bool:
        """Whether a rule needs more of a row than its mask tells."""
        return any(rule.needs - COUNT for rule in self.rules)

    def prepare(self, device: torch.device) -> None:
        """Put what kernels read on a device: neither a compiler nor the capture of a CUDA graph can do it."""
        if self.form is not None:
            table_of(self.policies, device)
        for scale in (self.query_scale, None if self.uniform else self.by_constants):
            if type(scale) is QueryScale:
                scale.factors(device, torch.float32)

    def beta(self, rows: AttentionCall | Logits, impl: str = "auto", stats: RowStats | None = None) -> Tensor:
        """β of every row, broadcasting to the shape of the rows, in the dtype of statistics.

        `stats` are those of all rows, where they were measured before.
        """
        like = rows.values if isinstance(rows, Logits) else rows.q
        if len(self.rules) == 1 and self.rules[0].heads is None:
            return as_beta(_rule_beta(self.rules[0], rows, impl, stats), like.dtype)
        batch, queries = like.shape[0], like.shape[-2]
        if stats is not None:
            stats = stats.map(lambda x: x.reshape(batch, self.heads, queries))
        beta = like.new_ones((batch, self.heads, queries), dtype=floats_at_least_32(like.dtype))
        for rule, places in zip(self.rules, self._places, strict=True):
            heads = rule.heads or range(self.heads)
            place = _on_device(places, like.device, functools.partial(torch.tensor, heads, device=like.device))
            chosen = None if stats is None else stats.map(functools.partial(take_heads, heads=place))
            part = as_beta(_rule_beta(rule, rows.of_heads(place), impl, chosen), like.dtype)
            beta = beta.index_copy(1, place, part.expand(batch, len(heads), queries))
        return beta.reshape(rows.rows)

    def sharpen(
        self, call: AttentionCall, query: Tensor, mask: Tensor | None, impl: str = "auto", stats: RowStats | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """β·q for the caller's query `[..., H, Lq, D]`, and the mask whose floats are scaled alike."""
        if self.by_constants is not None and query.ndim >= 3 and not _adds(mask):
            return self.by_constants(query), mask
        found = None if stats is not None else self._by_kernels(call, query, impl)
        if found is not None and not _adds(mask):
            return found[0], mask
        beta = self.beta(call, impl, stats) if found is None else found[1]
        beta = fitting_beta(query, mask, beta)
        return scaled_queries(query, beta), scaled_mask(mask, beta)

    def _by_kernels(self, call: AttentionCall, query: Tensor, impl: str) -> tuple[Tensor, Tensor] | None:
        """β·q and β in two launches: statistics, then β and the product; None where that cannot be."""
        form = self.form
        if form is None or not (impl == "triton" or (impl == "auto" and on_gpu(query))) or form.solved:
            return None
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        if query.ndim != 4 or query.dtype == torch.float64 or not query.numel() or triton_launch.obstacle(call):
            return None
        table = table_of(self.policies, query.device)
        if table is None:
            return None
        smooth = form.smooth and (call.mask is None or call.mask.dtype == torch.bool)
        if learns(query, call.k, call.mask) and not smooth:
            return None
        counts = None if call.mask is None and call.spans is None else call.counts()
        parts = measure_parts(call, "triton", form.needs) if form.needs - COUNT else None
        rows = (None, None, None) if parts is None else parts[1:]
        run: Callable[..., tuple[Any, ...]] = sharpened if is_plain(query, call.k, call.mask) else sharpen_op
        scaled, beta, *_ = run(query, *rows, counts, call.keys, call.offset, *table)
        if not torch.compiler.is_compiling():
            self._warn_now_and_then(call, parts)
        return scaled, beta

    def known(self, query: Tensor, key: Tensor, offset: int | None, scale: float) -> Tensor | None:
        """β·q for q `[B, H, Lq, D]` and k `[B, Hkv, Lk, D]` without a mask, at the least cost to the host.

        None where `sharpen` has more to do: an operator, or to look whether rows lie outside the range of a policy. No
        shape is checked.
        """
        found = self.plan(query, key, offset, scale) if is_plain(query, key) else None
        if found is None:
            return None
        place, table, plan = found
        if plan is not None:
            return plan(query, key, table.values)
        keys, needs = key.shape[2], place[4]
        if query.dtype == torch.float64 or not keys or not scales(query) or query.shape[-1] > triton_launch.WIDEST:
            return None
        if key.shape[0] != query.shape[0]:
            return None
        log_mass = shortfall = var = parts = None
        if measured := bool(needs - COUNT):
            (_, log_mass, shortfall, var), parts = triton_launch.unmasked_parts(query, key, offset, scale, needs)
        out, _, last = sharpened(query, log_mass, shortfall, var, None, keys, offset, *table)
        if last is not None and measured == (parts is not None):
            remember(_plans, place, SharpenPlan(parts, last, triton_launch.padded(4 * query.shape[:-1].numel())))
        return out

    def plan(
        self, query: Tensor, key: Tensor, offset: int | None, scale: float
    ) -> tuple[tuple[Any, ...], Coefficients, SharpenPlan | None] | None:
        """Where the launches of `known` are kept, its coefficients, and the launches if a call has made them.

        Layers share launches. None if β has no closed form, or if rows of so many keys are to be looked at.
        """
        form, bits, device = self.form, key.shape[2].bit_length(), query.device
        if form is None or form.solved or not (bits in self._looked or self._has_looked(bits)):
            return None
        table = self._known_table(device)
        if table is None:
            return None
        place = (layout(query), layout(key), offset, scale, form.needs, table.values.shape, *table.shape)
        return place, table, _plans.get(place)

    def _known_table(self, device: torch.device) -> Coefficients | None:
        """The coefficients on a device, outside of compilers and modes."""
        found = self._tables.get(device)
        if found is None and (found := table_of(self.policies, device)) is not None:
            self._tables[device] = found
        return found

    def _has_looked(self, bits: int) -> bool:
        """Whether rows of so many keys, as a power of 2, need not be looked at any more: see `_warn_now_and_then`."""
        if any(one.fitted_range is not None and (one, bits) not in self._warned for one in self.policies):
            return False
        self._looked.add(bits)
        return True

    def _warn_now_and_then(self, call: AttentionCall, parts: Parts | None) -> None:
        """Warn of rows outside the range of a policy, looking once for every doubling of the number of keys.

        To look means to wait for the device, which not every call can afford; and it is length that takes rows outside.
        """
        for head, policy in enumerate(self.policies):
            place = (policy, call.keys.bit_length())
            if policy.fitted_range is None or place in self._warned:
                continue
            if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
                return
            self._warned.add(place)
            rows = [None] * 4 if parts is None else [part.reshape(call.rows) for part in parts]
            stats = RowStats.anchored(call.counts(), *rows[:3])
            policy.warn_outside(stats if len(self.policies) == 1 else of_head(stats, head), self._warned)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor | None:
        """Attention of a few queries `[B, H, Lq, D]` to keys and values that are read once; None where that cannot be.

        A missing mask hides nothing, however few queries there are: encoders and cross-attention have few of them too.
        """
        if self.form is None or not on_gpu(query) or query.shape[2] > MOST_QUERIES:
            return None
        plain = is_plain(query, key, value, mask)
        if decode_launch.obstacle(query, value) is not None or (not plain and learns(query, key, value, mask)):
            return None
        table = self._known_table(query.device) if plain else table_of(self.policies, query.device)
        if table is None:
            return None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        run = decode_launch.decode if plain else decode_launch.decode_op
        found: list[Tensor] = run(query, key, value, None, None, mask, scale, *table, False, causal=False)
        return found[0]


_MOST_CONSTANT = 1e4

MOST_QUERIES = 8
"""The most new tokens per sequence that the decode kernels take; more of them are a prompt."""

_plans: dict[Any, SharpenPlan] = {}


def _rule_beta(rule: Rule, rows: AttentionCall | Logits, impl: str, stats: RowStats | None) -> Tensor:
    """What a rule gives for rows, of which no more is measured than it needs."""
    needs = rule.needs
    if not needs:
        return rule.beta(_any_row((rows.values if isinstance(rows, Logits) else rows.q).device), None)
    if isinstance(rows, Logits):
        return rule.beta(rows.measure(needs), functools.partial(rows.measure, needs))
    if needs <= COUNT:
        return rule.beta(RowStats.anchored(rows.counts()), None)
    stats = measure(rows, impl, needs) if stats is None else stats
    return rule.beta(stats, lambda beta: measure(rows.scaled(beta), impl, needs))


def _any_row(device: torch.device) -> RowStats:
    """One row of two keys, for rules that read nothing of it."""
    make = functools.partial(torch.full, (1, 1), 2, dtype=torch.int64, device=device)
    return RowStats.anchored(_on_device(_two_keys, device, make))


_two_keys: dict[torch.device, Tensor] = {}


def _head_policies(rules: Sequence[Rule], heads: int) -> tuple[Policy, ...]:
    """The policies behind the rules of a layer: one for all heads, or one per head."""
    known = [rule for rule in rules if isinstance(rule, PolicyRule)]
    if not known or len(known) < len(rules):
        return ()
    policies: list[Policy] = [LEFT_ALONE] * heads
    for rule in known:
        if rule.heads is None and len(rule.policies) == 1:
            return rule.policies
        for place, head in enumerate(rule.heads or range(heads)):
            policies[head] = rule.policies[min(place, len(rule.policies) - 1)]
    return tuple(policies)


_sharpeners: dict[tuple[int, ...], tuple[tuple[Policy, ...], Sharpener]] = {}
_FEW = 512


def sharpener_for(policies: tuple[Policy, ...]) -> Sharpener:
    """The sharpener of one policy for all heads, or of one per head; made once for the same objects."""
    if torch.compiler.is_compiling():
        return Sharpener(rules_of(policies), len(policies))
    key = tuple(map(id, policies))
    if key not in _sharpeners:
        if len(_sharpeners) >= _FEW:
            _sharpeners.clear()
        # The policies are kept with what was made of them: as long as they exist, nothing else has their id.
        _sharpeners[key] = policies, Sharpener(rules_of(policies), len(policies))
    return _sharpeners[key][1]


def learns(*inputs: Tensor | None) -> bool:
    """Whether a gradient into one of these is wanted."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def scaled_queries(q: Tensor, beta: Tensor) -> Tensor:
    """β·q in the dtype of q; β stops where the product would leave the dtype's range. One launch on CUDA."""
    if q.is_cuda and torch._C._functorch.peek_interpreter_stack() is None and scales(q):
        beta = as_beta(beta, q.dtype).expand(q.shape[:-1])
        return scale_rows(q, beta) if is_plain(q, beta) else scale_op(q, beta)
    return (q * capped_beta(q, beta)[..., None]).to(q.dtype)


def _adds(mask: Tensor | None) -> bool:
    """Whether a mask is added to the logits (PyTorch's causal biases are not tensors of their own kind)."""
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
    # What only hides keys needs no mask per head. On a GPU to look would mean to wait for it.
    if mask.device.type == "cpu" and ops_for(mask).concrete(mask) and bool((hidden | (mask == 0)).all()):
        return mask
    scaled = mask.masked_fill(hidden, 0.0) * beta[..., None]
    return torch.where(hidden, mask, scaled.to(mask.dtype))


_repeated: ContextVar[bool] = ContextVar("sharpmax.attention.repeated", default=False)


def is_repeated() -> bool:
    """Whether PyTorch's kernel runs a second time for one call of `attention`: whoever counts calls skips it."""
    return _repeated.get()


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., *, scale: float | None = ..., enable_gqa: bool = ..., policy: Policy | str | None = ...,
    impl: Impl = ..., return_stats: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = ..., dropout_p: float = ...,
    is_causal: bool = ..., *, scale: float | None = ..., enable_gqa: bool = ..., policy: Policy | str | None = ...,
    impl: Impl = ..., return_stats: Literal[True],
) -> tuple[Tensor, RowStats]: ...  # fmt: skip
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    policy: Policy | str | None = None,
    impl: Impl = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, RowStats]:
    """`torch.nn.functional.scaled_dot_product_attention` with a temperature per row, chosen by `policy`.

    query `[..., H, Lq, D]`, key `[..., Hkv, Lk, D]`, value `[..., Hkv, Lk, Dv]` give `[..., H, Lq, Dv]`. Arguments have
    the positions, names and meanings of PyTorch's function. `is_causal` is aligned top-left there, so for Lq ≠ Lk (a
    cache) pass `attn_mask=torch.nn.attention.bias.causal_lower_right(Lq, Lk)`. `policy=None` is PyTorch's function.

    `impl` chooses how rows are measured (see `row_stats`). With `return_stats` the statistics of the rows *before*
    sharpening come back too. A row without visible keys is 0; a key or value that a row does not see has no effect
    on it, NaN included (on CUDA that last part is up to PyTorch's kernel).

    >>> import torch, sharpmax as sm
    >>> q, k, v = torch.randn(3, 1, 2, 16, 8).unbind()
    >>> sm.attention(q, k, v, is_causal=True, policy="paper").shape
    torch.Size([1, 2, 16, 8])
    """
    resolved = policy if isinstance(policy, Policy) else resolve_policy(policy)
    known = None
    usual = attn_mask is None and not return_stats and impl == "auto" and type(dropout_p) is float and is_number(scale)
    if usual and is_plain(query, key, value) and on_gpu(query) and not autocasts(query.device.type):
        known = (
            id(resolved), layout(query), layout(key), layout(value), is_causal, dropout_p, scale, enable_gqa
        )  # fmt: skip
        earlier = _known.get(known)
        if earlier is not None and (sharper := earlier.sharpen(query, key)) is not None:
            return F.scaled_dot_product_attention(sharper, key, value, **earlier.options)
    check_impl(impl)
    query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
    causal: Alignment | None = "upper-left" if is_causal else None
    call = AttentionCall.of(query, key, attn_mask, causal=causal, scale=scale, enable_gqa=enable_gqa)
    check_values(query, key, value)
    _check_dropout(dropout_p)
    _check_heads(resolved, call)
    if type(attn_mask) is Tensor:
        check_mask_dtype(attn_mask, query)
    sharpener = sharpener_for(policies_of(resolved))
    # PyTorch's kernel hides keys before it multiplies by the scale: with one of 0 or less, −inf becomes NaN or +inf.
    folded = call.offset is not None and call.scale <= 0.0 and bool(sharpener.rules)
    uniform = sharpener.uniform if sharpener.rules and call.scale > 0.0 and not _adds(attn_mask) else None
    used = 1.0 if folded else scale if uniform is None else uniform * call.scale

    options: dict[str, Any] = {
        "dropout_p": dropout_p, "is_causal": is_causal, "scale": used, "enable_gqa": enable_gqa
    }  # fmt: skip

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        query = query * call.scale if folded else query
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)

    if sharpener.query_scale is not None:
        query = sharpener.query_scale(query)
        call = AttentionCall.of(query, key, attn_mask, causal=causal, scale=scale, enable_gqa=enable_gqa)
    stats = measure(call, impl, frozenset(FIELDS)) if return_stats else None
    if known is not None and is_known_kind(call) and not folded:
        remember(_known, known, _KnownAttention(resolved, sharpener, call.offset, call.scale, options))
    mask = attn_mask
    if sharpener.rules and uniform is None:
        query, mask = sharpener.sharpen(call, query, attn_mask, impl, stats)
    out = attend(query, key, value, mask)
    if sharpener.rules:
        finite = None
        if out.device.type == "cpu" and ops_for(out).concrete(out) and bool(out.isnan().any()):
            finite = _without_invalid_keys(call, key, value)
        if finite is not None:
            keys, values, invalid = finite
            again = _repeated.set(True)
            try:
                out = attend(query, keys, values, mask).masked_fill(invalid, torch.nan)
            finally:
                _repeated.reset(again)
        if attn_mask is not None:
            out = out.masked_fill((call.counts() == 0)[..., None], 0.0)
    return out if stats is None else (out, stats)


@dataclasses.dataclass
class _KnownAttention:
    """A call that was checked before; the policy is kept so that nothing else gets its id."""

    policy: Policy
    sharpener: Sharpener
    offset: int | None
    scale: float
    options: dict[str, Any]
    """What PyTorch's function gets besides tensors."""

    plan: SharpenPlan | None = None
    table: Tensor | None = None

    def sharpen(self, q: Tensor, k: Tensor) -> Tensor | None:
        """β·q of tensors that differ from those of the earlier call in their contents alone; None: not known yet."""
        if self.plan is not None and self.table is not None:
            return self.plan(q, k, self.table)
        sharpener = self.sharpener
        if sharpener.query_scale is not None:
            q = sharpener.query_scale(q)
        if not sharpener.rules or sharpener.uniform is not None:
            return q
        if sharpener.by_constants is not None:
            return sharpener.by_constants(q)
        found = sharpener.plan(q, k, self.offset, self.scale) if sharpener.query_scale is None else None
        if found is not None:
            self.table, self.plan = found[1].values, found[2]
        return sharpener.known(q, k, self.offset, self.scale)


_known: dict[Any, _KnownAttention] = {}


def _check_heads(policy: Policy, call: AttentionCall) -> None:
    if not isinstance(policy, PerHead):
        return
    if policy.layers != 1:
        reject("policy", policy.describe(), "the policy of one layer", "choose it with policy.for_layer(index)")
    if len(call.rows) < 2 or call.heads != policy.heads:
        given = f"{policy.heads} heads for rows of shape {call.rows}"
        reject("policy", given, "rows [..., H, Lq] with as many heads")


def check_values(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse values that do not go with the queries and keys: type, dtype, device and shape."""
    check_like(value, query, "v", "q")
    if value.ndim != key.ndim or value.shape[:-1] != key.shape[:-1]:
        reject("v", f"shape {tuple(value.shape)}", f"the shape of k {tuple(key.shape)}, but for the last dimension")


def check_mask_dtype(mask: Tensor, query: Tensor) -> None:
    """Refuse a mask that PyTorch's function would not take."""
    if mask.dtype not in (torch.bool, query.dtype):
        reject_type("attn_mask", f"dtype {mask.dtype}", f"bool or the dtype of q, {query.dtype}")


def _check_dropout(dropout_p: float) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        reject_type("dropout_p", type(dropout_p).__name__, "a probability, 0 … 1")
    if not 0.0 <= dropout_p <= 1.0:
        reject("dropout_p", dropout_p, "a probability, 0 … 1")


def _without_invalid_keys(call: AttentionCall, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Keys and values with those that are not finite set to 0, and the rows that see such a key; None without any."""
    invalid = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
    if not bool(invalid.any()):
        return None
    rows = call.rows_that_see(invalid.reshape(call.k.shape[:-1])).reshape(call.rows)
    return key.masked_fill(invalid[..., None], 0.0), value.masked_fill(invalid[..., None], 0.0), rows[..., None]
