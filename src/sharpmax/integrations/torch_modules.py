"""Policies in any torch module that attends by `scaled_dot_product_attention` or `nn.MultiheadAttention`.

While a policy is applied, hooks of the module enter a `TorchFunctionMode` around each of its forward passes. The mode
intercepts every call of these two functions and calls PyTorch's own with β·q for q. Nothing of torch or of the module
is replaced. After `restore`, `nn.MultiheadAttention` and `nn.TransformerEncoder` use their fused inference paths again.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from sharpmax.errors import UnsupportedError, reject
from sharpmax.integrations.transformers.attention import Observer
from sharpmax.integrations.transformers.support import attends_by_hand
from sharpmax.ops.attention import is_repeated
from sharpmax.ops.sharpen import Sharpener, policies_of, rules_of
from sharpmax.policies.base import Policy, Warned
from sharpmax.policies.per_head import PerHead, check_shape
from sharpmax.stats.call import Alignment, AttentionCall, as_autocast, broadcast

M = TypeVar("M", bound=nn.Module)
Sharper = tuple[Tensor, Tensor | None]
"""A query and the mask that goes with it."""

_APPLIED = "_sharpmax_applied"
_OBSERVERS = "_sharpmax_observers"
_CALL = nn.Module._call_impl.__code__
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


@dataclass(frozen=True)
class CallSite:
    """An attention call of a module, named by the path of the innermost module; `#2` is its second call in a pass."""

    name: str
    heads: int
    causal: bool = field(default=False, repr=False)


def call_sites(model: nn.Module, example_inputs: Any) -> tuple[CallSite, ...]:
    """The attention calls of one forward pass in evaluation mode without gradients, in order.

    `example_inputs` is a tensor, a tuple of positional arguments or a mapping of keyword arguments. The training flags
    of all modules and the random state are restored afterwards.

    >>> layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> call_sites(nn.TransformerEncoder(layer, 2), torch.zeros(1, 5, 16))[1]
    CallSite(name='layers.1.self_attn', heads=4)
    """
    return tuple(_trial(model, example_inputs).values())


def observable_sites(model: nn.Module, example_inputs: Any) -> tuple[CallSite, ...]:
    """`call_sites` of a module; an UnsupportedError if some of its attention cannot be observed."""
    sites = _trial(model, example_inputs)
    _check_sites(model, sites, skip_unsupported=False)
    return tuple(sites.values())


def run_example(model: nn.Module, inputs: Any) -> Any:
    """The output of one forward pass; `inputs` as in `call_sites`."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the module into evaluation mode; afterwards restore the mode of each of its parts."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


_Key = tuple[nn.Module, int]
"""A module and the number of its earlier attention calls in the same pass."""


def _trial(model: nn.Module, inputs: Any) -> dict[_Key, CallSite]:
    names = {part: name for name, part in model.named_modules()}
    found: dict[_Key, CallSite] = {}

    def note(key: _Key, call: AttentionCall) -> None:
        repeated = f"#{key[1] + 1}" if key[1] else ""
        name = (names.get(key[0]) or type(key[0]).__name__) + repeated
        found[key] = CallSite(name, call.heads, call.offset is not None)

    before = applied_to(model)
    put(model, None)
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(), _Pass(model, note=note):
            run_example(model, inputs)
    finally:
        put(model, before)
    return found


@dataclass(eq=False)
class Applied:
    """A policy applied to a module; None if its calls are only observed."""

    policy: Policy | None = None
    sites: Mapping[_Key, CallSite] = field(default_factory=dict)
    sharpeners: list[Sharpener] = field(default_factory=list)  # one for all call sites, or for `PerHead` one for each
    handles: list[RemovableHandle] = field(default_factory=list)

    def sharpener(self, key: _Key) -> Sharpener | None:
        """The sharpener of a call site."""
        if not isinstance(self.policy, PerHead):
            return self.sharpeners[0] if self.sharpeners else None
        if key not in self.sites:
            raise UnsupportedError(
                f"policy: {type(key[0]).__name__} attends where it did not with example_inputs, so the policy has no "
                "row for it; apply it with example_inputs that take the same path, or a policy that is not PerHead"
            )
        return self.sharpeners[list(self.sites).index(key)]


