"""Where β meets the query.

    q, k → row statistics → rules: β per row → β·q, and the mask that goes with it

A `Sharpener` does this for one layer. `sm.attention`, `sm.decode` and every integration use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sharpmax.arrays import ops_for
from sharpmax.errors import UnsupportedError
from sharpmax.ops.kernels import decode_launch
from sharpmax.ops.kernels.sharpen_launch import (
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
    IDENTITY,
    NO_OUTPUT,
    Constant,
    OutputScale,
    check_frequencies,
    query_factors,
    without_frequencies,
)
from sharpmax.policies.per_head import PerHead, of_head, stack_heads
from sharpmax.stats import triton_launch
from sharpmax.stats.call import (
    AttentionCall,
    Logits,
    Parts,
    as_beta,
    capped_beta,
    floats_at_least_32,
    hidden_by,
    largest_for,
    layout,
    remember,
    take_heads,
)
from sharpmax.stats.dispatch import is_plain, measure, measure_parts, on_gpu
from sharpmax.stats.statistics import RowStats

K = TypeVar("K")
T = TypeVar("T")

COUNT = frozenset({"count"})
"""The statistic that follows from the mask alone, without logits."""

MOST_QUERIES = 8
"""The most new tokens per sequence that the decode kernels take. A call with more is a prompt."""

_LARGE_QUERY = 1 << 20
"""Elements of a query from which scaling takes a GPU longer than it takes the host to launch it."""

_LARGEST_CONSTANT = 1e4
"""Constants below this stay within the range of every dtype but float16 without a cap."""


class Rule(Protocol):
    """What decides β in some heads of one layer. Policies become `PolicyRule`s; calibration trains rules of its own."""

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads this rule decides, ascending; None for every head of the layer."""

    @property
    def needs(self) -> frozenset[str]:
        """The statistics `beta` reads. If empty, β depends on the head alone and nothing is measured."""

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """β that broadcasts to `[..., heads, Lq]`.

        `stats` holds at least what `needs` names, in shapes that broadcast to `[..., heads, Lq]`, on the device of the
        queries. Without needs it is a single row of two keys. `remeasure` gives statistics at another β per row; it is
        None if nothing beyond the count is needed.
        """


class PolicyRule:
    """Policies of one kind as a `Rule`: one for all its heads, or one per head, computed together."""

    def __init__(self, policies: Sequence[Policy], heads: tuple[int, ...] | None, warned: Warned | None = None) -> None:
        alike = all(policy == policies[0] for policy in policies)
        self.policies = (policies[0],) if alike else tuple(policies)
        self.heads = heads
        self.warned = warned
        self.needs = self.policies[0].needs
        self._has_range = bool(self.policies[0].reads) and self.policies[0].fitted_range is not None
        self._stacked: dict[torch.device, Policy] = {}
        self._constant: dict[torch.device, Tensor] = {}

    def beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        """β of the rows; 1 for a row of fewer than two keys."""
        if self.needs:
            return self._beta(stats, remeasure)
        return _cached(self._constant, stats.count.device, lambda: self._beta(stats, None))

    def _beta(self, stats: RowStats, remeasure: Remeasure | None) -> Tensor:
        count, policy = stats.count, self.policies[0]
        xp = ops_for(count)
        if len(self.policies) > 1:
            policy = _cached(self._stacked, count.device, lambda: self._stack(count))
        self._warn_outside(policy, stats)
        beta: Tensor = policy.rule(xp, stats, remeasure)
        return beta.masked_fill(count <= 1, 1.0)

    def _stack(self, count: Tensor) -> Policy:
        xp = ops_for(count)
        stacked = stack_heads(xp, self.policies, torch.empty(0, dtype=xp.widest, device=count.device))
        assert stacked is not None  # `rules_of` put policies of the same shape together
        return stacked

    def _warn_outside(self, policy: Policy, stats: RowStats) -> None:
        """Warn of rows outside the fitted range. In a model, prompts are checked and generated tokens are not."""
        if not self._has_range or (self.warned is not None and stats.count.shape[-1] == 1):
            return
        warned = WARNED if self.warned is None else self.warned
        if all(one in warned for one in self.policies):
            return
        values = getattr(stats, policy.reads)
        if ops_for(values).concrete(values) and bool(policy.outside(values, stats).any()):
            for place, one in enumerate(self.policies):
                one.warn_outside(stats if len(self.policies) == 1 else of_head(stats, place), self.warned)


