"""Attention with a temperature per row behind transformers' attention interface.

`install(model, rules_of_layer)` is the seam everything else is built on. It gives every attention module of the model
the rules for its layer: `rules_of_layer(number)` returns the `Rule`s (see `sharpmax.ops.attention`) of the layer with
that number, counted over the modules that attend in the order of `model.modules()`; none leaves the layer alone. A
rule names the heads it speaks for, the statistics it needs, and gives β, which may require gradients: whatever it is
computed from learns. Heads without a rule keep β = 1. `apply` installs the rules of a policy; calibration installs
rules whose parameters are trained.

Nothing of transformers is patched: an attention function and its mask function are registered under names of our own,
the configurations of the model name them, and the call is handed on to the implementation the model used before, with
β·q for q. What a mask hides does not count: under a sliding window n is at most the window.

A change is one for all layers: a forward pass that is running in another thread goes on with what was installed when it
began (see `passes`). Another model with the same configuration object keeps computing the baseline.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sharpmax.errors import UnsupportedError
from sharpmax.integrations.transformers.attention import Layer, Observer, Observers, Repeated, sharp_attention
from sharpmax.integrations.transformers.passes import Pass, begin, end
from sharpmax.integrations.transformers.support import (
    LAYER,
    NAMES,
    AttentionModule,
    attention_modules,
    check_model,
    require_transformers,
)
from sharpmax.ops.attention import QueryScale, Rule
from sharpmax.policies.base import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INSTALLED = "_sharpmax_installed"
_OBSERVERS = "_sharpmax_observers"
_changing = threading.RLock()
"""Held by the thread that changes what is installed in a model, or notes that a pass begins or ends."""

_holders: dict[int, weakref.WeakSet[Installed]] = {}
"""By the id of a configuration, on whose behalf it says a name of ours: models may share it."""


@dataclass(frozen=True, eq=False)
class Installed:
    """What is installed in a model: enough to put it in place again."""

    modules: Sequence[AttentionModule]
    layers: Sequence[Layer]
    policy: Policy | None
    """The policy the rules were made of, if any."""

    methods: Mapping[str, Any]
    """Methods that the model has instead of its own for as long."""

    own: dict[str, Any] = field(default_factory=dict)
    """What the model itself (not its class) had under the names of those methods."""

    observed_only: bool = False
    """Whether it is there for observers alone, and goes with the last of them."""

    guard: list[RemovableHandle] = field(default_factory=list)
    """The hook before each pass, while this is in place."""

    leaving: list[RemovableHandle] = field(default_factory=list)
    """The hook after each pass, while this is in place or a pass uses it."""

    passes: set[Pass] = field(default_factory=set)
    """The passes that use it."""

    @cached_property
    def by_module(self) -> Mapping[nn.Module, Layer]:
        """The layers by their modules."""
        return {one.module: layer for one, layer in zip(self.modules, self.layers, strict=True)}

    def __getstate__(self) -> dict[str, Any]:
        """No pass uses a copy, or what comes back from a pickle."""
        return {key: value for key, value in vars(self).items() if key != "by_module"} | {"passes": set()}

    def __setstate__(self, values: dict[str, Any]) -> None:
        """The configurations of a copy say what is behind ours (`support.NAMES`) until this is in place."""
        vars(self).update(values)
        _register()
        with _changing:
            _hold(self)


def modules_of(model: PreTrainedModel, *, skip_unsupported: bool = False) -> Sequence[AttentionModule]:
    """The attention modules of a model, as they are without rules; or an error that says why it cannot have any.

    Of a model with rules these are the modules that got them: what was left out then is left out here.
    """
    before = installed(check_model(model))
    return attention_modules(model, skip_unsupported=skip_unsupported) if before is None else before.modules


def install(
    model: PreTrainedModel,
    rules_of_layer: Callable[[int], Sequence[Rule | QueryScale]],
    *,
    policy: Policy | None = None,
    methods: Mapping[str, Callable[..., Any]] | None = None,
    skip_unsupported: bool = False,
) -> Installed:
    """Let the rules of each layer choose β in the model's attention; what was installed before is replaced.

    Every check comes before the first change. `put(model, None)` takes everything out again. `methods` stand in for
    the model's own for as long.
    """
    modules = modules_of(model, skip_unsupported=skip_unsupported)
    layers = [
        Layer(one.inner, one.function, one.heads, tuple(rules_of_layer(number)), number)
        for number, one in enumerate(modules)
    ]
    for one, layer in zip(modules, layers, strict=True):
        for parameter in one.module.parameters():
            if parameter.is_cuda:
                layer.sharpener.prepare(parameter.device)
            break
    bound = {name: partial(method, model) for name, method in (methods or {}).items()}
    now = Installed(modules, layers, policy, bound)
    put(model, now)
    return now


def repeated(model: PreTrainedModel, places: Tensor) -> AbstractContextManager[None]:
    """Let every layer of a model with rules see its keys at `places` `[B, Lk']`, in that order, −1 being none.

    A key may be there several times: attention is then what it would be among so many alike. For causal
    self-attention to whole sequences without a mask, that is without a cache and without padding before the end.
    """
    same = Repeated(places)
    return repeating(model, lambda layer: same)


@contextmanager
def repeating(model: PreTrainedModel, how: Callable[[Layer], Repeated]) -> Iterator[None]:
    """Let each layer of a model with rules see the keys that `how` gives it."""
    state = installed(model)
    if state is None:
        raise UnsupportedError("repeated: the model has no rules installed; apply a policy first, None being one")
    for layer in state.layers:
        layer.repeated = how(layer)
    try:
        yield
    finally:
        for layer in state.layers:
            layer.repeated = None


def installed(model: PreTrainedModel) -> Installed | None:
    """What is installed in a model, or None."""
    return vars(model).get(_INSTALLED)


def observe(model: PreTrainedModel, observer: Observer) -> Callable[[], None]:
    """Show `observer` every call of attention in the model, until the function returned is called.

    Policies may come and go meanwhile. What a observer sees is what the model computes, in the thread that computes it;
    an error of its own ends the call. A compiled model shows nothing.
    """
    with _changing:
        before = installed(check_model(model))
        if before is None:
            modules_of(model)  # what cannot be observed is refused before anything changes
        observers = _observers(model)
        observers.active += (observer,)
        if before is None:
            _put(model, None)

    def remove() -> None:
        with _changing:
            observers.active = tuple(one for one in observers.active if one is not observer)
            state = installed(model)
            if not observers.active and state is not None and state.observed_only:
                _put(model, None)

    return remove


@contextmanager
def observed(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """`observe` for a `with` block."""
    remove = observe(model, observer)
    try:
        yield
    finally:
        remove()


def _observers(model: PreTrainedModel) -> Observers:
    found: Observers = vars(model).setdefault(_OBSERVERS, Observers())
    return found


def _for_observers(model: PreTrainedModel) -> Installed | None:
    """What is installed where nobody asks for rules: nothing, unless someone observes."""
    if not _observers(model).active:
        del vars(model)[_OBSERVERS]
        return None
    modules = modules_of(model)
    layers = [Layer(one.inner, one.function, one.heads, (), number) for number, one in enumerate(modules)]
    return Installed(modules, layers, None, {}, observed_only=True)


def put(model: PreTrainedModel, state: Installed | None) -> None:
    """Make `state`, of this model, the one installed; None leaves the model as it was before anything was."""
    with _changing:
        _check_inside(model)
        _put(model, state)


@dataclass(eq=False)
class _Block:
    """A `with` block at whose end a model gets back what was installed before."""

    before: Installed | None
    thread: str


_blocks: weakref.WeakKeyDictionary[nn.Module, list[_Block]] = weakref.WeakKeyDictionary()
"""The open blocks of each model, the innermost last."""

# A thread has a context of its own, and so has a task of asyncio; a task that a block starts is inside of that block.
_inside: ContextVar[tuple[_Block, ...]] = ContextVar("sharpmax_blocks", default=())


@contextmanager
def kept(model: PreTrainedModel) -> Iterator[None]:
    """Whatever is installed inside the block, at its end the model has what it had before.

    Until then, nothing can be installed from outside the block, that is by another thread or task.
    """
    with _changing:
        _check_inside(model)
        block = _Block(installed(model), threading.current_thread().name)
        _blocks.setdefault(model, []).append(block)
    _inside.set((*_inside.get(), block))
    try:
        yield
    finally:
        in_order = _close(model, block)
    if not in_order:
        raise UnsupportedError(
            "applied: a block ended before one that was opened inside it, whose policy is still in place; "
            "allowed: blocks that end in the reverse of the order in which they began"
        )


def _close(model: PreTrainedModel, block: _Block) -> bool:
    """End a block; False if it is not the innermost one, which then gives back what this one would have."""
    _inside.set(tuple(one for one in _inside.get() if one is not block))
    with _changing:
        blocks = _blocks[model]
        place = blocks.index(block)
        del blocks[place]
        before, block.before = block.before, None
        if place < len(blocks):
            blocks[place].before = before
            return False
        if not blocks:
            del _blocks[model]
        if installed(model) is not before:
            _put(model, before)
    return True


def _check_inside(model: PreTrainedModel) -> None:
    """Refuse a change from outside the innermost block, which would take its policy away or outlive it."""
    blocks = _blocks.get(model)
    if blocks and blocks[-1] not in _inside.get():
        raise UnsupportedError(
            f"model: a block of another thread or task has put a policy in it (`with applied(…)`, in the thread "
            f"{blocks[-1].thread!r}), and two that overlap would undo each other; allowed: one after the other, "
            "or a copy of the model for each (copy.deepcopy)"
        )


def _put(model: PreTrainedModel, state: Installed | None) -> None:
    _register()
    before = installed(model)
    if state is None or state.observed_only:
        state = _for_observers(model)
    if before is not None:
        del vars(model)[_INSTALLED]
        for one in before.modules:
            vars(one.module).pop(LAYER, None)
            one.replace_own_rule(False)
        for name in before.methods:
            del vars(model)[name]
        vars(model).update(before.own)
        before.guard.pop().remove()
        before.passes.difference_update([one for one in before.passes if not one.runs()])
    if state is not None:
        state.own.update({name: vars(model)[name] for name in state.methods if name in vars(model)})
        vars(model).update(state.methods)
        state.guard.append(model.register_forward_pre_hook(_enter))
        if not state.leaving:
            state.leaving.append(model.register_forward_hook(_leave, always_call=True))
        for one, layer in zip(state.modules, state.layers, strict=True):
            layer.observers, layer.model, layer.guard = _observers(model), model, state.guard[0]
            vars(one.module)[LAYER] = layer
            one.replace_own_rule(any(other.rules or other.query_scale for other in state.layers))
        _hold(state)
        vars(model)[_INSTALLED] = state
    if before is not None and before is not state and not before.passes:
        _let_go(before)


def _hold(state: Installed) -> None:
    """Let the configurations of a model name our attention."""
    for one in state.modules:
        key = id(one.config)
        if key not in _holders:
            _holders[key] = weakref.WeakSet()
            weakref.finalize(one.config, _holders.pop, key, None).atexit = False
        _holders[key].add(state)
        one.config._attn_implementation_internal = NAMES[one.inner]


def _let_go(state: Installed, *, late: bool = False) -> None:
    """Let the configurations name the model's own attention again, unless something else still needs ours.

    `late` is after the last pass: somebody may have chosen another attention meanwhile, which then stays.
    """
    state.leaving.pop().remove()
    for one in state.modules:
        holders = _holders[id(one.config)]
        holders.discard(state)
        if not holders and not (late and one.config._attn_implementation not in NAMES.values()):
            one.config._attn_implementation_internal = one.inner


def _enter(model: PreTrainedModel, args: Any) -> None:
    """Before each pass through a model: check that its attention is in use, and note what is installed."""
    if torch.compiler.is_compiling():
        _check_in_use(installed(model))
        return
    with _changing:
        state = installed(model)
        _check_in_use(state)
        if state is not None:
            begin(model, state)


def _leave(model: PreTrainedModel, args: Any, out: Any) -> None:
    """After each pass through a model, or an error in it: forget what was noted."""
    if torch.compiler.is_compiling():
        return
    with _changing:
        state = end(model)
        if isinstance(state, Installed) and not state.passes and installed(model) is not state:
            _let_go(state, late=True)


def _check_in_use(state: Installed | None) -> None:
    """Something else may have changed the attention meanwhile (Whisper's token timestamps do): not silently."""
    for one in () if state is None else state.modules:
        if one.config._attn_implementation != NAMES[one.inner]:
            raise UnsupportedError(
                f"attn_implementation: it became {one.config._attn_implementation!r} while a policy was applied, which "
                "would be ignored; restore the model, change it there, and apply the policy again"
            )


def _register() -> None:
    """Tell transformers our names, each with the mask function of the implementation that is called in the end."""
    transformers, masking = require_transformers(), require_transformers("masking_utils")
    for inner, name in NAMES.items():
        transformers.AttentionInterface.register(name, sharp_attention)
        transformers.AttentionMaskInterface.register(name, masking.ALL_MASK_ATTENTION_FUNCTIONS[inner])