def apply_to_module(model: M, policy: Policy, example_inputs: Any = None, *, skip_unsupported: bool = False) -> M:
    """`sharpmax.apply` for a module that is not a transformers model."""
    before = applied_to(model)
    if example_inputs is not None:
        sites: Mapping[_Key, CallSite] = _trial(model, example_inputs)
    elif before is not None and before.sites:
        sites = before.sites
    else:
        allowed = f"inputs for one forward pass of {type(model).__name__}, to find its attention calls"
        reject("example_inputs", None, allowed, "pass a tensor, a tuple of arguments or a mapping of keyword arguments")
    _check_sites(model, sites, skip_unsupported)
    heads, warned = [site.heads for site in sites.values()], Warned()
    check_shape(policy, heads, type(model).__name__)
    rows = enumerate(heads if isinstance(policy, PerHead) else heads[:1])
    put(model, Applied(policy, sites, [Sharpener(rules_of(policies_of(policy, row), warned), n) for row, n in rows]))
    return model


def _check_sites(model: nn.Module, sites: Mapping[_Key, CallSite], skip_unsupported: bool) -> None:
    """Refuse a module without attention calls, or with attention that makes no such call."""
    reached = {part for part, _ in sites}
    by_hand = [
        f"{name or 'the module'} ({type(part).__name__})"
        for name, part in model.named_modules()
        if part not in reached and attends_by_hand(type(part))
    ]
    family, shown = type(model).__name__, ", ".join(by_hand[:4])
    if not sites:
        where = f" ({shown} attends by hand)" if shown else ""
        raise UnsupportedError(
            f"model: {family} called neither scaled_dot_product_attention nor nn.MultiheadAttention with these "
            f"example_inputs{where}; let its attention call sharpmax.attention or scaled_dot_product_attention, and do "
            "not compile it"
        )
    if by_hand and not skip_unsupported:
        raise UnsupportedError(
            f"model: {family} attends by hand in {shown}, which sharpmax cannot reach; let it call sharpmax.attention "
            "or scaled_dot_product_attention; apply leaves it at β = 1 with skip_unsupported=True"
        )


def applied_to(model: nn.Module) -> Applied | None:
    """The policy applied to a module, or None."""
    found: Applied | None = vars(model).get(_APPLIED)
    return found


def put(model: nn.Module, state: Applied | None) -> None:
    """Apply `state` in place of what is applied; None removes it."""
    before = vars(model).pop(_APPLIED, None)
    while before is not None and before.handles:
        before.handles.pop().remove()
    observers = vars(model).get(_OBSERVERS)
    if state is None and observers:
        state = Applied()
    if state is not None:
        vars(model)[_APPLIED] = state
        if observers or any(one.rules for one in state.sharpeners):
            state.handles.append(model.register_forward_pre_hook(_enter))
            state.handles.append(model.register_forward_hook(_leave, always_call=True))