class QueryScale:
    """Factors that multiply the query: `[H, D]`, with 1 in place of H (all heads alike) or of D (one β per head)."""

    def __init__(self, factors: Sequence[Sequence[float]]) -> None:
        self._values = factors
        self._factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def factors(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The factors `[H, 1, D]` on a device."""
        return _cached(
            self._factors, (device, dtype), lambda: torch.tensor(self._values, dtype=dtype, device=device)[:, None]
        )

    def __call__(self, query: Tensor) -> Tensor:
        """The query `[..., H, Lq, D]` times the factors, rounded once to its dtype.

        In float16 a row is multiplied by less where its product would overflow.
        """
        dtype = floats_at_least_32(query.dtype)
        factors = self.factors(query.device, dtype)
        check_frequencies(factors.shape[-1], query.shape[-1])
        if query.dtype == torch.float16:
            product = query * factors
            limit = largest_for(query.dtype) / product.detach().abs().amax(-1, keepdim=True)
            return (product * limit.clamp(max=1.0)).to(query.dtype)
        if query.dtype != dtype and is_plain(query, factors):
            # PyTorch's product of two dtypes runs several times slower than memory allows, but is quick to launch.
            if query.is_cuda and query.numel() >= _LARGE_QUERY and scales(query):
                return scale_features(query, factors)
            return torch.mul(query, factors, out=torch.empty_like(query))
        return (query * factors).to(query.dtype)


def _cached(kept: dict[K, T], key: K, make: Callable[[], T]) -> T:
    """`make()`, called once per key.

    Nothing new is kept while compiling, or inside a dispatch mode: a fake tensor, say, is of use in its mode alone.
    """
    if torch.compiler.is_compiling():
        return kept[key] if key in kept else make()
    if torch._C._len_torch_dispatch_stack():
        return make()
    if key not in kept:
        with torch.inference_mode(False):
            kept[key] = make()
    return kept[key]


def policies_of(policy: Policy, layer: int = 0) -> tuple[Policy, ...]:
    """The policies of one layer: one for all heads, or one per head."""
    return policy.policies[layer] if isinstance(policy, PerHead) else (policy,)


def rules_of(policies: Sequence[Policy], warned: Warned | None = None) -> tuple[Rule | QueryScale, ...]:
    """The rules of one layer, none if every policy is the identity. The layers of a model share `warned`."""
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
    # If every head has a constant, heads with β = 1 take part as constants: one product then serves the whole layer.
    whole = len({type(one) for one in policies}) == 1 and not any(one.needs for one in policies)
    for head, one in enumerate(policies):
        if whole or not one.is_identity:
            groups.setdefault(_shape_of(one), []).append(head)
    return tuple(
        PolicyRule([policies[h] for h in group], None if len(group) == len(policies) else tuple(group), warned)
        for group in groups.values()
    )


def _shape_of(policy: Policy) -> tuple[Any, ...]:
    """What policies must have in common to be computed together: kind, needs, and every field that is no number."""
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
        """Factors per rotary frequency, if there are any. They multiply the query before anything is measured."""

        self.rules: tuple[Rule, ...] = tuple(rule for rule in rules if not isinstance(rule, QueryScale))
        self.heads = heads
        self.policies = _head_policies(self.rules, heads)
        """The policy of all heads, or one per head. Empty if a rule is not made of policies."""

        # A compiler traces the policies instead, as their numbers may be variables.
        self.form = None if torch.compiler.is_compiling() or not self.policies else form_of(self.policies)
        """The policies as a table of numbers for the kernels; None if the kernels do not know one of them."""

        values = [one.value for one in self.policies if type(one) is Constant]
        fixed = len(values) == len(self.policies) > 0 and all(0.0 < one < _LARGEST_CONSTANT for one in values)
        self.by_constants = QueryScale([[one] for one in values]) if fixed else None
        """Multiplies the query `[..., H, Lq, D]` by β, if every head has a constant of ordinary size."""

        self.uniform = values[0] if fixed and len(set(values)) == 1 else None
        """The β of all rows, if it is one constant. The scale of the logits can take it in place of the query."""

        self._places: list[dict[torch.device, Tensor]] = [{} for _ in self.rules]
        self._tables: dict[torch.device, Coefficients] = {}
        self._checked_lengths: set[int] = set()
        warned = next((rule.warned for rule in self.rules if isinstance(rule, PolicyRule)), None)
        self._warned = WARNED if warned is None else warned

    @property
    def measures(self) -> bool:
        """Whether a rule reads more than the number of visible keys."""
        return any(rule.needs - COUNT for rule in self.rules)

    def prepare(self, device: torch.device) -> None:
        """Copy to a device what kernels read. Neither a compiled graph nor a captured CUDA graph can do it."""
        if self.form is not None:
            table_of(self.policies, device)
        for scale in (self.query_scale, None if self.uniform else self.by_constants):
            if type(scale) is QueryScale:
                scale.factors(device, torch.float32)

    def sharpen(
        self, call: AttentionCall, query: Tensor, mask: Tensor | None, impl: str = "auto", stats: RowStats | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """β·q for the caller's query `[..., H, Lq, D]`, and the mask, multiplied by β as well if it is added.

        `stats` are the statistics of all rows, if they were measured before.
        """
        if self.by_constants is not None and query.ndim >= 3 and not is_added(mask):
            return self.by_constants(query), mask
        found = None if stats is not None else self._by_kernels(call, query, impl)
        if found is not None and not is_added(mask):
            return found[0], mask
        beta = self.beta(call, impl, stats) if found is None else found[1]
        beta = fitting_beta(query, mask, beta)
        return scaled_queries(query, beta), scaled_mask(mask, beta)

    def beta(self, rows: AttentionCall | Logits, impl: str = "auto", stats: RowStats | None = None) -> Tensor:
        """β of every row, in a shape that broadcasts to that of the rows, in the dtype of statistics."""
        like = rows.values if isinstance(rows, Logits) else rows.q
        if len(self.rules) == 1 and self.rules[0].heads is None:
            return as_beta(_rule_beta(self.rules[0], rows, impl, stats), like.dtype)
        batch, queries = like.shape[0], like.shape[-2]
        if stats is not None:
            stats = stats.map(lambda x: x.reshape(batch, self.heads, queries))
        beta = like.new_ones((batch, self.heads, queries), dtype=floats_at_least_32(like.dtype))
        for rule, places in zip(self.rules, self._places, strict=True):
            heads = rule.heads or range(self.heads)
            place = _cached(places, like.device, functools.partial(torch.tensor, heads, device=like.device))
            chosen = None if stats is None else stats.map(functools.partial(take_heads, heads=place))
            part = as_beta(_rule_beta(rule, rows.of_heads(place), impl, chosen), like.dtype)
            beta = beta.index_copy(1, place, part.expand(batch, len(heads), queries))
        return beta.reshape(rows.rows)

    # The rest is for the kernels.

    def _by_kernels(self, call: AttentionCall, query: Tensor, impl: str) -> tuple[Tensor, Tensor] | None:
        """β·q and β in two launches (statistics; β and the product), or None if the kernels cannot do it."""
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
            self._check_range(call, parts)
        return scaled, beta

    def sharpen_unmasked(self, query: Tensor, key: Tensor, offset: int | None, scale: float) -> Tensor | None:
        """β·q for q `[B, H, Lq, D]` and k `[B, Hkv, Lk, D]` without a mask, at the least cost to the host.

        Returns None if `sharpen` has more to do: a gradient, or rows to compare with the range of a policy. Shapes are
        not checked.
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
        """The key and the value of `_plans` for `sharpen_unmasked`, and the coefficients. Layers share plans.

        None if β has no closed form, or if rows of this length have not been compared with the range of a policy yet.
        """
        form, bits, device = self.form, key.shape[2].bit_length(), query.device
        if form is None or form.solved or not (bits in self._checked_lengths or self._is_checked(bits)):
            return None
        table = self._table_on(device)
        if table is None:
            return None
        place = (layout(query), layout(key), offset, scale, form.needs, table.values.shape, *table.shape)
        return place, table, _plans.get(place)

    def decode(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor | None:
        """Attention of a few queries `[B, H, Lq, D]`, reading keys and values once; None if the kernels cannot do it.

        Without a mask every key is visible, however few the queries: this also serves encoders and cross-attention.
        """
        if self.form is None or not on_gpu(query) or query.shape[2] > MOST_QUERIES:
            return None
        plain = is_plain(query, key, value, mask)
        if decode_launch.obstacle(query, value) is not None or (not plain and learns(query, key, value, mask)):
            return None
        table = self._table_on(query.device) if plain else table_of(self.policies, query.device)
        if table is None:
            return None
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        run = decode_launch.decode if plain else decode_launch.decode_op
        found: list[Tensor] = run(query, key, value, None, None, mask, scale, *table, False, causal=False)
        return found[0]

    def _table_on(self, device: torch.device) -> Coefficients | None:
        """The coefficients on a device, outside of compilers and modes."""
        found = self._tables.get(device)
        if found is None and (found := table_of(self.policies, device)) is not None:
            self._tables[device] = found
        return found

    def _is_checked(self, bits: int) -> bool:
        """Whether rows of 2^bits keys need no comparison with the range of a policy any more: see `_check_range`."""
        if any(one.fitted_range is not None and (one, bits) not in self._warned for one in self.policies):
            return False
        self._checked_lengths.add(bits)
        return True

    def _check_range(self, call: AttentionCall, parts: Parts | None) -> None:
        """Warn of rows outside the range of a policy, once for every doubling of the number of keys.

        Reading statistics waits for the device, so not every call can do it, and rows leave the range as inputs grow.
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


_plans: dict[Any, SharpenPlan] = {}


def _rule_beta(rule: Rule, rows: AttentionCall | Logits, impl: str, stats: RowStats | None) -> Tensor:
    """β of a rule, measuring no more than it needs."""
    needs = rule.needs
    if not needs:
        device = (rows.values if isinstance(rows, Logits) else rows.q).device
        two_keys = functools.partial(torch.full, (1, 1), 2, dtype=torch.int64, device=device)
        return rule.beta(RowStats.anchored(_cached(_two_keys, device, two_keys)), None)
    if isinstance(rows, Logits):
        return rule.beta(rows.measure(needs), functools.partial(rows.measure, needs))
    if needs <= COUNT:
        return rule.beta(RowStats.anchored(rows.counts()), None)
    stats = measure(rows, impl, needs) if stats is None else stats
    return rule.beta(stats, lambda beta: measure(rows.scaled(beta), impl, needs))


_two_keys: dict[torch.device, Tensor] = {}
"""The count of a row of two keys, for rules that read nothing."""


def _head_policies(rules: Sequence[Rule], heads: int) -> tuple[Policy, ...]:
    """The policies behind the rules of a layer: one for all heads, or one per head."""
    known = [rule for rule in rules if isinstance(rule, PolicyRule)]
    if not known or len(known) < len(rules):
        return ()
    policies: list[Policy] = [IDENTITY] * heads
    for rule in known:
        if rule.heads is None and len(rule.policies) == 1:
            return rule.policies
        for place, head in enumerate(rule.heads or range(heads)):
            policies[head] = rule.policies[min(place, len(rule.policies) - 1)]
    return tuple(policies)


_sharpeners: dict[tuple[int, ...], tuple[tuple[Policy, ...], Sharpener]] = {}
_MOST_SHARPENERS = 512


def sharpener_for(policies: tuple[Policy, ...]) -> Sharpener:
    """The sharpener of one policy for all heads or of one per head, made once for the same objects."""
    if torch.compiler.is_compiling():
        return Sharpener(rules_of(policies), len(policies))
    key = tuple(map(id, policies))
    if key not in _sharpeners:
        if len(_sharpeners) >= _MOST_SHARPENERS:
            _sharpeners.clear()
        # The policies are kept beside their sharpener, so that no other object can get one of these ids.
        _sharpeners[key] = policies, Sharpener(rules_of(policies), len(policies))
    return _sharpeners[key][1]


def learns(*inputs: Tensor | None) -> bool:
    """Whether one of the inputs gets a gradient."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def scaled_queries(q: Tensor, beta: Tensor) -> Tensor:
    """β·q in the dtype of q, with β capped where the product would overflow. One launch on CUDA."""
    if q.is_cuda and torch._C._functorch.peek_interpreter_stack() is None and scales(q):
        beta = as_beta(beta, q.dtype).expand(q.shape[:-1])
        return scale_rows(q, beta) if is_plain(q, beta) else scale_op(q, beta)
    return (q * capped_beta(q, beta)[..., None]).to(q.dtype)


def is_added(mask: Tensor | None) -> bool:
    """Whether a mask is added to the logits. PyTorch's causal biases, which are subclasses, are not."""
    return mask is not None and type(mask) is Tensor and mask.is_floating_point()


def fitting_beta(q: Tensor, mask: Tensor | None, beta: Tensor) -> Tensor:
    """One β for the query and an added mask, capped where either product would overflow."""
    if mask is None or not is_added(mask) or not mask.shape[-1]:
        return beta
    # A quarter of the range, because numbers below minus half of it count as hidden.
    beta = capped_beta(mask.masked_fill(hidden_by(mask), 0.0), beta, share=0.25)
    return capped_beta(q, beta)


def scaled_mask(mask: Tensor | None, beta: Tensor) -> Tensor | None:
    """The mask of β·q: an added mask is part of the logits, so β multiplies it; entries that hide a key are kept."""
    if mask is None or not is_added(mask):
        return mask
    hidden = hidden_by(mask)
    # A mask that only hides keys needs no copy per head. On a GPU finding out would wait for the device.
    if mask.device.type == "cpu" and ops_for(mask).concrete(mask) and bool((hidden | (mask == 0)).all()):
        return mask
    scaled = mask.masked_fill(hidden, 0.0) * beta[..., None]
    return torch.where(hidden, mask, scaled.to(mask.dtype))