@contextmanager
def observed(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Pass every attention call of a module to `observer`, numbered within each pass."""
    observers: list[Observer] = vars(model).setdefault(_OBSERVERS, [])
    observers.append(observer)
    put(model, applied_to(model))
    try:
        yield
    finally:
        observers.remove(observer)
        if not observers:
            vars(model).pop(_OBSERVERS, None)
        state = applied_to(model)
        put(model, None if state is None or state.policy is None else state)


class AttentionCalls(TorchFunctionMode):
    """Passes every attention call of this thread to `sharpened`, which returns its final query and mask.

    With `compiled`, compiled code calls the original functions; otherwise these calls break its graph.
    """

    compiled = False

    def sharpened(self, query: Tensor, mask: Tensor | None, call: AttentionCall) -> Sharper | None:
        """The query `[..., H, Lq, D]` and the mask for PyTorch's function; None leaves both unchanged."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Call attention functions with the sharpened query, and other functions as they are."""
        kwargs = kwargs or {}
        if not (self.compiled and torch.compiler.is_compiling()):
            if func is F.scaled_dot_product_attention:
                return self._attend(*args, **kwargs)
            if func is F.multi_head_attention_forward:
                return self._multi_head_attention(**_MULTI_HEAD.bind(*args, **kwargs).arguments)
        return func(*args, **kwargs)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        query, key, value, attn_mask = as_autocast(query, key, value, attn_mask)
        query, mask = self._sharpened(query, key, attn_mask, is_causal, options.get("scale"))
        return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, **options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _sharpened(
        self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
    ) -> Sharper:
        """`sharpened` for inputs whose leading axes broadcast, as torch allows."""
        if query.is_nested or key.is_nested:
            raise UnsupportedError("query: nested tensors cannot be measured; pass padded tensors with a mask")
        wide = query
        tensors = [x for x in (query, key, mask) if type(x) is Tensor and x.ndim > 2]
        if tensors:
            batch = broadcast(*(x.shape[:-3] for x in tensors)) or ()
            wide = query.expand(*batch, max(x.shape[-3] for x in tensors), *query.shape[-2:])
            key = key.expand(*batch, key.shape[-3] if key.ndim > 2 else 1, *key.shape[-2:])
        return self.sharpened(wide, mask, _call(wide, key, mask, is_causal, scale)) or (query, mask)

    def _multi_head_attention(
        self, query: Tensor, key: Tensor, value: Tensor, num_heads: int, in_proj_bias: Tensor | None, dropout_p: float,
        training: bool = True, need_weights: bool = True, average_attn_weights: bool = True, **given: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """`F.multi_head_attention_forward`: query `[Lq, B, E]` or `[Lq, E]`, key and value likewise."""
        if given["add_zero_attn"] or any(given.get(name) is not None for name in ("bias_k", "static_k", "static_v")):
            raise UnsupportedError(
                "model: nn.MultiheadAttention with add_bias_kv, add_zero_attn or static keys cannot have a policy; "
                "allowed: one without"
            )
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        separate = [given.get(f"{name}_proj_weight") for name in "qkv"]
        weights = separate if given.get("use_separate_proj_weight") else given["in_proj_weight"].chunk(3)
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)

        def heads_of(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
            return F.linear(x, weight, bias).view(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3)

        q, k, v = (heads_of(*each) for each in zip((query, key, value), weights, biases, strict=True))
        mask = _merged_mask(given.get("attn_mask"), given.get("key_padding_mask"), q, k)
        found: Tensor | None = None
        dropout_p = dropout_p if training else 0.0
        if need_weights:
            sharper, mask = self._sharpened(q, k, mask, False, None)
            found = torch.matmul(sharper * q.shape[-1] ** -0.5, k.transpose(-2, -1))
            if mask is not None:
                found = found + mask
            found = F.dropout(found.softmax(-1), dropout_p)
            out = torch.matmul(found, v)
        else:
            out = self._attend(q, k, v, mask, dropout_p)
        out = F.linear(out.permute(2, 0, 1, 3).flatten(2), given["out_proj_weight"], given["out_proj_bias"])
        if found is not None:
            found = found.mean(1) if average_attn_weights else found
            found = found if batched else found.squeeze(0)
        return out if batched else out.squeeze(1), found


def _merged_mask(mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The masks of `nn.MultiheadAttention`, whose True means hidden, as one additive mask."""
    parts = []
    if mask is not None:
        parts.append(mask if mask.ndim == 2 else mask.view(*query.shape[:2], *mask.shape[1:]))
    if padding is not None:
        parts.append(padding.view(-1, 1, 1, key.shape[2]))
    zero = query.new_zeros(())
    added = [torch.where(part, -torch.inf, zero) if part.dtype == torch.bool else part.to(query) for part in parts]
    return sum(added, zero) if added else None


def _call(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> AttentionCall:
    causal: Alignment | None = "upper-left" if is_causal else None
    call = AttentionCall.of(query, key, mask, causal=causal, scale=scale, enable_gqa=True)
    whole = None if call.mask is None else call.mask.expand(-1, -1, -1, -1, call.keys)
    return replace(call, mask=whole)


class ObservedCalls(AttentionCalls):
    """Passes every attention call of this thread to `observer`, numbered by `number()`; compiled code has none."""

    compiled = True

    def __init__(self, observer: Observer, number: Callable[[], int]) -> None:
        super().__init__()
        self._observer, self._number = observer, number

    def sharpened(self, query: Tensor, mask: Tensor | None, call: AttentionCall) -> Sharper | None:
        """Show the call to the observer and change nothing."""
        if not is_repeated():
            _show(self._observer, call, self._number())
        return None


def _show(observer: Observer, call: AttentionCall, number: int) -> None:
    mask = None if call.mask is None else call.mask.detach()
    rows = (call.batch, call.heads, call.queries)
    with torch.no_grad():
        observer(replace(call, q=call.q.detach(), k=call.k.detach(), mask=mask, rows=rows, layer=number))


class _Pass(AttentionCalls):
    """The attention calls of one forward pass of a module, each with the policy of its call site."""

    def __init__(self, model: nn.Module, *, note: Callable[[_Key, AttentionCall], None] | None = None) -> None:
        super().__init__()
        self.model, self._note = model, note
        self._state = applied_to(model) or Applied()
        self._counts: Counter[nn.Module] = Counter()

    def sharpened(self, query: Tensor, mask: Tensor | None, call: AttentionCall) -> Sharper | None:
        """β·q by the policy of the innermost running module, and its mask."""
        caller = _caller(self.model)
        if caller is None:  # an interrupt ended the pass without calling its hooks
            return None
        key, number = (caller, self._counts[caller]), self._counts.total()
        self._counts[caller] += 1
        if self._note is not None:
            self._note(key, call)
            return None
        sharpener = self._state.sharpener(key)
        sharper = None
        if sharpener is not None and sharpener.rules:
            sharper = query, mask = sharpener.sharpen(call, query, mask)
        if observers := vars(self.model).get(_OBSERVERS):
            heads = () if query.ndim == 2 else (*query.shape[:-3], -1)
            keys = call.k.reshape(*heads, *call.k.shape[-2:])
            call = _call(query, keys, mask, call.offset is not None and mask is None, call.scale)
            for observer in list(observers):
                _show(observer, call, number)
        return sharper


def _caller(model: nn.Module) -> nn.Module | None:
    """The innermost running module if `model` runs in this thread, otherwise None."""
    frame: FrameType | None = sys._getframe(1)
    innermost: nn.Module | None = None
    while frame is not None:
        if frame.f_code is _CALL:
            part = frame.f_locals["self"]
            innermost = part if innermost is None else innermost
            if part is model:
                return innermost
        elif frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            raise UnsupportedError(
                f"model: {type(model).__name__} uses gradient checkpointing, which computes attention again after the "
                "forward pass, where no policy is applied; allowed: torch.utils.checkpoint switched off"
            )
        frame = frame.f_back
    return None


class _Here(threading.local):
    def __init__(self) -> None:
        self.passes: list[_Pass] = []  # of this thread, the innermost last

    def end(self) -> None:
        self.passes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


_here = _Here()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter(model: nn.Module, args: Any) -> None:
    """Before each pass of a module."""
    while _here.passes and _caller(_here.passes[-1].model) is None:
        _here.end()
    _here.passes.append(_Pass(model))
    _here.passes[-1].__enter__()  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave(model: nn.Module, args: Any, out: Any) -> None:
    """After each pass of a module, or an error in it."""
    if _here.passes and _here.passes[-1].model is model:
        _here.end()
